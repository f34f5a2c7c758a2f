"""A filter in Qdrant's JSON, checked before anything is done with it; a mistake is told by its place.

The surprise: a condition is one of nine kinds, so pydantic reports one mistake nine times, once for each kind it might have
been. The report that came deepest is about the kind that was meant.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import orjson
from pydantic import ValidationError
from qdrant_client import models

from hybridtei.batch import Head
from hybridtei.checkpoint.spec import ModelSpec
from hybridtei.errors import CollectionMismatch, InvalidInput, UnknownCollection
from hybridtei.outputs import Embeddings
from hybridtei.ragged import Ragged
from hybridtei.search.query import NAMES
from hybridtei.store.base import DENSE, MULTIVECTOR, SPARSE, CollectionPlan, Store
from hybridtei.store.collection import check_fits, check_name, plan_for
from hybridtei.tasks.vectors import cut, unit

MAX_BYTES, MAX_DEPTH = 100_000, 16
PLAIN_TYPES = frozenset({"int", "str", "uuid", "float", "bool", "date", "datetime"})  # no field goes by these names


def filter_from(given: Any, field: str = "filter") -> models.Filter | None:
    """An object (or its JSON) -> a filter; None stays None. Raises InvalidInput, naming the place."""
    if given is None:
        return None
    if isinstance(given, str | bytes):
        try:
            given = orjson.loads(given)
        except orjson.JSONDecodeError as error:
            raise InvalidInput(f"`{field}` is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise InvalidInput(f"`{field}` should be an object with `must`, `should` or `must_not`, not {type(given).__name__}")
    if _depth(given) > MAX_DEPTH:
        raise InvalidInput(f"`{field}` is nested deeper than {MAX_DEPTH} levels")
    try:
        size = len(orjson.dumps(given))
    except TypeError as error:  # a number beyond 64 bits
        raise InvalidInput(f"`{field}` cannot be read: {error}") from None
    if size > MAX_BYTES:
        raise InvalidInput(f"`{field}` has more than {MAX_BYTES} bytes")
    try:
        return models.Filter.model_validate(given)
    except ValidationError as error:
        raise InvalidInput(_told(error, field)) from None


def _depth(value: Any) -> int:
    """Without recursion: it may be deeper than that goes."""
    deepest, level = 0, [value]
    while level and deepest <= MAX_DEPTH * 4:
        level = [
            item for one in level for item in (one.values() if isinstance(one, dict) else one) if isinstance(item, dict | list)
        ]
        deepest += 1
    return deepest // 2  # an object and its list are one level


def _told(error: ValidationError, field: str) -> str:
    mistakes = error.errors(include_url=False, include_context=False, include_input=False)
    deepest = max(mistakes, key=lambda mistake: (len(_place(mistake["loc"])), mistake["type"] != "extra_forbidden"))
    path = field
    for part in _place(deepest["loc"]):
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return f"`{path}`: {deepest['msg']}"


def _place(location: Sequence[int | str]) -> list[int | str]:
    """Without the names of the types that were tried."""
    return [
        part
        for part in location
        if isinstance(part, int) or (part[:1].islower() and "[" not in part and part not in PLAIN_TYPES)
    ]


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
