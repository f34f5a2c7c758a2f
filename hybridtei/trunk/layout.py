"""Where sequences begin and end in a flat batch: the one thing a transformer needs beyond token-wise arithmetic.

Hidden states are rows `[t, h]`, one a token, sequence after sequence. Attention and the four ways to collapse a sequence
(first, last, mean, max) are asked of the layout; everything else is written once, without knowing that sequences exist.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hybridtei.ragged import Offsets
from hybridtei.trunk.attention import sdpa_per_sequence


class Layout(Protocol):
    """x: float[t, ...], one row a token -> float[n, ...], one row a sequence."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, causal: bool) -> Tensor:
        """[t, heads, head_dim] each -> [t, heads, head_dim]; a token sees its own sequence only.

        `window`: sees keys at a distance below it. `causal`: sees no later key. k and v may have fewer heads (GQA).
        """
        ...

    def first(self, x: Tensor) -> Tensor: ...
    def last(self, x: Tensor) -> Tensor: ...
    def mean(self, x: Tensor) -> Tensor: ...
    def max(self, x: Tensor) -> Tensor: ...


class PackedLayout:
    """Sequences end to end, `cu_seqlens[n+1]`; none may be empty. `unseen[n]`: tokens at their ends that none attends to."""

    def __init__(self, cu_seqlens: Offsets, device: torch.device | str = "cpu", unseen: Offsets | None = None) -> None:
        self.cu_seqlens = cu_seqlens
        self.lengths: list[int] = np.diff(cu_seqlens).tolist()
        self._seen: list[int] | None = None if unseen is None else (np.diff(cu_seqlens) - unseen).tolist()
        self._starts = torch.as_tensor(cu_seqlens[:-1], device=device)
        self._ends = torch.as_tensor(cu_seqlens[1:], device=device)
        self._counts = (self._ends - self._starts).unsqueeze(1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, causal: bool) -> Tensor:
        return sdpa_per_sequence(q, k, v, self.lengths, scale=scale, window=window, causal=causal, seen=self._seen)

    def first(self, x: Tensor) -> Tensor:
        return x[self._starts]

    def last(self, x: Tensor) -> Tensor:
        return x[self._ends - 1]

    def sum(self, x: Tensor) -> Tensor:
        """float[t, h] -> float32[n, h]; each sequence is added up by itself, so neighbours cannot change a digit."""
        return torch.stack([part.sum(0) for part in torch.split(x.float(), self.lengths)])

    def mean(self, x: Tensor) -> Tensor:
        return self.sum(x) / self._counts

    def max(self, x: Tensor) -> Tensor:
        return torch.stack([part.amax(0) for part in torch.split(x, self.lengths)])

    @property
    def counts(self) -> Tensor:
        """Tokens a sequence: int64[n, 1]."""
        return self._counts

    def places(self) -> Tensor:
        """0-based place of each token in its sequence: int64[t]."""
        places = np.arange(self.cu_seqlens[-1]) - np.repeat(self.cu_seqlens[:-1], np.diff(self.cu_seqlens))
        return torch.as_tensor(places, device=self._starts.device)
