"""Cutting and normalising float rows, after the shared pass, as each request asks."""

from __future__ import annotations

import numpy as np

from hybridtei.outputs import Floats

SMALLEST_NORM = 1e-12


def unit(rows: Floats) -> Floats:
    """Rows scaled to length 1: float32[n, d] -> float32[n, d]. A zero row stays zero. The sum runs in float64, as TEI's."""
    norms = np.sqrt(np.einsum("nd,nd->n", rows, rows, dtype=np.float64))
    scale = (1.0 / np.maximum(norms, SMALLEST_NORM)).astype(np.float32)
    return np.asarray(rows * scale[:, None])


def cut(rows: Floats, dimensions: int | None) -> Floats:
    """The first `dimensions` columns (Matryoshka); all of them where there are fewer, or for None."""
    return rows if dimensions is None else rows[:, :dimensions]


def cosine(one: Floats, many: Floats) -> Floats:
    """Cosine of float32[d] to each row of float32[n, d]: float32[n]."""
    return np.asarray(unit(many) @ unit(one[None])[0])
