"""Hybrid retrieval: dense, sparse and multi-vectors of a text from one forward pass.

Importing this package loads neither torch nor onnxruntime; the names below are fetched when first used. It turns off the usage
reports of dependencies. Run as `python -m hybridtei`, it also takes the working folder off `sys.path`, where `-m` has put it: a
file `msgspec.py` among somebody's documents is not ours to run.
"""

from __future__ import annotations

import os
import sys

if sys.argv[:1] == ["-m"] and sys.path[:1] == [os.getcwd()] and not sys.flags.safe_path:
    del sys.path[0]

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from hybridtei import telemetry

if TYPE_CHECKING:
    from hybridtei.encoder import Encoder
    from hybridtei.errors import HybridTeiError
    from hybridtei.outputs import Embeddings

telemetry.turn_off()

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
