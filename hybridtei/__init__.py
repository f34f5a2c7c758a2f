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

from hybridtei.system import child_process as telemetry

if TYPE_CHECKING:
    from hybridtei.encoder import Encoder
    from hybridtei.errors import HybridTeiError
    from hybridtei.integrations.langchain import HybridSparseEmbeddings
    from hybridtei.outputs import Embeddings
    from hybridtei.search.local import LocalSearch, query_model, rank_by
    from hybridtei.search.query import hybrid_query, score_requests
    from hybridtei.search.schema import filter_from
    from hybridtei.search.searcher import Found, Hit, QueryModel, Searcher, SearchOptions
    from hybridtei.store.collection import check_fits, create_arguments, plan_for, query_arguments
    from hybridtei.store.open import open_store
    from hybridtei.store.points import as_lists, point_id, to_points

telemetry.turn_off()

try:
    __version__ = version("hybridtei")
except PackageNotFoundError:  # run from a source tree
    __version__ = "0+unknown"

_HOMES = {
    "encoder": ("Encoder",),
    "errors": ("HybridTeiError",),
    "outputs": ("Embeddings",),
    "integrations.langchain": ("HybridSparseEmbeddings",),
    "search.local": ("LocalSearch", "query_model", "rank_by"),
    "search.query": ("hybrid_query", "score_requests"),
    "search.schema": ("filter_from",),
    "search.searcher": ("Found", "Hit", "QueryModel", "SearchOptions", "Searcher"),
    "store.collection": ("check_fits", "create_arguments", "plan_for", "query_arguments"),
    "store.open": ("open_store",),
    "store.points": ("as_lists", "point_id", "to_points"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Embeddings",
    "Encoder",
    "Found",
    "Hit",
    "HybridSparseEmbeddings",
    "HybridTeiError",
    "LocalSearch",
    "QueryModel",
    "SearchOptions",
    "Searcher",
    "__version__",
    "as_lists",
    "check_fits",
    "create_arguments",
    "filter_from",
    "hybrid_query",
    "open_store",
    "plan_for",
    "point_id",
    "query_arguments",
    "query_model",
    "rank_by",
    "score_requests",
    "to_points",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("hybridtei"):
            raise
        raise ImportError(f"{name} needs an extra: pip install 'hybridtei[qdrant]' ({error})") from error


def __dir__() -> list[str]:
    return sorted(__all__)
