"""A device's memory: copies to it and back, the largest pass that fits, and batches that do not
fit.

Copying pageable memory makes the host wait. So a batch's integers are copied as one array from
pinned memory, and heads' outputs to pinned memory. Outputs in half precision (token vectors and
states, nearly all bytes) are copied as such and become float32 on the host: half the bytes, the
same numbers. On a CPU nothing is copied.

The size of a pass is found by trial, from the largest down, with the longest sequences, since plain
attention's masks need extra memory. A later batch that does not fit is split in halves, down to
single sequences.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridtei.batch import PackedBatch, part
from hybridtei.errors import BackendError, LoadError, PartlyFailed
from hybridtei.inference.backends.base import made_up
from hybridtei.outputs import HeadOutputs

if TYPE_CHECKING:
    from hybridtei.models.checkpoint.spec import ModelSpec

log = logging.getLogger(__name__)

Arrays = dict[str, NDArray[Any]]


def to_device(arrays: Mapping[str, NDArray[np.int64]], device: torch.device) -> dict[str, Tensor]:
    """Copy flat int64 arrays to a device as tensors. On a CPU they share memory."""
    if device.type == "cpu":
        return {name: torch.as_tensor(array) for name, array in arrays.items()}
    staged = torch.empty(
        sum(map(len, arrays.values())), dtype=torch.int64, pin_memory=device.type == "cuda"
    )
    np.concatenate([*arrays.values()], out=staged.numpy())
    # Torch keeps the pinned memory until the copy is done
    copy = staged.to(device, non_blocking=True)
    return dict(
        zip(arrays, torch.split(copy, [len(array) for array in arrays.values()]), strict=True)
    )


def start_copy(tensors: Mapping[str, Tensor], device: torch.device) -> Callable[[], Arrays]:
    """Begin to copy tensors to the host, floats as float32. Return a function that waits for them;
    call it once."""
    if device.type == "cpu":
        return lambda: {name: _plain(tensor).numpy() for name, tensor in tensors.items()}
    copies = {name: _pinned(tensor) for name, tensor in tensors.items()}
    arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    arrived.record()

    def wait() -> Arrays:
        """Wait for the copies. Holds no tensor of the device, so that the next pass can use their
        memory."""
        # Releases the GIL, so that another thread packs and launches meanwhile
        arrived.synchronize()
        return {name: of_its_own(copy) for name, copy in copies.items()}

    return wait


def of_its_own(arrived: Tensor) -> NDArray[Any]:
    """Copy a tensor from pinned memory to a normal array, floats of any precision as float32."""
    widened = _plain(arrived)
    copied: NDArray[Any] = (widened.clone() if widened is arrived else widened).numpy()
    return copied


def _plain(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _pinned(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    # Its memory is free for later passes once this stream has copied it
    tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return host.copy_(tensor, non_blocking=True)


# Passes of the shortest sequences have the most sequences, and so the largest cost per sequence
SHORT_TOKENS = 8


def max_tokens(peak: Callable[[int], int | None], *, limit: int, longest: int, allowed: int) -> int:
    """The tokens of a pass whose peak stays within `allowed` bytes: try `limit`, then three
    quarters, and so on to `longest`.

    `peak`: the bytes of a pass with this number of tokens, or None if memory was short. Raises
    LoadError if `longest` tokens do not fit.
    """
    size = limit
    while (taken := peak(size)) is None or taken > allowed:
        if size <= longest:
            raise LoadError(
                f"an input of {longest} tokens does not fit into the memory that is free: lower "
                "`max-batch-tokens`"
            )
        size = max(longest, 3 * size // 4)
    return size


def worst_batches(spec: ModelSpec, tokens: int, longest: int) -> list[PackedBatch]:
    """The passes of this size that need the most memory: of the longest sequences, and of the most;
    with all heads."""
    lengths = dict.fromkeys((min(longest, tokens), min(SHORT_TOKENS, longest)))
    rests = ([tokens % length] if tokens % length else [] for length in lengths)
    return [
        made_up(spec, tokens // length * [length] + rest, spec.heads)
        for length, rest in zip(lengths, rests, strict=True)
    ]


class TooLarge(Exception):
    """A batch needs more memory than the device has."""


def split_on_oom(
    run: Callable[[PackedBatch], HeadOutputs], batch: PackedBatch, make_room: Callable[[], None]
) -> HeadOutputs:
    """Call `run` with a batch, or with parts of it. `make_room`: called after each failure, before
    the next try.

    Raises PartlyFailed if single sequences are too large, BackendError if all are, and the other
    errors of `run`.
    """
    done: list[tuple[range, HeadOutputs]] = []
    refused: list[str] = []
    waiting = [range(len(batch))]
    while waiting:
        rows = waiting.pop()
        piece = batch if len(rows) == len(batch) else part(batch, rows.start, rows.stop)
        outputs, why = _attempt(run, piece)
        if outputs is not None:
            done.append((rows, outputs))
            continue
        make_room()
        if len(rows) == 1:
            refused.append(
                f"a sequence of {len(piece.input_ids)} tokens does not fit into memory: {why}"
            )
            continue
        middle = (rows.start + rows.stop) // 2
        log.warning(
            "a pass of %d sequences, %d tokens, is tried again in halves: %s",
            len(rows),
            len(piece.input_ids),
            why,
        )
        # The first half is popped first
        waiting += [range(middle, rows.stop), range(rows.start, middle)]
    if refused and not done:
        raise BackendError(refused[0])
    joined = HeadOutputs.concat([outputs for _, outputs in done])
    if refused:
        raise PartlyFailed(refused[0], [row for rows, _ in done for row in rows], joined)
    return joined


def _attempt(
    run: Callable[[PackedBatch], HeadOutputs], batch: PackedBatch
) -> tuple[HeadOutputs | None, str]:
    """Return (outputs, "") or (None, reason). The exception refers to a failed pass's memory, so it
    must not outlive this call."""
    try:
        return run(batch), ""
    except TooLarge as error:
        return None, str(error)


# Messages of torch and its libraries if memory is short and they do not raise OutOfMemoryError.
OUT_OF_MEMORY = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "can't allocate memory")


def is_out_of_memory(error: Exception) -> bool:
    """True if an error means that the device or the host is out of memory."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
        words in str(error) for words in OUT_OF_MEMORY
    )
