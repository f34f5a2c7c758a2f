"""A collection's layout as plain JSON, to lie beside an embedded collection or travel to its owner, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qdrant_client import models

from hybridtei.store.base import CollectionPlan


def plain_of(plan: CollectionPlan) -> dict[str, Any]:
    """The plan as JSON has it; what is not set is left out."""
    plain = {
        "vectors": {name: _plain(params) for name, params in plan.vectors.items()},
        "sparse": {name: _plain(params) for name, params in plan.sparse.items()},
        "metadata": dict(plan.metadata),
        "shard_number": plan.shard_number,
        "replication_factor": plan.replication_factor,
        "on_disk_payload": plan.on_disk_payload,
    }
    return {field: value for field, value in plain.items() if value is not None}


def plan_from(plain: Mapping[str, Any]) -> CollectionPlan:
    """The plan that was written so."""
    return CollectionPlan(
        vectors={name: models.VectorParams.model_validate(params) for name, params in plain["vectors"].items()},
        sparse={name: models.SparseVectorParams.model_validate(params) for name, params in plain["sparse"].items()},
        metadata=plain.get("metadata", {}),
        shard_number=plain.get("shard_number"),
        replication_factor=plain.get("replication_factor"),
        on_disk_payload=plain.get("on_disk_payload"),
    )


def _plain(params: Any) -> dict[str, Any]:
    return dict(params.model_dump(mode="json", by_alias=True, exclude_none=True, warnings=False))
