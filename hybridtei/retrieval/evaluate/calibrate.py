"""Fits probabilities of relevance to the scores of one way of searching, on judged queries.

Each of a query's hits is a pair: its score, and whether its document is judged relevant. A document
without a judgement counts as not relevant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridtei.client import AsyncClient
from hybridtei.config import StoreConfig
from hybridtei.errors import InvalidInput
from hybridtei.retrieval.evaluate.measures import (
    COMMON,
    SEED,
    Calibration,
    Floats64,
    Judgements,
    documents_of,
)
from hybridtei.retrieval.search.calibration import Curve, probabilities
from hybridtei.retrieval.store import opened
from hybridtei.retrieval.store.collection import CollectionSchemas
from hybridtei.retrieval.store.plan import CALIBRATION

MAX_POINTS, BINS = 20, 10
# Of 100 hits most are improbable, so the error of the first ten is told
PAGE = 10
# Of a stored score or probability
DIGITS = 6


async def judged_pairs(
    client: AsyncClient,
    collection: str,
    judged: Judgements,
    options: Mapping[str, Any],
) -> tuple[str, Floats64]:
    """Search for every judged query. Return the way of searching, and float64[pairs, 4]: score,
    relevance (0 or 1), the query's place, and the hit's. Raises the errors of
    `AsyncClient.search`."""
    way, rows = "", []
    choices = {**COMMON, **options, "explain": True}
    queries = {**judged.queries, **judged.unanswerable}
    for place, (identity, text) in enumerate(queries.items()):
        result = await client.search(collection, text, **choices)
        grades = judged.relevance.get(identity, {})
        # A query that lacks one of the way's vectors has no way, and its hits no probability
        if result.way is not None:
            way = result.way
            for rank, (hit, document) in enumerate(
                zip(result.hits, documents_of(result), strict=True)
            ):
                rows.append((hit.score, grades.get(document, 0) > 0, place, rank))
    return way, np.array(rows, np.float64).reshape(-1, 4)


def calibrated(way: str, pairs: Floats64) -> Calibration:
    """Fit a curve to all pairs, and measure the error of a curve of half of the queries on the
    first hits of the other half. Raises InvalidInput unless both halves have relevant pairs."""
    scores, relevant, places, ranks = pairs.T
    half = split(places)
    if not (relevant[half].any() and relevant[~half].any()):
        raise InvalidInput(
            f"--calibrate: {relevant.sum():.0f} of {len(pairs)} hits are judged relevant, should "
            "be some in each half of the queries; do the judgements name this collection's "
            "documents?"
        )
    page = ~half & (ranks < PAGE)
    values = np.array(probabilities(fit(scores[half], relevant[half]), scores[page]))
    error = round(calibration_error(values, relevant[page]), DIGITS)
    return Calibration(way, fit(scores, relevant), len(pairs), int(relevant.sum()), error)


def split(places: Floats64) -> NDArray[np.bool_]:
    """True for the pairs of a random half of the queries. Deterministic."""
    names, queries = np.unique(places, return_inverse=True)
    shuffled = np.random.default_rng(SEED).permutation(len(names))
    is_even: NDArray[np.bool_] = shuffled[queries] % 2 == 0
    return is_even


def fit(scores: Floats64, relevant: Floats64) -> Curve:
    """Isotonic regression of relevance on the score. A point is the mean score and the share of
    relevant pairs of a block; of more than `MAX_POINTS` blocks, evenly spaced ones."""
    from scipy.optimize import isotonic_regression

    # Pairs of equal scores are one observation
    values, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    fitted = isotonic_regression(np.bincount(places, relevant) / counts, weights=counts)
    starts = fitted.blocks[:-1]
    means = np.add.reduceat(values * counts, starts) / fitted.weights
    chosen = np.unique(np.linspace(0, len(starts) - 1, MAX_POINTS).astype(int))
    points = np.stack([means, fitted.x[starts]], 1)[chosen].round(DIGITS)
    return [(score, share) for score, share in points.tolist()]


def calibration_error(values: Floats64, relevant: Floats64) -> float:
    """The expected calibration error: the mean distance of probability and share of relevant pairs
    in `BINS` equally wide bins, weighted by their pairs."""
    bins = np.minimum((values * BINS).astype(int), BINS - 1)
    gaps = np.bincount(bins, values - relevant)
    return float(abs(gaps).sum() / len(values))


async def keep_curve(config: StoreConfig, collection: str, calibration: Calibration) -> None:
    """Store the curve in the collection's metadata, beside those of other ways. Raises
    StoreError."""
    async with opened(config) as store:
        schema = await CollectionSchemas(store).of(collection)
        curves = {**schema.metadata.get(CALIBRATION, {}), calibration.way: calibration.curve}
        await store.annotate(str(schema.stored_as), {CALIBRATION: curves})
