"""What a kernel is told of a flat batch: where its sequences lie, in the forms that kernels ask for.

All layers of a pass ask the same, so everything that costs a copy or an allocation is made once, when first asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from hybridtei.batch import offsets_of


@dataclass(eq=False)
class Sequences:
    """`lengths`: tokens of each. `seen`: of each only so many tokens from the first on are keys; None: all are.

    `offsets`: where each begins and the last ends, integers [n+1] on the device. `bound`: what kernels are told instead of the
    length of the longest, where that may be more in another batch of the same shapes.
    """

    lengths: list[int]
    offsets: Tensor
    seen: list[int] | None = None
    bound: int | None = None
    kept: dict[Any, Any] = field(default_factory=dict)  # what a kernel made for all layers, by a key of its own

    @property
    def device(self) -> torch.device:
        """Where the batch lies."""
        return self.offsets.device

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest sequence, or a bound on them."""
        return max(self.lengths) if self.bound is None else self.bound

    @cached_property
    def offsets_int32(self) -> Tensor:
        """`offsets` as flash attention wants them."""
        return self.offsets.to(torch.int32)

    @cached_property
    def keys(self) -> tuple[Tensor, Tensor, int]:
        """(rows of the tokens that are keys, their int32 offsets, most keys of a sequence), where not all are."""
        assert self.seen is not None
        starts = offsets_of(self.lengths)[:-1]
        rows = np.concatenate([np.arange(start, start + count) for start, count in zip(starts, self.seen, strict=True)])
        place = torch.as_tensor(rows, device=self.device)
        return place, torch.as_tensor(offsets_of(self.seen), device=self.device).to(torch.int32), max(self.seen)


class Kernel(Protocol):
    """q [t, heads, head_dim], k and v [t, key_heads, head_dim] -> [t, heads, head_dim]; see `Layout.attend`."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, *, scale: float, window: int | None, causal: bool
    ) -> Tensor: ...
