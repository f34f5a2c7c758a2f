"""Hybrid retrieval: dense, sparse and multi-vectors of a text from one forward pass.

All public names are here, with every error of `hybridtei.errors`; other modules are internal. A
name is imported at its first use, so importing this package loads neither torch nor onnxruntime.
The import turns off usage reports of dependencies. For `python -m hybridtei` it removes from
`sys.path` the working folder that `-m` adds: a `msgspec.py` among the user's documents must not
run.
"""

from __future__ import annotations

import os
import sys

if sys.argv[:1] == ["-m"] and sys.path[:1] == [os.getcwd()] and not sys.flags.safe_path:
    del sys.path[0]

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from hybridtei import errors
from hybridtei.errors import *  # noqa: F403
from hybridtei.system import machine

if TYPE_CHECKING:
    from hybridtei.batch import Head as Head
    from hybridtei.batch import Ragged as Ragged
    from hybridtei.client import AsyncClient as AsyncClient
    from hybridtei.client import Client as Client
    from hybridtei.client import Upserted as Upserted
    from hybridtei.config import EngineConfig as EngineConfig
    from hybridtei.config import ModelConfig as ModelConfig
    from hybridtei.config import NamedModel as NamedModel
    from hybridtei.config import ServerConfig as ServerConfig
    from hybridtei.config import StoreConfig as StoreConfig
    from hybridtei.encoder import Encoder as Encoder
    from hybridtei.inference.tasks.label import Prediction as Prediction
    from hybridtei.inference.tasks.label import Span as Span
    from hybridtei.inference.tasks.rerank import Ranked as Ranked
    from hybridtei.options import EmbedOptions as EmbedOptions
    from hybridtei.options import MultivectorBudget as MultivectorBudget
    from hybridtei.options import RankOptions as RankOptions
    from hybridtei.outputs import Embeddings as Embeddings
    from hybridtei.outputs import SparseVectors as SparseVectors
    from hybridtei.retrieval.ingest.run import ingest as ingest
    from hybridtei.retrieval.langchain import HybridSparseEmbeddings as HybridSparseEmbeddings
    from hybridtei.retrieval.search.index import Index as Index
    from hybridtei.retrieval.search.options import SearchHit as SearchHit
    from hybridtei.retrieval.search.options import SearchOptions as SearchOptions
    from hybridtei.retrieval.search.options import SearchResult as SearchResult
    from hybridtei.retrieval.search.options import StoredPoint as StoredPoint
    from hybridtei.retrieval.search.searcher import Searcher as Searcher
    from hybridtei.retrieval.search.searcher import TextModel as TextModel
    from hybridtei.retrieval.store import open_store as open_store
    from hybridtei.retrieval.store.collection import check_fits as check_fits
    from hybridtei.retrieval.store.plan import schema_for as schema_for
    from hybridtei.retrieval.store.points import point_id as point_id
    from hybridtei.retrieval.store.points import to_points as to_points
    from hybridtei.retrieval.store.query import filter_from as filter_from
    from hybridtei.retrieval.store.server import as_lists as as_lists
    from hybridtei.retrieval.store.server import create_arguments as create_arguments

machine.turn_off_telemetry()

try:
    __version__ = version("hybridtei")
except PackageNotFoundError:
    # Run from a source tree
    __version__ = "0+unknown"

_NAMES_OF = {
    "hybridtei.batch": "Head Ragged",
    "hybridtei.client": "AsyncClient Client Upserted",
    "hybridtei.config": "EngineConfig ModelConfig NamedModel ServerConfig StoreConfig",
    "hybridtei.encoder": "Encoder",
    "hybridtei.retrieval.ingest.run": "ingest",
    "hybridtei.retrieval.langchain": "HybridSparseEmbeddings",
    "hybridtei.outputs": "Embeddings SparseVectors",
    "hybridtei.retrieval.search.index": "Index",
    "hybridtei.retrieval.search.options": "SearchHit SearchOptions SearchResult StoredPoint",
    "hybridtei.retrieval.search.searcher": "Searcher TextModel",
    "hybridtei.retrieval.store.collection": "check_fits",
    "hybridtei.retrieval.store.plan": "schema_for",
    "hybridtei.retrieval.store": "open_store",
    "hybridtei.retrieval.store.points": "point_id to_points",
    "hybridtei.retrieval.store.query": "filter_from",
    "hybridtei.retrieval.store.server": "as_lists create_arguments",
    "hybridtei.inference.tasks.label": "Prediction Span",
    "hybridtei.options": "EmbedOptions MultivectorBudget RankOptions",
    "hybridtei.inference.tasks.rerank": "Ranked",
}
# Packages of the extra `qdrant`
_QDRANT = (
    "qdrant_client",
    "qdrant_edge",
    "charset_normalizer",
    "pypdfium2",
    "selectolax",
    "semantic_text_splitter",
    "webencodings",
)
_HOME_OF = {name: home for home, names in _NAMES_OF.items() for name in names.split()}
_ERRORS = [
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, Exception)
]

__all__ = sorted(["__version__", *_HOME_OF, *_ERRORS])  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_HOME_OF[name]), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _QDRANT:
            raise
        from hybridtei.system.machine import install_command

        raise ImportError(
            f"{name} needs an extra: {install_command('qdrant')} ({error})"
        ) from error


def __dir__() -> list[str]:
    return sorted(__all__)
