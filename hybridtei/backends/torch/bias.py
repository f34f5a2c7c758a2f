"""What relative positions add to the scores of attention, for some rows of one sequence at a time.

The whole of it grows with the square of a text's length, so no more is made at once than attention needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Bias(Protocol):
    """Of a batch; `sequence`: where the sequence lies among the rows of the batch."""

    def of(self, sequence: slice, queries: slice) -> Tensor:
        """float[heads, queries, keys]: of some queries of a sequence, counted from its begin, against all of its tokens."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class DistanceBias:
    """The same for all texts: `values` float[heads, 2 * longest + 1], at `longest + d` for a key at `d` from its query."""

    values: Tensor

    def of(self, sequence: slice, queries: slice) -> Tensor:
        """See `Bias`."""
        return self.values[:, _distances(sequence, queries, self.values.device) + self.values.shape[1] // 2]


@dataclass(frozen=True, slots=True, eq=False)
class AlibiBias:
    """ALiBi's: `slopes` float[heads], by which scores fall for each token between a query and a key."""

    slopes: Tensor

    def of(self, sequence: slice, queries: slice) -> Tensor:
        """See `Bias`."""
        return -self.slopes[:, None, None] * _distances(sequence, queries, self.slopes.device).abs()


@dataclass(frozen=True, slots=True, eq=False)
class DisentangledBias:
    """DeBERTa's: products of queries and keys float[t, heads, dim] with rows of tables float[rows, heads, dim].

    `buckets` int64[2 * longest + 1]: the row for a query at `d` from its key, at `longest + d`.
    """

    queries: Tensor
    keys: Tensor
    buckets: Tensor
    content_to_position: Tensor | None
    position_to_content: Tensor | None
    scale: float

    def of(self, sequence: slice, queries: slice) -> Tensor:
        """See `Bias`."""
        rows = self.buckets[len(self.buckets) // 2 - _distances(sequence, queries, self.buckets.device)]
        total: Tensor | None = None
        if self.content_to_position is not None:
            scores = torch.einsum("qhd,rhd->hqr", self.queries[sequence][queries], self.content_to_position)
            total = scores.gather(2, rows.expand(len(scores), -1, -1))
        if self.position_to_content is not None:
            scores = torch.einsum("khd,rhd->hrk", self.keys[sequence], self.position_to_content)
            found = scores.gather(1, rows.expand(len(scores), -1, -1))
            total = found if total is None else total + found
        assert total is not None
        return total * self.scale


def _distances(sequence: slice, queries: slice, device: torch.device) -> Tensor:
    """Key minus query: int64[queries, keys]."""
    keys = torch.arange(sequence.stop - sequence.start, device=device)
    return keys - keys[queries, None]
