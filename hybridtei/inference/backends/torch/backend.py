"""PyTorch: a packed batch to the device, the trunk once, each wanted head once, arrays back.

On a GPU a pass is staged, launched and waited for: while one thread waits for its arrays, another fills the host's buffers
for the next batch, has them copied on a stream beside the passes', and launches behind the first, so the device finds work
when it is done. One thread launches at a time, and does nothing else then. What a pass holds is freed in the order of the
stream, so two that are under way need the memory of one (and of a SPLADE's weights, which are read once the pass is over).
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
from hybridtei.inference.backends.torch.functions import TORCH, entries_of
from hybridtei.inference.backends.torch.layout import PackedLayout
from hybridtei.inference.backends.torch.memory import TooLarge, is_out_of_memory, split_on_oom, start_copy, to_device
from hybridtei.inference.backends.torch.trunk import Ids, Trunk
from hybridtei.outputs import HeadOutputs, SparseVectors
from hybridtei.system.machine import LaneKind, available_cores, both_lanes

if TYPE_CHECKING:
    from hybridtei.models.checkpoint.spec import ModelSpec

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Two cores reach their full rate with a few hundred tokens; a GPU needs thousands.
OFFSETS, KEPT = "offsets", "kept"  # among a batch's integers: `cu_seqlens`, and rows of the tokens that have a vector
BUSY_TOKENS = {"cpu": 512, "cuda": 16384}


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """A batch that is on the device once `arrived`. `integers`: all that travelled; `ids`: those that the trunk takes."""

    batch: PackedBatch
    integers: Ids
    ids: Ids
    layout: PackedLayout
    arrived: torch.cuda.Event | None


class TorchBackend:
    """See `backends.base.Backend`. `ahead`: how many batches more than lanes the engine may take, to have them ready."""

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
        """`loaded`: trunk and heads that are on the device already, instead of the checkpoint's. Raises LoadError."""
        self.spec = spec
        self.dtype = dtype
        self.forwards = 0
        self.device = torch.device(device)
        on_gpu = self.device.type == "cuda"
        self.busy_tokens = BUSY_TOKENS.get(self.device.type, 4096)
        self.lanes = (LaneKind.BULK,) if on_gpu else both_lanes(available_cores())
        self.ahead = 1 if on_gpu else 0
        self._counting = threading.Lock()
        self._launching: AbstractContextManager[Any] = threading.Lock() if on_gpu else nullcontext()
        if loaded is None:
            from hybridtei.inference.backends.torch.load import load

            loaded = load(spec, dtype=DTYPES[dtype], device=self.device, trust_remote_code=trust_remote_code)
        self._trunk, self._heads = loaded
        self.shares_prefixes = self._trunk.causal
        self.padding = Padding.ALL if self._trunk.padded else Padding.NONE
        self._stream = torch.cuda.Stream(self.device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._side = torch.cuda.Stream(self.device) if on_gpu else None  # type: ignore[no-untyped-call]
        self.catch_up()

    def forward(self, batch: PackedBatch, *, use_all_cores: bool = False) -> HeadOutputs:
        """See `Backend.forward`. Teams of threads cost more than they bring here, so `use_all_cores` changes nothing.

        A batch that does not fit is computed in parts. Raises PartlyFailed, DeviceLost, BackendError.
        """
        try:
            return split_on_oom(self._pass, batch, self.make_room)
        except BackendError:
            raise
        except Exception as error:  # torch, transformers and a model's own code each raise their own kinds
            fault = error
        if not self.answers():
            raise DeviceLost(f"{self.device} answers no more; a restart is needed: {fault}") from fault
        raise BackendError(f"the forward pass failed: {fault}") from fault

    def enter_lane(self, kind: LaneKind) -> None:
        """On a CPU each lane computes alone in its own thread: a team of threads that must meet after each operation
        loses most of its speed as soon as one core has anything else to do (measured: a factor of four)."""
        if self.device.type == "cpu":
            torch.set_num_threads(1)

    def catch_up(self) -> None:
        """Let passes wait for what the calling thread did on the device: weights, loaded or changed, are there first."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def close(self) -> None:
        """Give the weights back."""
        del self._trunk, self._heads
        self.make_room()

    def make_room(self) -> None:
        """Give the device what torch only keeps for later."""
        if self.device.type == "cuda":
            self._stream_done()
            torch.cuda.empty_cache()

    def answers(self) -> bool:
        """Whether the device still computes: after some errors it refuses everything until the process ends."""
        if self.device.type != "cuda":
            return True
        try:
            with self.alone():  # on our stream, after what failed
                return float(torch.ones(1, device=self.device).sum()) == 1.0
        except RuntimeError:
            return False

    def max_tokens(self, limit: int, longest: int, fraction: float, sharing: int = 1) -> int:
        """Tokens of the largest pass that fits into `fraction` of the free memory, of which so many `sharing` a device take
        equal parts; inputs of `longest` tokens do.

        At most `limit`, and that on a CPU. Raises LoadError if an input of `longest` tokens does not fit.
        """
        if self.device.type != "cuda":
            return limit
        self.make_room()
        allowed = self._allow(fraction) // sharing
        return memory.max_tokens(lambda tokens: self._peak(tokens, longest), limit=limit, longest=longest, allowed=allowed)

    @property
    def trunk(self) -> Trunk:
        """The encoder, for those who change it before it serves."""
        return self._trunk

    def _pass(self, batch: PackedBatch) -> HeadOutputs:
        """Raises TooLarge where memory is short."""
        try:
            kept, vectors = kept_rows(batch, self.spec)
            staged = self.stage(batch, kept)
            with self.alone():
                found = self.launch(staged)
                rows = found.pop(ENTRIES, None)
                wait = start_copy(found, self.device)
                del found  # its memory is free for what is launched next
            return outputs_of(wait(), batch, vectors, None if rows is None else self._entries(rows))
        except Exception as error:
            self._stream_done()  # what was launched reads what was staged, which another batch may overwrite from here on
            if not is_out_of_memory(error):
                raise
            fault = f"{error}".splitlines()[0]
        raise TooLarge(fault)  # and not from the error, which holds what the pass had allocated

    def _entries(self, rows: Tensor) -> SparseVectors:
        """What `entries_of` finds in rows that are computed already. How many they are is asked beside the passes: behind them
        the answer would come after the next."""
        with self._beside():
            found = start_copy(entries_of(rows), self.device)()
        return SparseVectors(found["indices"], found["values"], offsets_of(found["lengths"]), rows.shape[1])

    def stage(self, batch: PackedBatch, kept: Offsets | None) -> Staged:
        """Everything that a pass reads, and that the host has to fill and copy. `kept`: see `kept_rows`."""
        once = computed_once(batch) if self.shares_prefixes else None
        shared = {} if once is None else {"computed": once.kept, "rows": once.rows}
        with self._beside():
            integers = self._trunk.integers(batch)
            more = {} if kept is None else {KEPT: kept}
            there = to_device({**integers, OFFSETS: batch.cu_seqlens, **shared, **more}, self.device)
            ids = {name: there[name] for name in integers}
            layout = self._trunk.layout(batch, there[OFFSETS])
            layout.stage()
            if once is not None:
                layout.once = there["computed"], there["rows"]
            return Staged(batch, there, ids, layout, None if self._side is None else self._side.record_event())

    def launch(self, staged: Staged) -> dict[str, Tensor]:
        """What `compute` gives, launched and not waited for: no line of it may ask the device for a number, or copy one to it.
        Within `alone`."""
        batch, ids, layout = staged.batch, staged.ids, staged.layout
        if self._stream is not None and staged.arrived is not None:
            self._stream.wait_event(staged.arrived)
        if layout.once is not None:
            kept, rows = layout.once
            hidden = self._trunk(batch, layout, {name: one[kept] for name, one in ids.items()})[rows]
        else:
            hidden = self._trunk(batch, layout, ids)
        with self._counting:
            self.forwards += 1
        words = self._trunk.word_embeddings(ids) if wants_words(batch, self.spec) else None
        at = Segments(batch.cu_seqlens, staged.integers[OFFSETS])
        states = States(hidden, at, words, staged.integers.get(KEPT), self._product)
        return compute(TORCH, states, batch.heads, self.spec, self._heads)

    def _product(self, rows: Tensor) -> Tensor:
        assert self._heads.mlm is not None
        return rows @ self._heads.mlm.table.T  # type: ignore[no-any-return]

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Where passes are launched: by one thread at a time on a GPU, on a stream of their own."""
        with self._launching, self._on(self._stream):
            yield

    def _beside(self) -> AbstractContextManager[None]:
        """Where the host's work for passes is done, by any thread at any time."""
        return self._on(self._side)

    @contextmanager
    def _on(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        with torch.inference_mode(), nullcontext() if stream is None else torch.cuda.stream(stream):  # its device, too
            yield

    def _stream_done(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _allow(self, fraction: float) -> int:
        """Let torch take so much of the free memory and no more; bytes that passes may use."""
        free, total = torch.cuda.mem_get_info(self.device)
        allowed = int(free * fraction)
        share = (torch.cuda.memory_reserved(self.device) + allowed) / total
        torch.cuda.set_per_process_memory_fraction(min(share, 1.0), self.device)
        return allowed

    def _peak(self, tokens: int, longest: int) -> int | None:
        """Most bytes that passes of so many tokens take besides weights, in the worst forms; None if one does not fit."""
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
