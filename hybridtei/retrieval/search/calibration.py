"""Probabilities of relevance: curves over scores that `hybridtei eval --calibrate` fits, in a
collection's metadata.

    {"zscore, dense=1, sparse=0.5, of 100": [[-1.2, 0.01], [2.4, 0.7], [5.1, 0.93]]}

A curve belongs to one way of searching, since scores of other modes, weights or rerankers mean
something else. Between two of its points a probability lies on the line between them; beyond them
it is that of the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath

import msgspec
import numpy as np

from hybridtei.retrieval.search.fusion import QDRANTS_K
from hybridtei.retrieval.search.options import CheckedOptions
from hybridtei.retrieval.store.base import CollectionSchema
from hybridtei.retrieval.store.plan import CALIBRATION

# Points of score and probability, both ascending
Curve = list[tuple[float, float]]
DIGITS = 4


def way_of(options: CheckedOptions, weights: Mapping[str, float], ranker: str | None = None) -> str:
    """The name of a way of searching: all that changes what a score means. `ranker`: a path or hub
    id; the name has its last part."""
    parts = [
        options.mode,
        ", ".join(f"{leg}={weight:g}" for leg, weight in weights.items()),
        f"of {options.prefetch_limit}",
        options.mode == "rrf" and f"k={options.rrf_k or QDRANTS_K}",
        options.query_encoder != "model" and options.query_encoder,
        options.rescore and "rescore",
        ranker and f"rerank={PurePath(ranker).name}",
    ]
    return ", ".join(part for part in parts if part)


def curve_of(schema: CollectionSchema, way: str) -> Curve | None:
    """The collection's curve of a way of searching; None without one, and for what is no curve."""
    try:
        return msgspec.convert(schema.metadata[CALIBRATION][way], Curve) or None
    except (KeyError, TypeError, msgspec.ValidationError):
        return None


def probabilities(curve: Curve, scores: Sequence[float]) -> list[float]:
    """The probability of each score."""
    values: list[float] = np.interp(scores, *np.transpose(curve)).round(DIGITS).tolist()
    return values
