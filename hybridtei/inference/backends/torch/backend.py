"""PyTorch: copies a packed batch to the device, runs the trunk and each requested head once, and
copies the arrays back.

On a GPU a pass is staged, launched and awaited. While one thread waits for its arrays, another
fills the host's buffers for the next batch, copies them on a second stream, and launches the next
pass, so the device always has work. A third stream copies outputs back. Only one thread launches at
a time. The stream frees a pass's memory before the next pass, so two running passes need the memory
of one, and of one's outputs, which are read after the pass.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hybridtei.batch import Offsets, PackedBatch, Padding, computed_once, offsets_of
from hybridtei.errors import BackendError, DeviceLost
from hybridtei.inference.backends.base import Backend, gpu_tokens
from hybridtei.inference.backends.heads import (
    ENTRIES,
    HeadLayers,
    Segments,
    States,
    compute,
    kept_rows,
    outputs_of,
    wants_words,
)
from hybridtei.inference.backends.torch import memory
from hybridtei.inference.backends.torch.layout import PackedLayout
from hybridtei.inference.backends.torch.memory import (
    TooLarge,
    is_out_of_memory,
    split_on_oom,
    start_copy,
    to_device,
)
from hybridtei.inference.backends.torch.ops import TORCH, entries_of
from hybridtei.inference.backends.torch.trunk import Ids, Trunk
from hybridtei.outputs import HeadOutputs, SparseVectors
from hybridtei.system.machine import LaneKind, available_cores, both_lanes

if TYPE_CHECKING:
    from hybridtei.models.checkpoint.spec import ModelSpec

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Names in a batch's integers: `cu_seqlens`, and the rows of tokens that get a vector
OFFSETS, KEPT = ("offsets", "kept")


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """A batch that is on the device once `arrived`. `integers`: all copied arrays; `ids`: the
    trunk's inputs among them."""

    batch: PackedBatch
    integers: Ids
    ids: Ids
    layout: PackedLayout
    arrived: torch.cuda.Event | None


class TorchBackend(Backend):
    """torch's `Backend`."""

    name = "torch"
    fills_cores = True

    def __init__(
        self,
        spec: ModelSpec,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        trust_remote_code: bool = False,
        loaded: tuple[Trunk, HeadLayers] | None = None,
    ) -> None:
        """`loaded`: trunk and heads on the device, instead of the checkpoint's. Raises
        LoadError."""
        super().__init__(spec)
        self.dtype = dtype
        # A tensor's device has an index, which some functions of torch demand
        self.device = torch.empty(0, device=device).device
        on_gpu = self.device.type == "cuda"
        # Two cores reach their full rate with these
        self.busy_tokens = 512
        self.lanes = (LaneKind.BULK,) if on_gpu else both_lanes(available_cores())
        self.ahead = 1 if on_gpu else 0
        self._launching: AbstractContextManager[Any] = threading.Lock() if on_gpu else nullcontext()
        if loaded is None:
            from hybridtei.inference.backends.torch.load import load

            loaded = load(
                spec, dtype=DTYPES[dtype], device=self.device, trust_remote_code=trust_remote_code
            )
        self._trunk, self._heads = loaded
        self.shares_prefixes = self._trunk.causal
        self.padding = Padding.ALL if self._trunk.padded else Padding.NONE
        self._stream = self._side = self._copies = None
        if on_gpu:
            parameters = self._trunk.model.parameters()
            self.busy_tokens = gpu_tokens(
                sum(x.numel() for x in parameters if x.shape[:1] != (spec.vocab_size,))
            )
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            self._side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            self._copies = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self.catch_up()
        self.survives_forks = not on_gpu

    def renew(self) -> None:
        """Compute in one thread: a forked process lacks the threads of OpenMP, and waits for them
        for ever."""
        super().renew()
        if self.survives_forks:
            torch.set_num_threads(1)

    def forward(self, batch: PackedBatch, *, use_all_cores: bool = False) -> HeadOutputs:
        """`use_all_cores` has no effect: more threads cost more than they save here. A batch that
        does not fit into memory is computed in parts. Raises PartlyFailed, DeviceLost,
        BackendError.
        """
        try:
            return split_on_oom(self._pass, batch, self.make_room)
        except BackendError:
            raise
        except Exception as error:
            # Torch, transformers and a model's own code raise their own exceptions
            fault = error
        if not self.answers():
            raise DeviceLost(
                f"{self.device} does not answer any more; a restart is needed: {fault}"
            ) from fault
        raise BackendError(f"the forward pass failed: {fault}") from fault

    def enter_lane(self, kind: LaneKind) -> None:
        """On a CPU each lane computes in one thread. Threads that synchronise after each operation
        are four times slower (measured) once a core has other work."""
        if self.device.type == "cpu":
            torch.set_num_threads(1)

    def catch_up(self) -> None:
        """Make passes wait for the calling thread's work on the device, such as loading or changing
        weights."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def close(self) -> None:
        """Free the weights."""
        del self._trunk, self._heads
        self.make_room()

    def make_room(self) -> None:
        """Free the memory that torch keeps for later."""
        if self.device.type == "cuda":
            self._stream_done()
            torch.cuda.empty_cache()

    def answers(self) -> bool:
        """True if the device still computes. After some errors it refuses everything until the
        process ends."""
        if self.device.type != "cuda":
            return True
        try:
            # On our stream, after the failed work
            with self.alone():
                return float(torch.ones(1, device=self.device).sum()) == 1.0
        except RuntimeError:
            return False

    def max_tokens(self, limit: int, longest: int, fraction: float, sharing: int = 1) -> int:
        """The tokens of the largest pass that fits into `fraction` of the free memory, divided by
        the models `sharing` it.

        At most `limit`, which is the result on a CPU. Raises LoadError if an input of `longest`
        tokens does not fit.
        """
        if self.device.type != "cuda":
            return limit
        self.make_room()
        allowed = self._allow(fraction) // sharing
        return memory.max_tokens(
            lambda tokens: self._peak(tokens, longest),
            limit=limit,
            longest=longest,
            allowed=allowed,
        )

    @property
    def trunk(self) -> Trunk:
        """The encoder, for callers that change it before it serves."""
        return self._trunk

    def _pass(self, batch: PackedBatch) -> HeadOutputs:
        """Run one batch. Raises TooLarge if memory is short."""
        try:
            vector_rows, vectors = kept_rows(batch, self.spec)
            staged = self.stage(batch, vector_rows)
            with self.alone():
                columns = self.launch(staged)
                if self._stream is not None:
                    launched = self._stream.record_event()
            # Pinned memory is allocated while another thread launches
            with self._on(self._copies):
                if self._copies is not None:
                    self._copies.wait_event(launched)
                rows = columns.pop(ENTRIES, None)
                wait = start_copy(columns, self.device)
                # Frees its memory for later passes
                del columns
            return outputs_of(wait(), batch, vectors, None if rows is None else self._entries(rows))
        except Exception as error:
            # The launched pass reads the staged arrays; the next batch may overwrite them after
            # this
            self._stream_done()
            if not is_out_of_memory(error):
                raise
            fault = f"{error}".splitlines()[0]
        # `from None`, since the error holds the pass's memory
        raise TooLarge(fault)

    def _entries(self, rows: Tensor) -> SparseVectors:
        """The result of `entries_of` for computed rows. Their number is read on a second stream,
        ahead of the next pass."""
        with self._on_side_stream():
            entries = start_copy(entries_of(rows), self.device)()
        return SparseVectors(
            entries["indices"], entries["values"], offsets_of(entries["lengths"]), rows.shape[1]
        )

    def stage(self, batch: PackedBatch, vector_rows: Offsets | None) -> Staged:
        """Fill and copy a pass's inputs. `vector_rows`: from `kept_rows`."""
        once = computed_once(batch) if self.shares_prefixes else None
        shared = {} if once is None else {"computed": once.computed, "rows": once.rows}
        with self._on_side_stream():
            integers = self._trunk.integers(batch)
            more = {} if vector_rows is None else {KEPT: vector_rows}
            data = to_device({**integers, OFFSETS: batch.cu_seqlens, **shared, **more}, self.device)
            ids = {name: data[name] for name in integers}
            layout = self._trunk.layout(batch, data[OFFSETS])
            layout.stage()
            if once is not None:
                layout.once = data["computed"], data["rows"]
            return Staged(
                batch, data, ids, layout, None if self._side is None else self._side.record_event()
            )

    def launch(self, staged: Staged) -> dict[str, Tensor]:
        """Launch `compute` inside `alone`, without waiting: no line may read a number from the
        device or copy one to it."""
        batch, ids, layout = staged.batch, staged.ids, staged.layout
        if self._stream is not None and staged.arrived is not None:
            self._stream.wait_event(staged.arrived)
        if layout.once is not None:
            computed, rows = layout.once
            hidden = self._trunk(
                batch, layout, {name: tensor[computed] for name, tensor in ids.items()}
            )[rows]
        else:
            hidden = self._trunk(batch, layout, ids)
        self.count()
        words = self._trunk.word_embeddings(ids) if wants_words(batch, self.spec) else None
        at = Segments(batch.cu_seqlens, staged.integers[OFFSETS])
        states = States(hidden, at, words, staged.integers.get(KEPT), self._product)
        return compute(TORCH, states, batch.heads, self.spec, self._heads)

    def _product(self, rows: Tensor) -> Tensor:
        assert self._heads.mlm is not None
        return rows @ self._heads.mlm.table.T  # type: ignore[no-any-return]

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A context for launching passes. On a GPU: one thread at a time, on the passes' stream."""
        with self._launching, self._on(self._stream):
            yield

    def _on_side_stream(self) -> AbstractContextManager[None]:
        """A context for the host's work for passes, on a second stream; for any thread at any
        time."""
        return self._on(self._side)

    @contextmanager
    def _on(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        # Its device too
        with (
            torch.inference_mode(),
            nullcontext() if stream is None else torch.cuda.stream(stream),
        ):
            yield

    def _stream_done(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _allow(self, fraction: float) -> int:
        """Limit torch to this share of the free memory. Return the bytes for passes."""
        free, total = torch.cuda.mem_get_info(self.device)
        allowed = int(free * fraction)
        share = (torch.cuda.memory_reserved(self.device) + allowed) / total
        torch.cuda.set_per_process_memory_fraction(min(share, 1.0), self.device)
        return allowed

    def _peak(self, tokens: int, longest: int) -> int | None:
        """The largest memory in bytes, without weights, of passes of this size in the worst forms;
        None if one does not fit."""
        peak = 0
        for batch in memory.worst_batches(self.spec, tokens, longest):
            before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            try:
                self._pass(batch)
            except TooLarge:
                self.make_room()
                return None
            peak = max(peak, torch.cuda.max_memory_allocated(self.device) - before)
        return peak
