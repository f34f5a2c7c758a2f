"""Where vectors go if nobody says where: `./qdrant`, which `ingest`, `search` and `eval` share.

In the working folder and in plain sight, unlike a cache, which others may empty, and which nobody thinks of when they clean up.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import msgspec

from hybridtei.config import StoreConfig
from hybridtei.system.cache_folder import cache_folder

DEFAULT_PATH = "qdrant"


def with_default(config: StoreConfig) -> StoreConfig:
    """The settings, with the folder `./qdrant` where they name no store."""
    if config.qdrant_url is not None or config.qdrant_path is not None:
        return config
    return msgspec.structs.replace(config, qdrant_path=DEFAULT_PATH)


def place_of(config: StoreConfig) -> str:
    """The store, for people."""
    if config.qdrant_url is not None:
        return f"Qdrant at {config.qdrant_url}"
    return f"embedded Qdrant in {Path(config.qdrant_path or DEFAULT_PATH).resolve()}"


def state_folder(config: StoreConfig) -> Path:
    """Where ingests remember what a store has: in its own folder, or in the user's cache, by the server's address."""
    if config.qdrant_url is None:
        return Path(config.qdrant_path or DEFAULT_PATH) / ".ingest"
    return cache_folder("ingest") / f"server-{blake2b(config.qdrant_url.rstrip('/').encode(), digest_size=8).hexdigest()}"
