"""A store's calls in the words of qdrant-client, which speaks to servers and holds points in memory alike."""

from __future__ import annotations

from typing import Any

from qdrant_client import models

from hybridtei.store.base import CollectionPlan


def create_arguments(plan: CollectionPlan) -> dict[str, Any]:
    """Of `create_collection`."""
    return {
        "vectors_config": dict(plan.vectors),
        "sparse_vectors_config": dict(plan.sparse) or None,
        "shard_number": plan.shard_number,
        "replication_factor": plan.replication_factor,
        "on_disk_payload": plan.on_disk_payload,
        "metadata": dict(plan.metadata) or None,
    }


def query_arguments(request: models.QueryRequest) -> dict[str, Any]:
    """Of `query_points`, where some fields have other names than in the request itself."""
    arguments = {
        "query": request.query,
        "using": request.using,
        "prefetch": request.prefetch,
        "query_filter": request.filter,
        "search_params": request.params,
        "offset": request.offset,
        "with_payload": request.with_payload if request.with_payload is not None else False,
        "with_vectors": request.with_vector if request.with_vector is not None else False,
        "score_threshold": request.score_threshold,
        "lookup_from": request.lookup_from,
        "shard_key_selector": request.shard_key,
    }
    if request.limit is not None:
        arguments["limit"] = request.limit
    return arguments


def plan_of(info: models.CollectionInfo) -> CollectionPlan:
    """The layout of an existing collection; one whose vector has no name keeps it under the empty name."""
    params = info.config.params
    vectors = params.vectors or {}
    if isinstance(vectors, models.VectorParams):
        vectors = {"": vectors}
    return CollectionPlan(
        vectors=vectors,
        sparse=params.sparse_vectors or {},
        metadata=info.config.metadata or {},
        shard_number=params.shard_number,
        replication_factor=params.replication_factor,
        on_disk_payload=params.on_disk_payload,
    )
