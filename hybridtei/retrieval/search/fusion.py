"""The vectors of one query in a search, their weights, and the formulas that fuse their scores.

A column is float64[candidates], NaN for candidates that a leg did not score or find.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridtei.errors import InvalidInput
from hybridtei.options import PRESETS
from hybridtei.outputs import Embeddings
from hybridtei.retrieval.search.options import CheckedOptions
from hybridtei.retrieval.store.base import DENSE, MULTIVECTOR, NAMES, SPARSE

# Chosen on judged collections (conformance/quality/default_search.py).
ZSCORE_WEIGHTS = {DENSE: 1.0, SPARSE: 0.5}
ZSCORE_WEIGHTS_WITH_MAXSIM = {DENSE: 1.0, SPARSE: 0.7, MULTIVECTOR: 1.0}
PACKED_ALONE = (
    "the collection has multi-vectors as bytes in the payload, which can score candidates but not "
    "find them, as `mode` multivector and rrf need; search in mode zscore or weighted, or with "
    "`rescore`"
)

# Its 61 is the literature's 60
QDRANTS_K = 2
# Smaller differences of scores are rounding
FLAT = 1e-6
# The least candidates for statistics of their own
FEW = 10

# Weights, as users give them
Weights = Mapping[str, float] | Sequence[float] | str | None
Column = NDArray[np.float64]
Columns = Mapping[str, Column]


@dataclass(frozen=True, slots=True)
class Legs:
    """The vectors of a query by name, the weights of scoring vectors, and the names of finding
    vectors."""

    vectors: Mapping[str, Any]
    weights: Mapping[str, float]
    finders: Sequence[str]


def legs_of(query: Embeddings, row: int, options: CheckedOptions, *, is_packed: bool) -> Legs:
    """The legs of a search in the options' mode. Without words in the query and without other legs
    there are no finders.

    `is_packed`: the collection stores multi-vectors as bytes. Raises InvalidInput, naming the
    field.
    """
    mode, vectors = options.mode, _vectors(query, row)
    assert mode is not None
    if mode != "rrf":
        _refuse(mode, rrf_k=options.rrf_k)
    if options.rescore:
        _check(vectors, MULTIVECTOR)
    if mode in NAMES:
        _refuse(mode, weights=options.weights, legs=options.legs)
        _check(vectors, mode)
    names = list(vectors)
    if options.legs is None and SPARSE in vectors and not len(vectors[SPARSE]["indices"]):
        names.remove(SPARSE)
    weights = weights_of(names, options)
    finders = list(weights)
    # To find points, a multi-vector would scan all of them: it only scores what others find
    if mode in ("zscore", "weighted"):
        finders = [leg for leg in weights if leg != MULTIVECTOR] or finders
    if is_packed and MULTIVECTOR in finders:
        if mode in NAMES or options.legs is not None:
            raise InvalidInput(PACKED_ALONE)
        finders.remove(MULTIVECTOR)
    return Legs(vectors, weights, finders)


def _refuse(mode: str, **fields: object) -> None:
    for field, value in fields.items():
        if value is not None:
            raise InvalidInput(f"`{field}` means nothing in mode {mode!r}")


def _check(names: Collection[str], name: str) -> None:
    if name not in names:
        raise InvalidInput(f"the query has no {name} vector; it has {', '.join(names) or 'none'}")


def _vectors(query: Embeddings, row: int) -> dict[str, Any]:
    """The vectors of a query, without an empty multi-vector. Raises InvalidInput."""
    vectors = query.row(row)
    for name, vector in vectors.items():
        if not np.isfinite(vector["values"] if name == SPARSE else vector).all():
            raise InvalidInput(f"the query's {name} vector holds numbers that are not finite")
    return {name: vector for name, vector in vectors.items() if len(vector)}


def _chosen(names: Collection[str], options: CheckedOptions) -> list[str]:
    """The names of the legs: the user's, or the mode's defaults."""
    if options.legs is None:
        takes_all = options.mode == "zscore" or (
            options.mode == "weighted" and _weighs_multivector(options.weights)
        )
        return [name for name in (NAMES if takes_all else (DENSE, SPARSE)) if name in names]
    legs = list(options.legs)
    if not legs or len(set(legs)) != len(legs) or not set(legs) <= set(NAMES):
        raise InvalidInput(f"`legs` are {legs}, should be some of {', '.join(NAMES)}, each once")
    for leg in legs:
        _check(names, leg)
    return legs


def _weighs_multivector(weights: Weights) -> bool:
    if isinstance(weights, str):
        return weights in PRESETS
    if isinstance(weights, Mapping):
        return MULTIVECTOR in weights
    return weights is not None and len(weights) == len(NAMES)


def weights_of(names: Collection[str], options: CheckedOptions) -> dict[str, float]:
    """The weight of each leg of a query that has vectors of these names, without legs of weight 0.
    Raises InvalidInput."""
    if options.mode in NAMES:
        return {options.mode: 1.0}
    legs, weights = _chosen(names, options), options.weights
    if not legs or (weights is None and options.mode != "zscore"):
        return dict.fromkeys(legs, 1.0)
    if weights is None:
        weights = ZSCORE_WEIGHTS_WITH_MAXSIM if MULTIVECTOR in legs else ZSCORE_WEIGHTS
    if isinstance(weights, str):
        named = PRESETS.get(weights)
        if named is None:
            raise InvalidInput(f"`weights` are {weights!r}, presets are {', '.join(PRESETS)}")
        weights = named.by_name
    if isinstance(weights, Mapping):
        unknown = sorted(set(weights) - set(NAMES))
        if unknown:
            raise InvalidInput(f"`weights` name {unknown[0]!r}, should name {', '.join(NAMES)}")
        weights = [weights.get(leg, 0.0) for leg in legs]
    if len(weights) != len(legs):
        raise InvalidInput(
            f"`weights` are {len(weights)}, should be as many as there are legs: {', '.join(legs)}"
        )
    values = {leg: float(weight) for leg, weight in zip(legs, weights, strict=True) if weight != 0}
    # NaN fails both comparisons.
    if not values or not (min(values.values()) > 0 and sum(values.values()) < np.inf):
        raise InvalidInput(
            f"`weights` are {list(weights)}, should be finite, 0 or more, and not all 0"
        )
    return values


def reciprocal_ranks(places: Columns, weights: Mapping[str, float], k: int | None) -> Column:
    """The sum of 1 / (place / weight + k - 1), as in Qdrant's RRF. A leg that did not find a
    candidate adds nothing."""
    # A place divided by a tiny weight is infinite, so its part of the sum is 0
    with np.errstate(over="ignore"):
        parts = [
            1.0 / (column / weights[leg] + (k or QDRANTS_K) - 1) for leg, column in places.items()
        ]
    return np.asarray(np.nansum(parts, axis=0))


def weighted_sum(scores: Columns, weights: Mapping[str, float]) -> Column:
    """The sum of weight × score. A leg that did not score a candidate adds nothing."""
    return np.asarray(
        np.nansum([weights[leg] * column for leg, column in scores.items()], axis=0), np.float64
    )


def normalised(column: Column, mean: float, deviation: float, weight: float) -> Column:
    """weight × (score - mean) / deviation of a complete column; 0 if all scores are equal."""
    return (column - mean) * (weight / deviation if deviation > FLAT else 0.0)


def complete(column: Column) -> Column:
    """The scores. A candidate without one gets the lowest score."""
    is_scored = ~np.isnan(column)
    return np.where(is_scored, column, float(column[is_scored].min()) if is_scored.any() else 0.0)


def scale_of(column: Column) -> tuple[float, float]:
    """(mean, deviation) that normalise a complete column: the scores' own from `FEW` scores on.

    A single score is normalised to 1 by its size. Between the two, each further score changes the
    deviation by the same factor and the normalised best score by the same step, so no number of
    candidates makes the normalised scores jump.
    """
    own = min((len(column) - 1) / (FEW - 1), 1.0)
    best = float(column.max())
    size = float(np.abs(column).max())
    deviation = float(column.std())
    # Rounding is no deviation
    if deviation <= FLAT:
        deviation = max(size, FLAT)
    height = own * (best - float(column.mean())) / deviation + 1 - own
    deviation = deviation**own * size ** (1 - own)
    return best - height * deviation, deviation
