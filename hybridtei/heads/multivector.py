"""One vector a token, for late interaction. Raw: not cut, not normalised."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import linear

from hybridtei.ragged import Offsets, offsets_of


def kept_tokens(
    drop: str, input_ids: NDArray[np.int64], cu_seqlens: Offsets, special_ids: NDArray[np.int64]
) -> tuple[NDArray[np.bool_], Offsets]:
    """Which tokens have a vector, bool[t], and the offsets of what is left, int64[n+1].

    "first" (BGE-M3): all but position 0, the closing special token included. "specials": all but special tokens.
    """
    kept = np.ones(len(input_ids), dtype=bool)
    if drop == "first":
        kept[cu_seqlens[:-1]] = False
    elif drop == "specials":
        kept = ~np.isin(input_ids, special_ids)
    counts = np.add.reduceat(kept, cu_seqlens[:-1]) if len(kept) else np.zeros(0)
    return kept, offsets_of(counts.astype(np.int64))


def multivector(hidden: Tensor, kept: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Project the kept tokens: float[t, h], bool[t] -> float32[t', d]. Source: BGE-M3, Chen et al. 2024, section 3.2."""
    return linear(hidden[kept], weight, bias).to(torch.float32)
