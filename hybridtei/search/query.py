"""One query's vectors as a Qdrant query: one representation, several fused, several weighed exactly; and filters from JSON.

A request is `models.QueryRequest`, in Qdrant's own words, and every store takes it. Qdrant's RRF puts weights inside the
denominator, 1 / (rank / weight + k - 1), and counts k so that its 61 is the literature's 60. A sum of scores over what each
search found takes "not found" for a score of zero, so `weighted` scores the union of all candidates anew by every
representation before it adds up.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import orjson
from pydantic import BaseModel, ValidationError
from qdrant_client import models

from hybridtei.errors import InvalidInput
from hybridtei.outputs import Embeddings
from hybridtei.search.options import SearchOptions
from hybridtei.store import MAX_LIMIT
from hybridtei.store.base import DENSE, MULTIVECTOR, NAMES, SPARSE, PointId, Selector, selector
from hybridtei.tasks.rerank import PRESETS, preset

MAX_FILTER_BYTES, MAX_DEPTH = 100_000, 16
MAX_CONDITIONS, MAX_VALUES = 100, 1_000  # the store compares each with each point: 1,600 took it 5 s for 5,420 points
CLAUSES, WORDS = frozenset({"must", "should", "must_not", "conditions"}), frozenset({"text", "text_any", "phrase"})
# Chosen on judged collections (conformance/quality/default_search.py).
ZSCORE_WEIGHTS = {DENSE: 1.0, SPARSE: 0.5}
ZSCORE_WEIGHTS_WITH_MAXSIM = {DENSE: 1.0, SPARSE: 0.7, MULTIVECTOR: 1.0}
PLAIN_TYPES = frozenset({"int", "str", "uuid", "float", "bool", "date", "datetime"})  # no field goes by these names


def hybrid_query(
    query: Embeddings,
    row: int = 0,
    options: SearchOptions | None = None,
    *,
    with_vectors: Selector = False,
    **fields: Any,
) -> models.QueryRequest:
    """Ask for the `limit` best points after `offset`, by the vectors in one row of a query's embeddings.

    `fields`: those of `SearchOptions`, which they replace. The mode is rrf if none is named: `zscore` and `group_by` take more
    than one query, and a `Searcher` makes them. Fields of a reranker, highlights and explanations mean nothing here. A
    multi-vector's score is the sum over the query's vectors, except in `weighted`, which divides it by how many they are.
    Raises InvalidInput, naming the field.
    """
    options = msgspec.structs.replace(options or SearchOptions(), **fields)
    options.check_page()
    mode = options.mode or "rrf"
    if mode == "zscore" or options.group_by is not None:
        field = "mode 'zscore'" if mode == "zscore" else "`group_by`"
        raise InvalidInput(f"{field} takes more than one query of the store: use `LocalSearch`, `Searcher` or `/search`")
    outer: dict[str, Any] = {
        "limit": options.limit,
        "offset": options.offset or None,
        "filter": options.query_filter,
        "score_threshold": options.score_threshold,
        "with_payload": selector(options.with_payload),
        "with_vector": selector(with_vectors),
    }
    vectors, params = vectors_of(query, row), search_params(options.exact, options.oversampling)
    candidates = max(options.prefetch_limit, options.limit + options.offset)
    if mode in NAMES:
        _refuse(f"mode {mode!r}", k=options.k, weights=options.weights, legs=options.legs)
        vector = _vector(vectors, mode)
        if not options.rescore:
            return models.QueryRequest(query=vector, using=mode, params=params, **outer)
        prefetch = [models.Prefetch(query=vector, using=mode, params=params, limit=candidates)]
        return models.QueryRequest(prefetch=prefetch, query=_vector(vectors, MULTIVECTOR), using=MULTIVECTOR, **outer)
    if mode != "rrf":
        _refuse(f"mode {mode!r}", k=options.k)
    chosen, weighing = legs_of(vectors, mode, options.legs, options.weights)
    finders = [models.Prefetch(query=vectors[leg], using=leg, params=params, limit=candidates) for leg in chosen]
    if mode == "weighted":
        finders = _scored_by_each(vectors, chosen, finders, candidates)
    fusion = _fusion(vectors, mode, options.k, chosen, weighing)
    if not options.rescore:
        return models.QueryRequest(prefetch=finders, query=fusion, **outer)
    fused = [models.Prefetch(prefetch=finders, query=fusion, limit=candidates)]
    return models.QueryRequest(prefetch=fused, query=_vector(vectors, MULTIVECTOR), using=MULTIVECTOR, **outer)


def score_requests(
    query: Embeddings, ids: Iterable[PointId], row: int = 0, *, legs: Sequence[str] | None = None
) -> dict[str, models.QueryRequest]:
    """For each representation of the query, a request for the exact scores of these points: what `fusion` needs for a true sum.

    A point that a sparse answer leaves out shares no index with the query: its score is 0.
    """
    unique = sorted(set(ids), key=lambda identity: (isinstance(identity, str), identity))
    vectors = vectors_of(query, row)
    return {leg: score_request(_vector(vectors, leg), leg, unique) for leg in (legs if legs is not None else vectors)}


def score_request(vector: Any, leg: str, ids: Sequence[PointId]) -> models.QueryRequest:
    """A request for one representation's exact scores of these points."""
    return models.QueryRequest(
        query=vector,
        using=leg,
        filter=models.Filter(must=[models.HasIdCondition(has_id=list(ids))]),
        limit=max(len(ids), 1),
        params=models.SearchParams(exact=True),
        with_payload=False,
    )


def finds_nothing(query: Embeddings, row: int, options: SearchOptions, *, is_packed: bool) -> bool:
    """Whether a fusion has no leg, since the query has no known term and there are no dense vectors. `is_packed`: see
    `store.packed`."""
    if options.mode in NAMES or options.legs is not None or query.dense is not None or query.sparse is None:
        return False
    finds_by_maxsim = query.multivector is not None and not is_packed and options.mode in ("zscore", "weighted")
    return not finds_by_maxsim and not len(query.sparse.row(row)[0])


def finders_of(legs: Sequence[str]) -> list[str]:
    """The legs that bring candidates: not a multi-vector, which would scan everything, unless it is alone."""
    return [leg for leg in legs if leg != MULTIVECTOR] or list(legs)


def _refuse(where: str, **fields: object) -> None:
    for field, value in fields.items():
        if value is not None:
            raise InvalidInput(f"`{field}` means nothing in {where}")


def vectors_of(query: Embeddings, row: int) -> dict[str, Any]:
    """The row's vectors as Qdrant's input; a multi-vector with all its rows, those of query expansion included."""
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


def search_params(exact: bool, oversampling: float | None) -> models.SearchParams | None:
    """The parameters of a search, None where all are the defaults. Raises InvalidInput."""
    if oversampling is not None and not 1 <= oversampling <= 100:
        raise InvalidInput(f"`oversampling` is {oversampling}, should be between 1 and 100")
    quantization = None
    if oversampling is not None:
        quantization = models.QuantizationSearchParams(rescore=True, oversampling=oversampling)
    if not exact and quantization is None:
        return None
    return models.SearchParams(exact=exact or None, quantization=quantization)


def legs_of(
    vectors: Mapping[str, Any],
    mode: str,
    legs: Sequence[str] | None,
    weights: Mapping[str, float] | Sequence[float] | str | None,
) -> tuple[list[str], list[float] | None]:
    """(legs, their weights or None), without legs whose weight is 0. Raises InvalidInput."""
    if legs is None:
        takes_all = mode == "zscore" or (mode == "weighted" and _weighs_multivector(weights))
        names = NAMES if takes_all else (DENSE, SPARSE)
        legs = [name for name in names if name in vectors and not _is_empty(vectors[name])]
    if not legs or len(set(legs)) != len(legs) or not set(legs) <= set(NAMES):
        raise InvalidInput(f"`legs` are {list(legs)}, should be some of {', '.join(NAMES)}, each once")
    for leg in legs:
        _vector(vectors, leg)
    if weights is None and mode == "zscore":
        weights = ZSCORE_WEIGHTS_WITH_MAXSIM if MULTIVECTOR in legs else ZSCORE_WEIGHTS
    if weights is None:
        return list(legs), None if mode != "weighted" else [1.0] * len(legs)
    values = _weights_of(legs, weights)
    kept = [(leg, value) for leg, value in zip(legs, values, strict=True) if value != 0]
    if not kept or not all(np.isfinite(value) and value > 0 for _, value in kept):
        raise InvalidInput(f"`weights` are {values}, should be finite, 0 or more, and not all 0")
    return [leg for leg, _ in kept], [value for _, value in kept]


def _weighs_multivector(weights: Mapping[str, float] | Sequence[float] | str | None) -> bool:
    if isinstance(weights, str):
        return preset(weights) is not None
    if isinstance(weights, Mapping):
        return MULTIVECTOR in weights
    return weights is not None and len(weights) == len(NAMES)


def _is_empty(vector: Any) -> bool:
    return isinstance(vector, models.SparseVector) and not vector.indices


def _weights_of(legs: Sequence[str], weights: Mapping[str, float] | Sequence[float] | str) -> list[float]:
    if isinstance(weights, str):
        named = preset(weights)
        if named is None:
            raise InvalidInput(f"`weights` are {weights!r}, presets are {', '.join(PRESETS)}")
        weights = named.by_name
    if isinstance(weights, Mapping):
        unknown = sorted(set(weights) - set(NAMES))
        if unknown:
            raise InvalidInput(f"`weights` name {unknown[0]!r}, should name {', '.join(NAMES)}")
        return [float(weights.get(leg, 0.0)) for leg in legs]
    if len(weights) != len(legs):
        raise InvalidInput(f"`weights` are {len(weights)}, should be as many as there are legs: {', '.join(legs)}")
    return [float(weight) for weight in weights]


def _scored_by_each(
    vectors: Mapping[str, Any], legs: Sequence[str], prefetches: list[models.Prefetch], candidates: int
) -> list[models.Prefetch]:
    """Each leg scores the candidates of all legs that find any."""
    finders = [prefetch for prefetch, leg in zip(prefetches, legs, strict=True) if leg in finders_of(legs)]
    limit = min(candidates * len(finders), MAX_LIMIT)
    return [models.Prefetch(prefetch=finders, query=vectors[leg], using=leg, limit=limit) for leg in legs]


def _fusion(vectors: Mapping[str, Any], mode: str, k: int | None, legs: Sequence[str], weights: Sequence[float] | None) -> Any:
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


def filter_from(value: Any, field: str = "filter") -> models.Filter | None:
    """An object (or its JSON) -> a filter; None stays None. Raises InvalidInput, naming the place."""
    if value is None:
        return None
    if isinstance(value, str | bytes):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise InvalidInput(f"`{field}` is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidInput(f"`{field}` should be an object with `must`, `should` or `must_not`, not {type(value).__name__}")
    if _depth(value) > MAX_DEPTH:
        raise InvalidInput(f"`{field}` is nested deeper than {MAX_DEPTH} levels")
    try:
        size = len(orjson.dumps(value))
    except TypeError as error:  # a number beyond 64 bits
        raise InvalidInput(f"`{field}` cannot be read: {error}") from None
    if size > MAX_FILTER_BYTES:
        raise InvalidInput(f"`{field}` has more than {MAX_FILTER_BYTES} bytes")
    check_conditions(value, field)
    try:
        return models.Filter.model_validate(value)
    except ValidationError as error:
        raise InvalidInput(_message(error, field)) from None


def check_conditions(given: models.Filter | Mapping[str, Any] | None, field: str = "filter") -> None:
    """Raises InvalidInput for too many conditions, or values in all lists and words in all texts together.

    A condition counts wherever it stands: in a group, which is one itself, in `nested` and in `min_should`.
    """
    conditions, values, level = 0, 0, [given]
    while level and conditions <= MAX_CONDITIONS and values <= MAX_VALUES:
        one = level.pop()
        for name, item in (vars(one) if isinstance(one, BaseModel) else one if isinstance(one, Mapping) else {}).items():
            items = item if isinstance(item, list | tuple | set | frozenset) else [] if item is None else [item]
            if name in CLAUSES:
                conditions += len(items)
            elif items is item:
                values += len(items)
            elif name in WORDS and isinstance(item, str):
                values += len(re.findall(r"\w+", item))
            level += items
    if conditions > MAX_CONDITIONS:
        raise InvalidInput(f"`{field}` holds more than {MAX_CONDITIONS} conditions, groups and those in them included")
    if values > MAX_VALUES:
        raise InvalidInput(f"`{field}` holds more than {MAX_VALUES} values, those of all its lists and the words of its texts")


def _depth(value: Any) -> int:
    """Without recursion: it may be deeper than that goes."""
    deepest, level = 0, [value]
    while level and deepest <= MAX_DEPTH * 4:
        level = [
            item for one in level for item in (one.values() if isinstance(one, dict) else one) if isinstance(item, dict | list)
        ]
        deepest += 1
    return deepest // 2  # an object and its list are one level


def _message(error: ValidationError, field: str) -> str:
    mistakes = error.errors(include_url=False, include_context=False, include_input=False)
    deepest = max(mistakes, key=lambda mistake: (len(_path(mistake["loc"])), mistake["type"] != "extra_forbidden"))
    path = field
    for part in _path(deepest["loc"]):
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return f"`{path}`: {deepest['msg']}"


def _path(location: Sequence[int | str]) -> list[int | str]:
    """Without the names of the types that were tried."""
    return [
        part
        for part in location
        if isinstance(part, int) or (part[:1].islower() and "[" not in part and part not in PLAIN_TYPES)
    ]
