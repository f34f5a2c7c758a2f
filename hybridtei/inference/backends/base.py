"""The engine's interface of a loaded model: ids -> arrays, without text, request or clock."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from hybridtei.batch import Encoding, Head, PackedBatch, Padding, gather_index, offsets_of, pack
from hybridtei.errors import BackendError
from hybridtei.outputs import HeadOutputs
from hybridtei.system.forks import REMEDY, leave_to_parent, renew_in_children
from hybridtei.system.machine import LaneKind

if TYPE_CHECKING:
    from hybridtei.models.checkpoint.spec import ModelSpec

# What was found damaged while this process maps it, and what to do: every later pass fails
DAMAGED: list[str] = []


class Backend:
    """One loaded model on one device.

    `padding`: the parts that cost n * max_seqlen tokens, not the sum of lengths. `busy_tokens`: the
    size of a batch that fills the device; more tokens only make other batches wait. `lanes`: the
    useful number of threads that call `forward`. `ahead`: the number of batches that the engine may
    prepare in addition to one per lane. `fills_cores`: a pass outside a lane uses every core.
    `survives_forks`: it computes in a forked process too.
    `shares_prefixes`: it computes a batch's `prefix` once. `is_table`: one pass gives dense vectors
    of any number of texts, without further memory.
    """

    spec: ModelSpec
    name: str
    dtype: str
    padding: Padding
    busy_tokens: int
    lanes: tuple[LaneKind, ...]
    ahead = 0
    fills_cores = False
    shares_prefixes = False
    is_table = False
    survives_forks = True

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self._process = os.getpid()
        renew_in_children(self)
        self._passes, self._counting = 0, threading.Lock()

    @property
    def forwards(self) -> int:
        """The number of the trunk's passes so far."""
        return self._passes

    def count(self) -> None:
        """Count a pass."""
        with self._counting:
            self._passes += 1

    def forward(self, batch: PackedBatch, *, use_all_cores: bool = False) -> HeadOutputs:
        """Run the trunk once, and each head of the batch once. `use_all_cores`: no batch waits, so
        the pass may use more threads than the caller's. Raises BackendError."""
        raise NotImplementedError

    def renew(self) -> None:
        """Never free the runtime's objects in this forked process."""
        leave_to_parent({**vars(self)})

    def check_process(self) -> None:
        """Raises BackendError in a forked process that lacks the runtime's threads or device."""
        if not self.survives_forks and os.getpid() != self._process:
            raise BackendError(
                f"the model was loaded in another process, and {self.name} does not work {REMEDY}"
            )

    def enter_lane(self, kind: LaneKind) -> None:
        """Prepare the calling thread. Each of several threads calls this once before `forward`,
        after setting its priority."""

    def max_tokens(self, limit: int, longest: int, fraction: float, sharing: int = 1) -> int:
        """Return the tokens of the largest pass, at most `limit`, on a device whose memory bounds
        it."""
        return limit

    def free_unused(self) -> None:
        """Free the memory that is kept for later passes and that no running pass uses."""

    def close(self) -> None:
        """Free the weights."""


class HostBackend(Backend):
    """A `Backend` of graphs on the CPU."""

    def outputs(self, batch: PackedBatch, *, use_all_cores: bool) -> HeadOutputs:
        """Compute a batch. Raises the runtime's own exceptions."""
        raise NotImplementedError

    def forward(self, batch: PackedBatch, *, use_all_cores: bool = False) -> HeadOutputs:
        if DAMAGED:
            raise BackendError(DAMAGED[0])
        try:
            outputs = self.outputs(batch, use_all_cores=use_all_cores)
        except Exception as error:
            # Runtimes have their own exceptions, and raise bare RuntimeErrors
            raise BackendError(f"the forward pass failed: {error}") from error
        self.count()
        return outputs

    def enter_lane(self, kind: LaneKind) -> None:
        """Limit numpy's products to the calling thread, so that lanes do not wait for each
        other."""
        threadpool_limits(limits=1, user_api="blas")


# Numbers in a pass of one core: 1 MiB in float32
STATES = 1 << 18
FEWEST, MOST = 128, 512


def busy_tokens(width: int, cores: int = 1, limit: int = MOST) -> int:
    """The number of tokens that keeps the cores of a pass busy: a power of two for each core, at
    most `limit`. `width`: of the model's states.

    At this size three BERT layers reach 0.97 to 1.00 of their best rate in texts of 64 tokens, by
    `hybridtei tune`: widths 384, 768 and 1024, float32 on both engines, bfloat16 and int8 (AMD EPYC
    with AVX-512, VNNI and bfloat16). At half of it int8 falls to 0.92. Batches of mixed lengths are
    not full and reach less at the same size.
    """
    tokens = STATES // max(width, 1)
    # The power of two at or below it
    power = 1 << tokens.bit_length() >> 1
    return cores * min(max(power, FEWEST), limit)


# Of BERT-base, without its table of words
BASE_PARAMETERS, BASE_TOKENS = 86_000_000, 1 << 14


def gpu_tokens(parameters: int) -> int:
    """The number of tokens of a GPU's pass, from 2,048 to 32,768: the power of two nearest to a
    constant amount of arithmetic, since a large model fills a GPU with fewer tokens, and a query
    waits for a whole pass. `parameters`: of the model, without its table of words, which costs no
    arithmetic.

    Computed, not measured: a pass of BERT-base has 2.8 TFLOP, of a model of 8B 29.
    """
    power = round(math.log2(BASE_TOKENS * BASE_PARAMETERS / max(parameters, 1)))
    return 1 << min(max(power, 11), 15)


def made_up(
    spec: ModelSpec, lengths: Sequence[int], heads: frozenset[Head] = frozenset()
) -> PackedBatch:
    """A batch of meaningless texts, for measurements."""
    first = spec.positions.offset
    ids = np.arange(first, first + sum(lengths), dtype=np.int64) % spec.vocab_size
    encodings = [Encoding(text_ids) for text_ids in np.split(ids, np.cumsum(lengths)[:-1])]
    return pack(encodings, heads, spec.positions)


class Routed(Backend):
    """Two models with a common vector space, chosen by `Encoding.route`: one reads documents, a
    smaller one queries. A batch with both takes two passes. The same lanes call both. Source: the
    Router of sentence-transformers."""

    def __init__(self, spec: ModelSpec, backends: Sequence[Backend]) -> None:
        super().__init__(spec)
        first = backends[0]
        self.backends = backends
        self.name = first.name
        self.dtype = first.dtype
        self.padding = first.padding
        self.busy_tokens = first.busy_tokens
        self.lanes = first.lanes
        self.fills_cores = all(backend.fills_cores for backend in backends)

    @property
    def forwards(self) -> int:
        """The passes of both."""
        return sum(backend.forwards for backend in self.backends)

    def check_process(self) -> None:
        for backend in self.backends:
            backend.check_process()

    def enter_lane(self, kind: LaneKind) -> None:
        for backend in self.backends:
            backend.enter_lane(kind)

    def free_unused(self) -> None:
        for backend in self.backends:
            backend.free_unused()

    def close(self) -> None:
        for backend in self.backends:
            backend.close()

    def forward(self, batch: PackedBatch, *, use_all_cores: bool = False) -> HeadOutputs:
        if batch.routes is None:
            return self.backends[0].forward(batch, use_all_cores=use_all_cores)
        order: list[int] = []
        parts: list[HeadOutputs] = []
        for number, backend in enumerate(self.backends):
            rows = np.flatnonzero(batch.routes == number)
            if len(rows):
                of_route = _of_route(batch, rows, backend.spec)
                parts.append(backend.forward(of_route, use_all_cores=use_all_cores))
                order += rows.tolist()
        if len(parts) == 1:
            return parts[0]
        return HeadOutputs.concat(parts).take(np.argsort(order))

    def max_tokens(self, limit: int, longest: int, fraction: float, sharing: int = 1) -> int:
        """The two models share the free memory."""
        for backend in self.backends:
            longest_input = min(longest, backend.spec.max_input_length)
            limit = backend.max_tokens(limit, longest_input, fraction, sharing * len(self.backends))
        return limit


def _of_route(batch: PackedBatch, rows: NDArray[np.intp], spec: ModelSpec) -> PackedBatch:
    """The batch's sequences of one route, with the positions of that route's model."""
    tokens, cu_seqlens = gather_index(batch.cu_seqlens, rows), offsets_of(batch.lengths[rows])
    input_ids, types = batch.input_ids[tokens], batch.token_type_ids
    return replace(
        batch,
        input_ids=input_ids,
        position_ids=spec.positions.of(input_ids, cu_seqlens),
        token_type_ids=None if types is None else types[tokens],
        cu_seqlens=cu_seqlens,
        unseen=None,
        adapter_ids=None,
        routes=None,
    )
