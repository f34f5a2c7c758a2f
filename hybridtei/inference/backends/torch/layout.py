"""The layout of sequences in a flat batch: the only thing that a transformer needs beyond
token-wise arithmetic.

Hidden states are rows `[t, h]`, one a token, sequence after sequence. The layout computes
attention; the rest of a trunk is token-wise and does not depend on sequences.

Relative positions add a bias to attention's scores. A whole bias grows with the square of a text's
length, so it is computed for a few rows of one sequence at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hybridtei.batch import Offsets
from hybridtei.inference.backends.torch.kernels import (
    Kernel,
    Sequences,
    padded_groups,
    per_sequence,
)


@dataclass(frozen=True, slots=True, eq=False)
class DistanceBias:
    """A bias by distance, the same for all texts: `values` float[heads, 2 * longest + 1], at
    `longest + d` for a key at distance `d` from its query. Larger distances have the last value."""

    values: Tensor

    def of(self, sequence: slice, queries: slice) -> Tensor:
        """The bias float[heads, queries, keys] of some queries, counted from the sequence's start,
        and all of its tokens.
        `sequence`: its rows in the batch."""
        longest = self.values.shape[1] // 2
        return self.values[
            :, _distances(sequence, queries, self.values.device).clamp(-longest, longest) + longest
        ]


@dataclass(frozen=True, slots=True, eq=False)
class AlibiBias:
    """ALiBi's bias. `slopes` float[heads]: the decrease of scores for each token between query and
    key."""

    slopes: Tensor

    def of(self, sequence: slice, queries: slice) -> Tensor:
        return -self.slopes[:, None, None] * _distances(sequence, queries, self.slopes.device).abs()


@dataclass(frozen=True, slots=True, eq=False)
class DisentangledBias:
    """DeBERTa's bias: products of queries and keys float[t, heads, dim] with rows of tables
    float[rows, heads, dim].

    `buckets` int64[2 * longest + 1]: at `longest + d` the row for a query at distance `d` from its
    key. Larger distances have the last row.
    """

    queries: Tensor
    keys: Tensor
    buckets: Tensor
    content_to_position: Tensor | None
    position_to_content: Tensor | None
    scale: float

    def of(self, sequence: slice, queries: slice) -> Tensor:
        longest = len(self.buckets) // 2
        rows = self.buckets[
            longest - _distances(sequence, queries, self.buckets.device).clamp(-longest, longest)
        ]
        total: Tensor | None = None
        if self.content_to_position is not None:
            scores = torch.einsum(
                "qhd,rhd->hqr", self.queries[sequence][queries], self.content_to_position
            )
            total = scores.gather(2, rows.expand(len(scores), -1, -1))
        if self.position_to_content is not None:
            scores = torch.einsum("khd,rhd->hrk", self.keys[sequence], self.position_to_content)
            term = scores.gather(1, rows.expand(len(scores), -1, -1))
            total = term if total is None else total + term
        assert total is not None
        return total * self.scale


Bias = DistanceBias | AlibiBias | DisentangledBias


def _distances(sequence: slice, queries: slice, device: torch.device) -> Tensor:
    """Key minus query: int64[queries, keys]."""
    keys = torch.arange(sequence.stop - sequence.start, device=device)
    return keys - keys[queries, None]


class PackedLayout:
    """Sequences end to end, `cu_seqlens[n+1]`, none empty. `unseen[n]`: the number of last tokens
    that are not keys.

    `offsets`: `cu_seqlens` on the device, if it is there already.
    `once`: `batch.Once`'s `computed` and `rows` on the device, if a prefix is computed once. Then
    `attend` takes rows of the computed tokens.
    """

    def __init__(
        self,
        cu_seqlens: Offsets,
        device: torch.device | str = "cpu",
        unseen: Offsets | None = None,
        *,
        kernel: Kernel = per_sequence,
        offsets: Tensor | None = None,
    ) -> None:
        self.cu_seqlens = cu_seqlens
        self.lengths: list[int] = np.diff(cu_seqlens).tolist()
        offsets = torch.as_tensor(cu_seqlens, device=device) if offsets is None else offsets
        seen: list[int] | None = None if unseen is None else (np.diff(cu_seqlens) - unseen).tolist()
        self._sequences = Sequences(self.lengths, offsets, seen)
        self._kernel = kernel
        self.once: tuple[Tensor, Tensor] | None = None

    def stage(self) -> None:
        """Copy attention's other arrays to the device before a pass needs them."""
        if self._kernel is padded_groups:
            _ = self._sequences.groups
        elif self._kernel is not per_sequence and self._sequences.seen is not None:
            _ = self._sequences.keys

    def convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        """Sum each row of `x` [t, width] and its neighbours of the same sequence, weighted by
        `weight` [width, 1, 3]. Tokens that are no keys count as zero."""
        if self._sequences.seen is not None:
            rows = self._sequences.keys[0]
            x = torch.zeros_like(x).index_copy(0, rows, x[rows])
        offsets = self._sequences.offsets
        before = x.roll(1, 0).index_fill(0, offsets[:-1], 0)
        after = x.roll(-1, 0).index_fill(0, offsets[1:] - 1, 0)
        return before * weight[:, 0, 0] + x * weight[:, 0, 1] + after * weight[:, 0, 2]

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None,
        causal: bool,
        bias: Bias | None = None,
    ) -> Tensor:
        """q, k, v [t, heads, head_dim] -> [t, heads, head_dim]. A token attends only to its own
        sequence.

        `window`: only to keys at a distance below it. `causal`: to no later key. k and v may have
        fewer heads (GQA).
        """
        if bias is not None:
            return per_sequence(
                q, k, v, self._sequences, scale=scale, window=window, causal=causal, bias=bias
            )
        if self.once is None:
            return self._kernel(q, k, v, self._sequences, scale=scale, window=window, causal=causal)
        computed, rows = self.once
        q, k, v = (x[rows] for x in (q, k, v))
        return self._kernel(q, k, v, self._sequences, scale=scale, window=window, causal=causal)[
            computed
        ]
