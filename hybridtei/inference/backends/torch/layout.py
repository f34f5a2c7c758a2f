"""The layout of sequences in a flat batch: the only thing that a transformer needs beyond
token-wise arithmetic.

Hidden states are rows `[t, h]`, one a token, sequence after sequence. The layout computes
attention; the rest of a trunk is token-wise and does not depend on sequences.

Relative positions add a bias to attention's scores. A whole bias grows with the square of a text's
length, so it is computed for a few rows of one sequence at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

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
from hybridtei.models.families.ops import Heads


@dataclass(frozen=True, slots=True, eq=False)
class DistanceBias:
    """A bias by distance, the same for all texts: `values` float[heads, 2 * longest + 1], at
    `longest + d` for a key at distance `d` from its query. Larger distances have the last value."""

    values: Tensor

    def projected(
        self,
        q: Tensor,
        k: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """What `of` reads of queries and keys [t, heads, dim]: [t, heads, width] each."""
        return q, k

    def places(
        self,
        q: Tensor,
        k: Tensor,
        first: int,
    ) -> Tensor:
        """What follows from the lengths alone: int64[n, length] for the queries [..., n, heads,
        dim] from token `first` on, and all keys [..., length, heads, dim] of a text."""
        longest = self.values.shape[1] // 2
        return _distances(q, k, first).clamp(-longest, longest) + longest

    def of(
        self,
        q: Tensor,
        k: Tensor,
        places: Tensor,
    ) -> Tensor:
        """The bias float[heads, n, length] of projected queries and keys; of several texts, if they
        differ, float[texts, heads, n, length]."""
        return self.values[:, places]


@dataclass(frozen=True, slots=True, eq=False)
class AlibiBias(DistanceBias):
    """ALiBi's bias. `values` float[heads]: the decrease of scores for each token between query and
    key."""

    def places(
        self,
        q: Tensor,
        k: Tensor,
        first: int,
    ) -> Tensor:
        return _distances(q, k, first).abs()

    def of(
        self,
        q: Tensor,
        k: Tensor,
        places: Tensor,
    ) -> Tensor:
        return -self.values[:, None, None] * places


@dataclass(frozen=True, slots=True, eq=False)
class DisentangledBias:
    """DeBERTa's bias: products of queries and keys with rows of tables float[rows, heads, dim],
    which are scaled as scores are.

    `buckets` int64[2 * longest + 1]: at `longest + d` the row for a query at distance `d` from its
    key. Larger distances have the last row.
    """

    # Each text has its own
    values: ClassVar[None] = None
    buckets: Tensor
    content_to_position: Tensor | None
    position_to_content: Tensor | None

    def projected(
        self,
        q: Tensor,
        k: Tensor,
    ) -> tuple[Tensor, Tensor]:
        if self.content_to_position is not None:
            q = torch.einsum("qhd,rhd->qhr", q, self.content_to_position)
        if self.position_to_content is not None:
            # The keys of a row lie side by side
            k = torch.einsum("khd,rhd->hrk", k, self.position_to_content).permute(2, 0, 1)
        return q, k

    def places(
        self,
        q: Tensor,
        k: Tensor,
        first: int,
    ) -> Tensor:
        longest = len(self.buckets) // 2
        return self.buckets[longest - _distances(q, k, first).clamp(-longest, longest)]

    def of(
        self,
        q: Tensor,
        k: Tensor,
        places: Tensor,
    ) -> Tensor:
        terms = []
        if self.content_to_position is not None:
            scores = q.transpose(-3, -2)
            terms.append(scores.gather(-1, places.expand(*scores.shape[:-2], -1, -1)))
        if self.position_to_content is not None:
            scores = k.movedim(-3, -1)
            terms.append(scores.gather(-2, places.expand(*scores.shape[:-2], -1, -1)))
        return sum(terms[1:], terms[0])


Bias = DistanceBias | DisentangledBias


def _distances(
    q: Tensor,
    k: Tensor,
    first: int,
) -> Tensor:
    """Key minus query: int64[queries, keys]."""
    keys = torch.arange(k.shape[-3], device=k.device)
    return keys - keys[first : first + q.shape[-3], None]


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
        if self._kernel is per_sequence:
            return
        if self._sequences.seen is not None:
            _ = self._sequences.keys
        if self._kernel is padded_groups or self._sequences.seen is not None:
            _ = self._sequences.groups

    def convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        """Sum each row of `x` [t, width] and its neighbours of the same sequence, weighted by
        `weight` [width, 1, 3]. Tokens that are no keys count as zero."""
        if self._sequences.seen is not None:
            rows, _ = self._sequences.keys
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
        heads: Heads,
        bias: Bias | None = None,
    ) -> Tensor:
        """q, k, v [t, heads, head_dim] -> [t, heads, head_dim]. A token attends only to its own
        sequence. k and v may have fewer heads (GQA)."""
        kernel = self._kernel
        if bias is not None:
            kernel = partial(padded_groups if kernel is padded_groups else per_sequence, bias=bias)
        if self.once is None:
            return kernel(q, k, v, self._sequences, heads)
        computed, rows = self.once
        return kernel(q[rows], k[rows], v[rows], self._sequences, heads)[computed]
