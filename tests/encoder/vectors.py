"""Texts, and vectors of them side by side."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from hybridtei.encoder import Encoder
from tests import tolerances, vocabulary
from tests.near import near

TEXTS = vocabulary.texts(24)
EVERYTHING = ("dense", "sparse", "multivector", "tokens")


def dense_of(encoder: Encoder, texts: Sequence[str] = TEXTS, **options: Any) -> np.ndarray:
    return encoder.encode(texts, **options).dense


def close(
    ours: np.ndarray, theirs: np.ndarray, tolerance: float = tolerances.WEIGHTS["float32"]
) -> None:
    near(ours, theirs, tolerance)
