"""Hybrid retrieval: dense, sparse and multi-vectors of a text from one forward pass.

Importing this package loads neither torch nor onnxruntime; the names below are fetched when first used.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridtei.encoder import Encoder
    from hybridtei.errors import HybridTeiError
    from hybridtei.outputs import Embeddings

try:
    __version__ = version("hybridtei")
except PackageNotFoundError:  # run from a source tree
    __version__ = "0+unknown"

_HOMES = {"Encoder": "hybridtei.encoder", "Embeddings": "hybridtei.outputs", "HybridTeiError": "hybridtei.errors"}
__all__ = ["Embeddings", "Encoder", "HybridTeiError", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
