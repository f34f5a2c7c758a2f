"""Settings become a store: a server by its address, the embedded engine by its folder, or none."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from hybridtei.config import StoreConfig
from hybridtei.errors import LoadError, StoreError

if TYPE_CHECKING:
    from hybridtei.store.base import Store


def open_store(config: StoreConfig, *, patient: bool = True) -> Store | None:
    """The store that the settings name; None if they name none. It connects, or starts its process, when first asked.

    `patient`: calls to a server that is away are tried again for `qdrant_patience`; else they fail within two seconds.
    Raises StoreError if both or an unusable one is named, LoadError if software for it is missing.
    """
    if config.qdrant_url is None and config.qdrant_path is None:
        return None
    if config.qdrant_url is not None and config.qdrant_path is not None:
        raise StoreError(
            "`qdrant_url` and `qdrant_path` are both given: a server keeps the vectors, or a folder here, not both"
        )
    _require("qdrant_client" if config.qdrant_url is not None else "qdrant_edge")
    if config.qdrant_url is not None:
        from hybridtei.store.server import ServerStore

        return ServerStore(config, patient=patient)
    from hybridtei.store.embedded.store import EdgeStore

    assert config.qdrant_path is not None
    return EdgeStore(config.qdrant_path, timeout_s=config.qdrant_timeout)


def _require(*modules: str) -> None:
    for module in ("qdrant_client", *modules):
        if find_spec(module) is None:
            raise LoadError(f"the package `{module}` is missing: pip install 'hybridtei[qdrant]'")
