"""Groups of neighbours: training batches in which the wrong answers are near the right one."""

from __future__ import annotations

import torch
from torch import Tensor

PIVOT_SAMPLE = 256
LLOYD_STEPS = 2


def neighbour_groups(vectors: Tensor, size: int, generator: torch.Generator) -> list[Tensor]:
    """Split the rows of `vectors` [n, hidden_size] into groups of near neighbours; return their row numbers.

    Every group has exactly `size` rows, but one has the remainder if n is no multiple. The rows are halved again and
    again at the median along the line between two means: n log n work, where exact neighbours would take n^2, and a
    different grouping for each state of `generator`.
    """
    groups: list[Tensor] = []
    pending = [torch.arange(len(vectors))]
    while pending:
        rows = pending.pop()
        if len(rows) <= size:
            groups.append(rows)
            continue
        order = rows[(vectors[rows] @ _split_direction(vectors[rows], generator)).argsort(stable=True)]
        middle = max(1, round(len(rows) / size / 2)) * size
        pending += [order[middle:], order[:middle]]
    return groups


def _split_direction(vectors: Tensor, generator: torch.Generator) -> Tensor:
    """Return the line [hidden_size] between two means (two-means clustering of a sample, from two far points)."""
    draw = torch.randint(len(vectors), (min(PIVOT_SAMPLE, len(vectors)),), generator=generator)
    sample = vectors[draw]
    near = sample[0]
    far = sample[(sample @ near).argmin()]
    for _ in range(LLOYD_STEPS):
        side = sample @ (near - far) > 0
        if side.all() or not side.any():
            break
        near, far = sample[side].mean(0), sample[~side].mean(0)
    return near - far
