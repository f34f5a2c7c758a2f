"""One query's vectors as a Qdrant query: one representation, several fused, several weighed exactly; ranked again or not.

Knows no store: a request is `models.QueryRequest`, in Qdrant's own words, and every store takes it. Two surprises. Qdrant's RRF
puts weights inside the denominator, 1 / (rank / weight + k - 1), and counts k so that its 61 is the literature's 60. And a sum
of scores over what each search found takes "not found" for a score of zero, so `weighted` scores the union of all candidates
anew by every representation before it adds up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from qdrant_client import models

from hybridtei.errors import InvalidInput
from hybridtei.outputs import Embeddings
from hybridtei.store.base import DENSE, MULTIVECTOR, SPARSE, PointId

Mode = Literal["dense", "sparse", "multivector", "rrf", "dbsf", "weighted"]
MODES: tuple[Mode, ...] = ("dense", "sparse", "multivector", "rrf", "dbsf", "weighted")
NAMES = (DENSE, SPARSE, MULTIVECTOR)
MAX_LIMIT = 100_000
# The first two are BGE-M3's authors' own, for passages and for long documents; multi-vector scores as means over query vectors.
PRESETS: Mapping[str, Mapping[str, float]] = {
    "m3": {DENSE: 1.0, SPARSE: 0.3, MULTIVECTOR: 1.0},
    "m3-long": {DENSE: 0.15, SPARSE: 0.5, MULTIVECTOR: 0.35},
    "m3-two": {DENSE: 1.0, SPARSE: 0.3},
}


def hybrid_query(
    query: Embeddings,
    row: int = 0,
    *,
    mode: Mode = "rrf",
    limit: int = 10,
    prefetch_limit: int = 100,
    k: int | None = None,
    weights: Mapping[str, float] | Sequence[float] | str | None = None,
    legs: Sequence[str] | None = None,
    rescore: Literal["multivector"] | None = None,
    query_filter: models.Filter | None = None,
    offset: int = 0,
    exact: bool = False,
    oversampling: float | None = None,
    score_threshold: float | None = None,
    with_payload: bool | Sequence[str] = True,
    with_vectors: bool | Sequence[str] = False,
) -> models.QueryRequest:
    """Ask for the `limit` best points after `offset`, by the vectors in one row of a query's embeddings.

    `legs`: which representations take part in rrf, dbsf or weighted, in this order; by default dense and sparse as far as the
    query has them, and multivector too where `weighted` weighs it. Each brings `prefetch_limit` candidates, or as many as the
    page needs. `weights` belong to legs: by name, in order, or a preset's name (`PRESETS`); a weight of 0 leaves a leg
    out. `k`: Qdrant's RRF constant, by default 2. `rescore`: rank the candidates anew by MaxSim. `exact`: no approximate index.
    `oversampling`: where vectors are quantised, so many times the candidates are scored with the full vectors.
    A multi-vector's score is the sum over the query's vectors, except in `weighted`, which divides it by how many they are.
    Raises InvalidInput, naming the field.
    """
    check_page(mode, limit, prefetch_limit, offset)
    outer: dict[str, Any] = {
        "limit": limit,
        "offset": offset or None,
        "filter": query_filter,
        "score_threshold": score_threshold,
        "with_payload": with_payload if isinstance(with_payload, bool) else list(with_payload),
        "with_vector": with_vectors if isinstance(with_vectors, bool) else list(with_vectors),
    }
    vectors, params = _vectors(query, row), _params(exact, oversampling)
    candidates = max(prefetch_limit, limit + offset)
    if mode in NAMES:
        _refuse(f"mode {mode!r}", k=k, weights=weights, legs=legs)
        vector = _vector(vectors, mode)
        if rescore is None:
            return models.QueryRequest(query=vector, using=mode, params=params, **outer)
        prefetch = [models.Prefetch(query=vector, using=mode, params=params, limit=candidates)]
        return models.QueryRequest(prefetch=prefetch, query=_vector(vectors, MULTIVECTOR), using=MULTIVECTOR, **outer)
    if mode != "rrf":
        _refuse(f"mode {mode!r}", k=k)
    chosen, weighing = _legs(vectors, mode, legs, weights)
    found = [models.Prefetch(query=vectors[leg], using=leg, params=params, limit=candidates) for leg in chosen]
    if mode == "weighted":
        found = _scored_by_each(vectors, chosen, found, candidates)
    fusion = _fusion(vectors, mode, k, chosen, weighing)
    if rescore is None:
        return models.QueryRequest(prefetch=found, query=fusion, **outer)
    fused = [models.Prefetch(prefetch=found, query=fusion, limit=candidates)]
    return models.QueryRequest(prefetch=fused, query=_vector(vectors, MULTIVECTOR), using=MULTIVECTOR, **outer)


def score_requests(
    query: Embeddings, ids: Iterable[PointId], row: int = 0, *, legs: Sequence[str] | None = None
) -> dict[str, models.QueryRequest]:
    """For each representation of the query, a request for the exact scores of these points: what `fusion` needs for a true sum.

    A point that a sparse answer leaves out shares no index with the query: its score is 0.
    """
    wanted = sorted(set(ids), key=lambda given: (isinstance(given, str), given))
    vectors = _vectors(query, row)
    only = models.Filter(must=[models.HasIdCondition(has_id=list(wanted))])
    return {
        leg: models.QueryRequest(
            query=_vector(vectors, leg),
            using=leg,
            filter=only,
            limit=max(len(wanted), 1),
            params=models.SearchParams(exact=True),
            with_payload=False,
        )
        for leg in (legs if legs is not None else vectors)
    }


def check_page(mode: str, limit: int, prefetch_limit: int, offset: int) -> None:
    """Raises InvalidInput, naming the field, for a page that nobody can ask for."""
    if mode not in MODES:
        raise InvalidInput(f"`mode` is {mode!r}, should be one of {', '.join(MODES)}")
    for field, value, least in (("limit", limit, 1), ("prefetch_limit", prefetch_limit, 1), ("offset", offset, 0)):
        if not least <= value <= MAX_LIMIT:
            raise InvalidInput(f"`{field}` is {value}, should be between {least} and {MAX_LIMIT}")


def _refuse(where: str, **given: object) -> None:
    for field, value in given.items():
        if value is not None:
            raise InvalidInput(f"`{field}` means nothing in {where}")


def _vectors(query: Embeddings, row: int) -> dict[str, Any]:
    """What the row has, as Qdrant's input. Query expansion and all: of a multi-vector every row counts."""
    vectors: dict[str, Any] = {}
    if query.dense is not None:
        vectors[DENSE] = _finite(query.dense[row], DENSE).tolist()
    if query.sparse is not None:
        indices, values = query.sparse.row(row)
        vectors[SPARSE] = models.SparseVector(indices=indices.tolist(), values=_finite(values, SPARSE).tolist())
    if query.multivector is not None:
        rows = query.multivector.row(row)
        if len(rows):
            vectors[MULTIVECTOR] = _finite(rows, MULTIVECTOR).tolist()
    return vectors


def _finite(array: Any, name: str) -> Any:
    if not np.isfinite(array).all():
        raise InvalidInput(f"the query's {name} vector holds numbers that are not finite")
    return array


def _vector(vectors: Mapping[str, Any], name: str) -> Any:
    if name not in vectors:
        raise InvalidInput(f"the query has no {name} vector; it has {', '.join(vectors) or 'none'}")
    return vectors[name]


def _params(exact: bool, oversampling: float | None) -> models.SearchParams | None:
    if oversampling is not None and not 1 <= oversampling <= 100:
        raise InvalidInput(f"`oversampling` is {oversampling}, should be between 1 and 100")
    quantization = None
    if oversampling is not None:
        quantization = models.QuantizationSearchParams(rescore=True, oversampling=oversampling)
    if not exact and quantization is None:
        return None
    return models.SearchParams(exact=exact or None, quantization=quantization)


def _legs(
    vectors: Mapping[str, Any],
    mode: str,
    legs: Sequence[str] | None,
    weights: Mapping[str, float] | Sequence[float] | str | None,
) -> tuple[list[str], list[float] | None]:
    """Which representations take part and how much they weigh; those that weigh nothing take no part."""
    if mode == "dbsf":
        _refuse("mode 'dbsf', which cannot weigh", weights=weights)
    if legs is None:
        names = NAMES if mode == "weighted" and _weighs_multivector(weights) else (DENSE, SPARSE)
        legs = [name for name in names if name in vectors and not _is_empty(vectors[name])]
    if not legs or len(set(legs)) != len(legs) or not set(legs) <= set(NAMES):
        raise InvalidInput(f"`legs` are {list(legs)}, should be some of {', '.join(NAMES)}, each once")
    for leg in legs:
        _vector(vectors, leg)
    if weights is None:
        return list(legs), None if mode != "weighted" else [1.0] * len(legs)
    values = _weights_of(legs, weights)
    kept = [(leg, value) for leg, value in zip(legs, values, strict=True) if value != 0]
    if not kept or not all(np.isfinite(value) and value > 0 for _, value in kept):
        raise InvalidInput(f"`weights` are {values}, should be finite, 0 or more, and not all 0")
    return [leg for leg, _ in kept], [value for _, value in kept]


def _weighs_multivector(weights: Mapping[str, float] | Sequence[float] | str | None) -> bool:
    if isinstance(weights, str):
        return weights in PRESETS
    if isinstance(weights, Mapping):
        return MULTIVECTOR in weights
    return weights is not None and len(weights) == len(NAMES)


def _is_empty(vector: Any) -> bool:
    return isinstance(vector, models.SparseVector) and not vector.indices


def _weights_of(legs: Sequence[str], weights: Mapping[str, float] | Sequence[float] | str) -> list[float]:
    if isinstance(weights, str):
        if weights not in PRESETS:
            raise InvalidInput(f"`weights` are {weights!r}, presets are {', '.join(PRESETS)}")
        weights = PRESETS[weights]
    if isinstance(weights, Mapping):
        unknown = sorted(set(weights) - set(NAMES))
        if unknown:
            raise InvalidInput(f"`weights` name {unknown[0]!r}, should name {', '.join(NAMES)}")
        return [float(weights.get(leg, 0.0)) for leg in legs]
    if len(weights) != len(legs):
        raise InvalidInput(f"`weights` are {len(weights)}, should be as many as there are legs: {', '.join(legs)}")
    return [float(weight) for weight in weights]


def _scored_by_each(
    vectors: Mapping[str, Any], legs: Sequence[str], found: list[models.Prefetch], candidates: int
) -> list[models.Prefetch]:
    """Each leg scores what any leg found. A multi-vector would scan everything: it scores what the others found."""
    finders = [prefetch for prefetch, leg in zip(found, legs, strict=True) if leg != MULTIVECTOR] or found
    limit = min(candidates * len(finders), MAX_LIMIT)
    return [models.Prefetch(prefetch=finders, query=vectors[leg], using=leg, limit=limit) for leg in legs]


def _fusion(vectors: Mapping[str, Any], mode: str, k: int | None, legs: Sequence[str], weights: Sequence[float] | None) -> Any:
    if mode == "dbsf":
        return models.FusionQuery(fusion=models.Fusion.DBSF)
    if mode == "rrf":
        if k is not None and not 1 <= k <= 1_000_000:
            raise InvalidInput(f"`k` is {k}, should be between 1 and 1000000")
        if k is None and weights is None:
            return models.FusionQuery(fusion=models.Fusion.RRF)  # servers before 1.16 know no other
        return models.RrfQuery(rrf=models.Rrf(k=k, weights=list(weights) if weights is not None else None))
    assert weights is not None
    terms: list[Any] = []
    for i, (leg, weight) in enumerate(zip(legs, weights, strict=True)):
        factor = weight / len(vectors[leg]) if leg == MULTIVECTOR else weight
        terms.append(models.MultExpression(mult=[factor, f"$score[{i}]"]))
    defaults = {f"$score[{i}]": 0.0 for i in range(len(legs))}
    return models.FormulaQuery(formula=models.SumExpression(sum=terms), defaults=defaults)
