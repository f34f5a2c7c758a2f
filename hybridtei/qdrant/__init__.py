"""Encoder outputs into Qdrant, and ranked answers out: a server or cluster by gRPC, or the embedded engine.

Knows outputs and what a checkpoint says about itself; knows no HTTP server of ours. Wants the extra `qdrant`.

    points = to_points(embeddings, ids, payloads)              # any QdrantClient or AsyncQdrantClient takes them:
    client.upsert(name, [as_lists(point) for point in points])
    client.query_points(name, **query_arguments(hybrid_query(query_embeddings, mode="rrf", k=61)))

    found = LocalSearch(encoder, "minilm-hybrid")("papers", "a query")          # also in a notebook
    found = await Searcher(store, query_model(encoder, "minilm-hybrid")).search("papers", "a query")

Names are imported when first asked for: qdrant-client takes a second.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridtei.qdrant.client_words import create_arguments, query_arguments
    from hybridtei.qdrant.collection import check_fits, plan_for
    from hybridtei.qdrant.langchain import HybridSparseEmbeddings
    from hybridtei.qdrant.points import as_lists, point_id, to_points
    from hybridtei.qdrant.query import hybrid_query, score_requests
    from hybridtei.qdrant.search import Found, Hit, QueryModel, Searcher, SearchOptions
    from hybridtei.qdrant.search_filters import filter_from
    from hybridtei.qdrant.search_local import LocalSearch, query_model, rank_by
    from hybridtei.qdrant.stores import open_store

_ROOMS = {
    "client_words": ("create_arguments", "query_arguments"),
    "collection": ("check_fits", "plan_for"),
    "langchain": ("HybridSparseEmbeddings",),
    "points": ("as_lists", "point_id", "to_points"),
    "query": ("hybrid_query", "score_requests"),
    "search": ("Found", "Hit", "QueryModel", "SearchOptions", "Searcher"),
    "search_filters": ("filter_from",),
    "search_local": ("LocalSearch", "query_model", "rank_by"),
    "stores": ("open_store",),
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}

__all__ = [
    "Found",
    "Hit",
    "HybridSparseEmbeddings",
    "LocalSearch",
    "QueryModel",
    "SearchOptions",
    "Searcher",
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
    if name not in _ROOM_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_ROOM_OF[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("hybridtei"):
            raise
        raise ImportError(f"{name} needs an extra: pip install 'hybridtei[qdrant]' ({error})") from error


def __dir__() -> list[str]:
    return sorted(__all__)
