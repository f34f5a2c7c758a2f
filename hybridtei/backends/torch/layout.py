"""Where sequences begin and end in a flat batch: the one thing a transformer needs beyond token-wise arithmetic.

Hidden states are rows `[t, h]`, one a token, sequence after sequence. Attention and the four ways to collapse a sequence
(first, last, mean, max) are asked of the layout; everything else is written once, without knowing that sequences exist.

A bias is what relative positions add to the scores of attention. The whole of it grows with the square of a text's length, so
it is made for some rows of one sequence at a time, no more at once than attention needs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hybridtei.backends.torch.kernels import Kernel, Sequences, after_prefix, padded_groups, per_sequence
from hybridtei.batch import Offsets


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


TOKENS_A_LAUNCH = 16  # that a thread of a GPU adds up while its host launches a sum; an estimate


class PackedLayout:
    """Sequences end to end, `cu_seqlens[n+1]`; none may be empty. `unseen[n]`: tokens at their ends that none
    attends to. To collapse is x: float[t, ...], one row a token -> float[n, ...], one row a sequence.

    `offsets`: `cu_seqlens` where it is on the device already, so that nothing is copied again.
    `once`: where the `prefix` is computed once, see `batch.Once`: its `kept` and `rows` on the device. Then `attend` takes rows
    of the tokens that are computed; the rest takes rows of all.
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
        self.prefix = 0
        self._starts = offsets[:-1]
        self._ends = offsets[1:]
        self._counts = (self._ends - self._starts).unsqueeze(1)

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
        if self._kernel is per_sequence:
            return after_prefix(q, k, v, self.lengths, self.prefix, scale=scale, window=window)
        kept, rows = self.once
        q, k, v = (x[rows] for x in (q, k, v))
        return self._kernel(q, k, v, self._sequences, scale=scale, window=window, causal=causal)[kept]

    def first(self, x: Tensor) -> Tensor:
        return x[self._starts]

    def last(self, x: Tensor) -> Tensor:
        return x[self._ends - 1]

    def sum(self, x: Tensor) -> Tensor:
        """float[t, h] -> float32[n, h]; each sequence is added up by itself, so neighbours cannot change a digit."""
        x = x.float()
        if self._at_once():
            return self._reduced(x, "sum")
        return torch.stack([part.sum(0) for part in torch.split(x, self.lengths)])

    def mean(self, x: Tensor) -> Tensor:
        return self.sum(x) / self._counts

    def max(self, x: Tensor) -> Tensor:
        if self._at_once():
            return self._reduced(x, "max")
        return torch.stack([part.amax(0) for part in torch.split(x, self.lengths)])

    @property
    def counts(self) -> Tensor:
        """Tokens a sequence: int64[n, 1]."""
        return self._counts

    def places(self) -> Tensor:
        """0-based place of each token in its sequence: int64[t]."""
        tokens = int(self.cu_seqlens[-1])
        starts = torch.repeat_interleave(self._starts, self._counts[:, 0], output_size=tokens)
        return torch.arange(tokens, device=starts.device) - starts

    def _at_once(self) -> bool:
        """Whether one launch over all sequences beats one for each of them: never on a CPU, where a launch costs nothing."""
        return self._starts.device.type != "cpu" and reduce_at_once(len(self.lengths), self._sequences.longest)

    def _reduced(self, x: Tensor, how: str) -> Tensor:
        return torch.segment_reduce(x, how, lengths=self._counts[:, 0], axis=0, unsafe=True)  # safe would wait for the device


def reduce_at_once(sequences: int, longest: int) -> bool:
    """Whether so many sequences are collapsed by one launch: it has a thread a column and sequence, which walks its tokens."""
    return longest <= TOKENS_A_LAUNCH * sequences
