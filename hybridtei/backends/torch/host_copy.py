"""Between host and device: one copy there and one back for a whole batch, from and to pinned memory, awaited by nobody early.

A copy of pageable memory makes the host wait, and each costs a launch. So a batch's integers travel as one array, and the
outputs of all heads come back as one of each precision. What was computed in half precision (vectors and states of tokens,
nearly all the bytes there are) crosses as that and becomes float32 on the host: half the bytes, the same numbers. On a CPU
nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Arrays = dict[str, NDArray[Any]]


def to_device(arrays: Mapping[str, NDArray[np.int64]], device: torch.device) -> dict[str, Tensor]:
    """Flat int64 arrays as tensors on a device; on a CPU they share memory."""
    if device.type == "cpu":
        return {name: torch.as_tensor(array) for name, array in arrays.items()}
    staged = torch.empty(sum(map(len, arrays.values())), dtype=torch.int64, pin_memory=device.type == "cuda")
    np.concatenate([*arrays.values()], out=staged.numpy())
    there = staged.to(device, non_blocking=True)  # torch keeps the pinned memory until it has been read
    return dict(zip(arrays, torch.split(there, [len(array) for array in arrays.values()]), strict=True))


def start_copy(tensors: Mapping[str, Tensor], device: torch.device) -> Callable[[], Arrays]:
    """Begin to bring tensors to the host, floats as float32; the function that waits for them. Call it once."""
    if device.type == "cpu":
        return lambda: {name: _plain(tensor).numpy() for name, tensor in tensors.items()}
    kinds = by_kind(tensors)
    copies = {kind: _pinned(joined([tensors[name] for name in names], kind)) for kind, names in kinds.items()}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}  # all that `wait` may hold: the device's memory is free
    arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    arrived.record()

    def wait() -> Arrays:
        arrived.synchronize()  # without the interpreter's lock, so that another thread packs and launches meanwhile
        found: Arrays = {}
        for kind, copy in copies.items():
            found |= parted(of_its_own(copy), {name: shapes[name] for name in kinds[kind]})
        return {name: found[name] for name in shapes}

    return wait


def by_kind(tensors: Mapping[str, Tensor]) -> dict[torch.dtype, list[str]]:
    """Names of the tensors that travel together: those of a precision; all integers as int64."""
    kinds: dict[torch.dtype, list[str]] = {}
    for name, tensor in tensors.items():
        kinds.setdefault(tensor.dtype if tensor.is_floating_point() else torch.int64, []).append(name)
    return kinds


def of_its_own(arrived: Tensor) -> NDArray[Any]:
    """What lies in pinned memory as an array that does not: floats of any precision as float32."""
    widened = arrived.float() if arrived.is_floating_point() else arrived
    copied: NDArray[Any] = (widened.clone() if widened is arrived else widened).numpy()
    return copied


def joined(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Tensors end to end, flat."""
    flat = [tensor.reshape(-1).to(dtype) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def parted(flat: NDArray[Any], shapes: Mapping[str, Sequence[int]]) -> Arrays:
    """What `joined` put end to end, as views."""
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes.values()])
    pieces = np.split(flat, ends[:-1])
    return {name: piece.reshape(tuple(shape)) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}


def _plain(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _pinned(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
