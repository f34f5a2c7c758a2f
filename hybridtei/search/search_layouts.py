"""Which collection a search goes to, and whether its vectors are those of the model that embeds the query.

A layout is asked for once in a while and kept in between, or every query would cost a call more. The surprise: a collection may
hold fewer outputs than the model has, or narrower ones, and is searched all the same: queries are cut to its widths.
"""

from __future__ import annotations

import time
from dataclasses import replace

from qdrant_client import models

from hybridtei.batch import Head
from hybridtei.checkpoint.spec import ModelSpec
from hybridtei.errors import CollectionMismatch, UnknownCollection
from hybridtei.outputs import Embeddings
from hybridtei.ragged import Ragged
from hybridtei.search.query import NAMES
from hybridtei.store.base import DENSE, MULTIVECTOR, SPARSE, CollectionPlan, Store
from hybridtei.store.collection import check_fits, check_name, plan_for
from hybridtei.tasks.vectors import cut, unit

KEPT_S = 10.0  # so soon is it noticed that others dropped a collection, and made it anew for another model


class Layouts:
    """What a store says of its collections, remembered for `KEPT_S` seconds."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._known: dict[str, tuple[float, CollectionPlan]] = {}

    async def of(self, name: str) -> CollectionPlan:
        """The layout of a collection. Raises UnknownCollection, InvalidInput for what is no name, StoreError."""
        check_name(name)
        known = self._known.get(name)
        if known is not None and known[0] > time.monotonic():
            return known[1]
        plan = await self.store.describe(name)
        if plan is None:
            self._known.pop(name, None)
            raise UnknownCollection(f"there is no collection `{name}`")
        self._known[name] = time.monotonic() + KEPT_S, plan
        return plan

    def forget(self, name: str) -> None:
        """It was made or dropped just now."""
        self._known.pop(name, None)


def common_heads(plan: CollectionPlan, spec: ModelSpec) -> frozenset[Head]:
    """The outputs that both the collection and the model have."""
    return frozenset(Head(name) for name in NAMES if name in plan.vectors or name in plan.sparse) & spec.heads


def check_searchable(plan: CollectionPlan, spec: ModelSpec, model_id: str, name: str, *, unlabelled: bool = False) -> None:
    """Raises CollectionMismatch unless this model's queries are to be compared with what the collection holds."""
    heads = common_heads(plan, spec)
    if not heads:
        there = ", ".join([*plan.vectors, *plan.sparse]) or "none"
        raise CollectionMismatch(
            f"collection {name!r} has the vectors {there}; {model_id} makes {', '.join(sorted(spec.heads)) or 'none'}"
        )
    sparse = plan.sparse.get(SPARSE)
    wanted = plan_for(
        spec,
        model_id,
        heads=heads,
        dense_dim=_narrower(plan, DENSE, spec.dense_width) if Head.DENSE in heads else None,
        multivector_dim=_narrower(plan, MULTIVECTOR, spec.multivector.dim)
        if Head.MULTIVECTOR in heads and spec.multivector
        else None,
        sparse_idf=sparse is not None and sparse.modifier == models.Modifier.IDF,
    )
    distances = {field: _with_distance(params, plan.vectors[field]) for field, params in wanted.vectors.items()}
    check_fits(plan, replace(wanted, vectors=distances), name, unlabelled=unlabelled)


def _with_distance(wanted: models.VectorParams, there: models.VectorParams) -> models.VectorParams:
    """Of unit vectors the dot product is the cosine: a collection that says so is as good."""
    if there.distance == models.Distance.DOT:
        return wanted.model_copy(update={"distance": models.Distance.DOT})
    return wanted


def _narrower(plan: CollectionPlan, name: str, width: int) -> int | None:
    size = plan.vectors[name].size
    return size if size < width else None


def fitted(query: Embeddings, plan: CollectionPlan) -> Embeddings:
    """The query's vectors cut to the collection's widths, and of length 1 again."""
    dense, multivector = query.dense, query.multivector
    if dense is not None and DENSE in plan.vectors and plan.vectors[DENSE].size < dense.shape[1]:
        dense = unit(cut(dense, plan.vectors[DENSE].size))
    if multivector is not None and MULTIVECTOR in plan.vectors:
        width = plan.vectors[MULTIVECTOR].size
        if width < multivector.values.shape[1]:
            multivector = Ragged(unit(cut(multivector.values, width)), multivector.offsets)
    return replace(query, dense=dense, multivector=multivector)
