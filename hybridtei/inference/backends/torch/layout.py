"""Where sequences begin and end in a flat batch: the one thing a transformer needs beyond token-wise arithmetic.

Hidden states are rows `[t, h]`, one a token, sequence after sequence. Attention is asked of the layout; everything else of a
trunk is written once, without knowing that sequences exist.

A bias is what relative positions add to the scores of attention. The whole of it grows with the square of a text's length, so
it is made for some rows of one sequence at a time, no more at once than attention needs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hybridtei.batch import Offsets
from hybridtei.inference.backends.torch.kernels import Kernel, Sequences, padded_groups, per_sequence


@dataclass(frozen=True, slots=True, eq=False)
class DistanceBias:
    """The same for all texts: `values` float[heads, 2 * longest + 1], at `longest + d` for a key at `d` from its query, or the
    last ones if it is further."""

    values: Tensor

    def of(self, sequence: slice, queries: slice) -> Tensor:
        """float[heads, queries, keys]: of some queries of a sequence, counted from its begin, against all of its tokens.
        `sequence`: where it lies among the rows of the batch."""
        longest = self.values.shape[1] // 2
        return self.values[:, _distances(sequence, queries, self.values.device).clamp(-longest, longest) + longest]


@dataclass(frozen=True, slots=True, eq=False)
class AlibiBias:
    """ALiBi's: `slopes` float[heads], by which scores fall for each token between a query and a key."""

    slopes: Tensor

    def of(self, sequence: slice, queries: slice) -> Tensor:
        """See `DistanceBias.of`."""
        return -self.slopes[:, None, None] * _distances(sequence, queries, self.slopes.device).abs()


@dataclass(frozen=True, slots=True, eq=False)
class DisentangledBias:
    """DeBERTa's: products of queries and keys float[t, heads, dim] with rows of tables float[rows, heads, dim].

    `buckets` int64[2 * longest + 1]: the row for a query at `d` from its key, at `longest + d`; the last ones if it is further.
    """

    queries: Tensor
    keys: Tensor
    buckets: Tensor
    content_to_position: Tensor | None
    position_to_content: Tensor | None
    scale: float

    def of(self, sequence: slice, queries: slice) -> Tensor:
        """See `DistanceBias.of`."""
        longest = len(self.buckets) // 2
        rows = self.buckets[longest - _distances(sequence, queries, self.buckets.device).clamp(-longest, longest)]
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


Bias = DistanceBias | AlibiBias | DisentangledBias


def _distances(sequence: slice, queries: slice, device: torch.device) -> Tensor:
    """Key minus query: int64[queries, keys]."""
    keys = torch.arange(sequence.stop - sequence.start, device=device)
    return keys - keys[queries, None]


class PackedLayout:
    """Sequences end to end, `cu_seqlens[n+1]`; none may be empty. `unseen[n]`: tokens at their ends that none attends to.

    `offsets`: `cu_seqlens` where it is on the device already, so that nothing is copied again.
    `once`: where a prefix is computed once, see `batch.Once`: its `kept` and `rows` on the device. Then `attend` takes rows of
    the tokens that are computed.
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
        """Copy to the device what attention needs besides the offsets, before a pass asks for it."""
        if self._kernel is padded_groups:
            _ = self._sequences.groups
        elif self._kernel is not per_sequence and self._sequences.seen is not None:
            _ = self._sequences.keys

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, causal: bool, bias: Bias | None = None
    ) -> Tensor:
        """[t, heads, head_dim] each -> [t, heads, head_dim]; a token sees its own sequence only.

        `window`: sees keys at a distance below it. `causal`: sees no later key. k and v may have fewer heads (GQA).
        """
        if bias is not None:
            return per_sequence(q, k, v, self._sequences, scale=scale, window=window, causal=causal, bias=bias)
        if self.once is None:
            return self._kernel(q, k, v, self._sequences, scale=scale, window=window, causal=causal)
        kept, rows = self.once
        q, k, v = (x[rows] for x in (q, k, v))
        return self._kernel(q, k, v, self._sequences, scale=scale, window=window, causal=causal)[kept]
