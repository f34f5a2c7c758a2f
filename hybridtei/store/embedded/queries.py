"""Queries and filters in the words of the embedded engine, from the JSON of Qdrant's Query API.

Runs in the owner process. What the engine lacks, or nothing here asks for, is refused with a ValueError rather than left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import qdrant_edge as edge

from hybridtei.store.embedded.filters import filter_of
from hybridtei.store.embedded.formulas import expression_of
from hybridtei.store.embedded.types_on_disk import Plain, member, optional, vector_of

DEFAULT_LIMIT, DEFAULT_K, DEFAULT_DIVERSITY = 10, 2, 0.5


def request_of(request: Plain) -> edge.QueryRequest:
    """A whole query. `shard_key` and `lookup_from` mean nothing here."""
    _refuse(request, "lookup_from", "shard_key")
    return edge.QueryRequest(
        limit=request.get("limit", DEFAULT_LIMIT),
        offset=request.get("offset") or 0,
        query=_query(request),
        prefetches=_prefetches(request),
        filter=filter_of(request.get("filter")),
        score_threshold=request.get("score_threshold"),
        params=_params(request.get("params")),
        with_payload=payload_selector(request.get("with_payload")),
        with_vector=request.get("with_vector", False),
    )


def payload_selector(wanted: Any) -> Any:
    """True, False, a list of keys, or keys to include or exclude."""
    if isinstance(wanted, Mapping):
        if "include" in wanted:
            return edge.PayloadSelector.Include(list(wanted["include"]))
        return edge.PayloadSelector.Exclude(list(wanted["exclude"]))
    return False if wanted is None else wanted


def _prefetches(request: Plain) -> list[edge.Prefetch]:
    given = request.get("prefetch") or []
    return [_prefetch(prefetch) for prefetch in ([given] if isinstance(given, Mapping) else given)]


def _prefetch(request: Plain) -> edge.Prefetch:
    _refuse(request, "lookup_from")
    return edge.Prefetch(
        limit=request.get("limit", DEFAULT_LIMIT),
        query=_query(request),
        prefetches=_prefetches(request),
        params=_params(request.get("params")),
        filter=filter_of(request.get("filter")),
        score_threshold=request.get("score_threshold"),
    )


def _refuse(request: Plain, *fields: str) -> None:
    for field in fields:
        if request.get(field) is not None:
            raise ValueError(f"`{field}` means nothing to the embedded engine")


def _query(request: Plain) -> Any:
    query = request.get("query")
    if query is None:
        return None
    if not isinstance(query, Mapping) or "indices" in query:
        return edge.Query.Nearest(_input(query), request.get("using"))
    for key, make in _QUERIES.items():
        if key in query:
            return make(query, request)
    raise ValueError(f"a query of the kind {'/'.join(query)} is not served by the embedded engine")


def _input(vector: Any) -> Any:
    if isinstance(vector, int | str):
        raise ValueError("a query by a point's id is not served by the embedded engine: give its vector")
    return vector_of(vector)


def _nearest(query: Plain, request: Plain) -> Any:
    vector, mmr, using = _input(query["nearest"]), query.get("mmr"), request.get("using")
    if mmr is None:
        return edge.Query.Nearest(vector, using)
    limit = request.get("limit", DEFAULT_LIMIT)
    return edge.Mmr(vector, 1 - mmr.get("diversity", DEFAULT_DIVERSITY), mmr.get("candidates_limit", limit), using)


_QUERIES: dict[str, Callable[[Plain, Plain], Any]] = {
    "nearest": _nearest,
    "fusion": lambda query, _: edge.Fusion.Dbsf() if query["fusion"] == "dbsf" else edge.Fusion.Rrf(DEFAULT_K),
    "rrf": lambda query, _: edge.Fusion.Rrf(query["rrf"].get("k", DEFAULT_K), query["rrf"].get("weights")),
    "formula": lambda query, _: edge.Formula(expression_of(query["formula"]), query.get("defaults") or {}),
    "order_by": lambda query, _: order_of(query["order_by"]),
    "sample": lambda query, _: member(edge.Sample, query["sample"]),
}


def order_of(order: Any) -> edge.OrderBy:
    """A key, or a key with direction and start."""
    if isinstance(order, str):
        return edge.OrderBy(order)
    return edge.OrderBy(order["key"], optional(edge.Direction, order.get("direction")), order.get("start_from"))


def _params(params: Plain | None) -> Any:
    if params is None:
        return None
    quantization, acorn = params.get("quantization"), params.get("acorn")
    return edge.SearchParams(
        hnsw_ef=params.get("hnsw_ef"),
        exact=params.get("exact", False),
        quantization=quantization
        and edge.QuantizationSearchParams(
            ignore=quantization.get("ignore", False),
            rescore=quantization.get("rescore"),
            oversampling=quantization.get("oversampling"),
        ),
        indexed_only=params.get("indexed_only", False),
        acorn=acorn and edge.AcornSearchParams(acorn.get("enable", False), acorn.get("max_selectivity")),
        idf=_idf(params.get("idf")),
    )


def _idf(params: Any) -> Any:
    if params is None:
        return None
    if not isinstance(params, Mapping):
        raise ValueError(f"`params.idf` {params!r} is not served by the embedded engine")
    return edge.IdfParams(corpus=filter_of(params.get("corpus")))
