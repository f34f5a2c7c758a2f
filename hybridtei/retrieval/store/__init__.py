"""Vectors in Qdrant: a server or cluster, or the engine embedded in a process of its own. Needs the
extra `qdrant`.

The default store is the folder `./qdrant`, which `ingest`, `search` and `eval` share. It is visible
in the working folder, unlike a cache, which other programs may empty.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hybridtei.config import StoreConfig
from hybridtei.errors import StoreError
from hybridtei.system.machine import require_extra, require_unix

if TYPE_CHECKING:
    from hybridtei.retrieval.store.base import Store

DEFAULT_PATH = "qdrant"


def place_of(config: StoreConfig) -> str:
    """The store's description in messages."""
    if config.qdrant_url is not None:
        return f"Qdrant at {config.qdrant_url}"
    return f"embedded Qdrant in {Path(config.qdrant_path or DEFAULT_PATH).resolve()}"


@asynccontextmanager
async def opened(config: StoreConfig) -> AsyncIterator[Store]:
    """A context with the store of the settings. Raises the errors of `open_store`."""
    store = open_store(config)
    try:
        yield store
    finally:
        await store.close()


def open_store(config: StoreConfig, *, patient: bool = True) -> Store:
    """The store of the settings, by default the folder `./qdrant`. It connects, or starts its
    process, at the first call.

    `patient`: retry calls to an unavailable server for `qdrant_patience`; otherwise they fail
    within two seconds. Raises StoreError if both or an unusable one is named, LoadError if a
    package is missing.
    """
    if not isinstance(config, StoreConfig):
        raise StoreError(
            f"the store is {config!r}: should be `StoreConfig(qdrant_path=…)`, or with a "
            "`qdrant_url`"
        )
    if config.qdrant_url is not None and config.qdrant_path is not None:
        raise StoreError(
            "`qdrant_url` and `qdrant_path` are both given: a server keeps the vectors, or a "
            "folder here, not both"
        )
    require_extra("qdrant", "qdrant_client")
    if config.qdrant_url is not None:
        from hybridtei.retrieval.store.server import ServerStore

        return ServerStore(config, patient=patient)
    require_unix("the embedded Qdrant engine")
    require_extra("qdrant", "qdrant_edge")
    from hybridtei.retrieval.store.embedded import EmbeddedStore

    name = config.qdrant_path
    if name is None:
        name = DEFAULT_PATH
    path = Path(name).absolute()
    folder = next(place for place in (path, *path.parents) if place.exists())
    if not name or not folder.is_dir():
        raise StoreError(f"`qdrant_path` {name!r} should be a folder, or a new one")
    if (path / "meta.json").is_file() and (path / "collection").is_dir():
        raise StoreError(
            f"{path}: a folder of qdrant-client's local mode, which no other program reads; copy "
            "it to a server by that client's `migrate`, and name the server as `qdrant_url`"
        )
    return EmbeddedStore(name, timeout_s=config.qdrant_timeout)
