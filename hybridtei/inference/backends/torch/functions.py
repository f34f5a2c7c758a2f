"""`heads.Functions` in torch, on whichever device the tensors are, and what `entries_of` rows travels to the host."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hybridtei.inference.backends.heads import Functions, Segments
from hybridtei.inference.backends.torch.ops import ACTIVATIONS

TOKENS_A_LAUNCH = 16  # that a thread of a GPU adds up while its host launches a sum; an estimate


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """In the precision of the matrix."""
    return functional.linear(x.to(weight.dtype), weight, bias)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return functional.layer_norm(x if weight is None else x.to(weight.dtype), x.shape[-1:], weight, bias, eps)


def segment_sum(x: Tensor, at: Segments) -> Tensor:
    """In float32."""
    return _reduced(x.float(), at, "sum", torch.sum)


def segment_max(x: Tensor, at: Segments) -> Tensor:
    return _reduced(x, at, "max", torch.amax)


def _reduced(x: Tensor, at: Segments, how: str, alone: Callable[[Tensor, int], Tensor]) -> Tensor:
    """One launch over all sequences, or one for each; on a CPU, where a launch costs nothing, one for each."""
    lengths = np.diff(at.cu_seqlens).tolist()
    if x.device.type != "cpu" and reduce_at_once(len(lengths), max(lengths)):
        return reduced_at_once(x, at, how)
    return torch.stack([alone(part, 0) for part in torch.split(x, lengths)])


def reduced_at_once(x: Tensor, at: Segments, how: str) -> Tensor:
    return torch.segment_reduce(x, how, lengths=at.offsets.diff(), axis=0, unsafe=True)  # safe would wait for the device


def reduce_at_once(sequences: int, longest: int) -> bool:
    """Whether so many sequences are collapsed by one launch: it has a thread a column and sequence, which walks its tokens."""
    return longest <= TOKENS_A_LAUNCH * sequences


def largest(x: Tensor, count: int) -> Tensor:
    values, places = torch.topk(x, count, dim=1)
    return torch.zeros_like(x).scatter_(1, places, functional.relu(values))


TORCH = Functions(
    library=torch,
    float32=lambda x: x.float(),
    activations=ACTIVATIONS,
    linear=linear,
    layer_norm=layer_norm,
    segment_sum=segment_sum,
    segment_max=segment_max,
    largest=largest,
    repeated=lambda x, at: torch.repeat_interleave(x, at.offsets.diff(), output_size=int(at.cu_seqlens[-1])),
    rows=lambda x, places: x[places],
)


def entries_of(rows: Tensor) -> dict[str, Tensor]:
    """The entries of float[n, v] that are not zero: they are few, and all of it would be hundreds of megabytes to copy.

    Waits for the device, which alone knows how many they are.
    """
    row, column = rows.nonzero(as_tuple=True)
    return {"indices": column, "values": rows[row, column], "lengths": rows.count_nonzero(dim=1)}
