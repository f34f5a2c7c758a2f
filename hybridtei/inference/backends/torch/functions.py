"""`heads.Functions` in torch, on the tensors' device, and `entries_of`, which finds the entries to copy to the host."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hybridtei.inference.backends.heads import Functions, Segments
from hybridtei.inference.backends.torch.ops import ACTIVATIONS

TOKENS_A_LAUNCH = 16  # numbers that a GPU thread adds while the host launches one sum; an estimate


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply a linear layer in the matrix's precision."""
    return functional.linear(x.to(weight.dtype), weight, bias)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return functional.layer_norm(x if weight is None else x.to(weight.dtype), x.shape[-1:], weight, bias, eps)


def segment_sum(x: Tensor, at: Segments) -> Tensor:
    """Sum each sequence's rows in float32."""
    return _reduced(x.float(), at, "sum", torch.sum)


def segment_max(x: Tensor, at: Segments) -> Tensor:
    return _reduced(x, at, "max", torch.amax)


def _reduced(x: Tensor, at: Segments, how: str, alone: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Reduce by one launch for all sequences, or one for each. On a CPU a launch is free, so one for each."""
    lengths = np.diff(at.cu_seqlens).tolist()
    if x.device.type != "cpu" and reduce_at_once(len(lengths), max(lengths)):
        return reduced_at_once(x, at, how)
    return torch.stack([alone(part, 0) for part in torch.split(x, lengths)])


def reduced_at_once(x: Tensor, at: Segments, how: str) -> Tensor:
    return torch.segment_reduce(x, how, lengths=at.offsets.diff(), axis=0, unsafe=True)  # a check would wait for the device


def reduce_at_once(sequences: int, longest: int) -> bool:
    """True if one launch should reduce all sequences: its threads, one a column and sequence, walk the tokens."""
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
    """The non-zero entries of float[n, v]. They are few; the whole array would be hundreds of megabytes to copy.

    Waits for the device, since only the device knows their number.
    """
    row, column = rows.nonzero(as_tuple=True)
    return {"indices": column, "values": rows[row, column], "lengths": rows.count_nonzero(dim=1)}
