"""Small batches on a GPU as one launch: the packed pass recorded for a bucket of shapes, and played again from fixed buffers.

A single query costs a GPU less than its host takes to launch some hundred kernels one by one. A recording launches all of them
at once. It fixes every shape: tokens, sequences, and the longest sequence that attention is told of. What a batch lacks of its
bucket is filled with sequences of their own behind the real ones, which no text sees, and with empty ones behind these. So the
rows of a batch are the first of what comes out, and its offsets the first of the bucket's.

The first batch of a bucket is computed as ever, and the recording is made behind it, by a thread of its own, while nothing else
is launched. It is played once and compared with what it was made of before any text sees it. Whatever fails ends recordings for
good, with one line in the log.

Buffers and intermediate values are shared by all recordings, since passes follow each other on one stream; each
leaves its states in the same place, to be read before the next pass is launched.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hybridtei.backends.torch.compiling import BUSY_WITH_DEVICE, SAME, deviation
from hybridtei.backends.torch.trunk import Ids, PackedTrunk
from hybridtei.batch import Encoding, Offsets, PackedBatch, pack

if TYPE_CHECKING:
    from hybridtei.checkpoint.spec import ModelSpec

log = logging.getLogger(__name__)

TOKENS = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
# Attention starts a block for each sequence and head, empty ones too: a few sizes keep those few.
SEQUENCES = (4, 16, 64, 256, 1024)
LONGEST = (128, 512, 2048)
# A layer of so many weights times tokens takes a large GPU about as long as a host takes to launch it (some 0.1 ms at some
# 0.7 PFLOP/s): with more, launches hide behind arithmetic, and padding would only add to that. An estimate.
HIDDEN_LAUNCHES = 35_000_000_000


@dataclass(frozen=True, slots=True)
class Bucket:
    """So many tokens, sequences (real ones, those of padding, empty ones), and at most so many tokens in each."""

    tokens: int
    sequences: int
    longest: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """The buckets of a model. `tokens`: of the largest; `longest`: tokens of a text at most."""

    tokens: int
    longest: int

    def of(self, batch: PackedBatch) -> Bucket | None:
        """The smallest bucket a batch fits into, or None: too large, or with tokens that are not to be seen."""
        count = len(batch.input_ids)
        tokens = _least(TOKENS, count)
        if tokens is None or tokens > self.tokens or batch.unseen is not None:
            return None
        most = _least((*(size for size in LONGEST if size < self.longest), self.longest), batch.max_seqlen)
        if most is None:
            return None
        longest = min(most, tokens)
        sequences = _least(SEQUENCES, len(batch) + -(-(tokens - count) // longest))
        return None if sequences is None else Bucket(tokens, sequences, longest)


def sizes(weights_of_layer: int, longest: int) -> Sizes:
    """The buckets for a model by the weights of one of its layers: the heavier it is, the fewer tokens hide its launches."""
    bound = HIDDEN_LAUNCHES // max(weights_of_layer, 1)
    return Sizes(max((size for size in TOKENS if size <= bound), default=0), longest)


def padded(batch: PackedBatch, bucket: Bucket) -> PackedBatch:
    """A batch filled up to its bucket; the padding repeats its first token, which is a legal one at a legal position."""
    count = len(batch.input_ids)
    fill, types, adapters = bucket.tokens - count, batch.token_type_ids, batch.adapter_ids
    return replace(
        batch,
        input_ids=_filled(batch.input_ids, fill),
        position_ids=_filled(batch.position_ids, fill),
        token_type_ids=None if types is None else _filled(types, fill),
        cu_seqlens=_offsets(batch.cu_seqlens, bucket),
        adapter_ids=None if adapters is None else _filled(adapters, fill),
    )


def _offsets(cu_seqlens: Offsets, bucket: Bucket) -> Offsets:
    lacking = bucket.sequences + 1 - len(cu_seqlens)
    behind = cu_seqlens[-1] + bucket.longest * np.arange(1, lacking + 1)
    return np.concatenate([cu_seqlens, np.minimum(behind, bucket.tokens)])


def _filled(values: Offsets, fill: int) -> Offsets:
    return np.concatenate([values, np.full(fill, values[0])])


def _least(levels: tuple[int, ...], needed: int) -> int | None:
    return next((level for level in levels if level >= needed), None)


MAX_RECORDINGS = 32
BYTES_OF_RECORDING = 4 << 20  # of its list of launches on the device; an estimate
UNUSED_PASSES = 256  # a recording gives way to another only if so many batches of others went by

Replay = Callable[[], None]
Recorder = Callable[[Callable[[], object]], Replay]


def on_gpu(device: torch.device, stream: torch.cuda.Stream) -> Recorder:
    """Records what is launched on that stream. All recordings of one recorder share memory for what they do not return."""
    with torch.cuda.device(device):
        pool = torch.cuda.graph_pool_handle()

    def record(run: Callable[[], object]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        # thread_local: what other threads do meanwhile, such as waiting for the last batch, is none of its business
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            run()
        return graph.replay

    return record


class Graphs:
    """The recordings of one trunk. `find` and `play` are for the one thread that may launch; `alone`: be that thread."""

    def __init__(
        self,
        trunk: PackedTrunk,
        spec: ModelSpec,
        sizes: Sizes,
        *,
        device: torch.device,
        recorder: Callable[[], Recorder],
        alone: Callable[[], AbstractContextManager[object]],
        dtype: str,
    ) -> None:
        self._trunk, self._spec, self._sizes, self._device = trunk, spec, sizes, device
        self._recorder, self._alone = recorder, alone
        self._record = recorder()
        self._tolerance = SAME[dtype]
        self._recorded: OrderedDict[Bucket, tuple[Replay, int]] = OrderedDict()
        self._asked: set[Bucket] = set()
        self._passes = 0
        self._buffers: tuple[Ids, Tensor, Tensor] | None = None
        self._closed = threading.Event()
        self._background = ThreadPoolExecutor(1, thread_name_prefix="hybridtei-graphs")

    def __len__(self) -> int:
        return len(self._recorded)

    @property
    def off(self) -> bool:
        """Whether there will be none: something failed, or `close` was called."""
        return self._closed.is_set()

    def find(self, batch: PackedBatch) -> Bucket | None:
        """The bucket of a batch if it is recorded. If not, it will be, soon after."""
        bucket = None if self.off else self._sizes.of(batch)
        if bucket is None:
            return None
        self._passes += 1
        if bucket in self._recorded:
            self._recorded[bucket] = self._recorded[bucket][0], self._passes
            self._recorded.move_to_end(bucket)
            return bucket
        if bucket not in self._asked and self._has_room():
            self._asked.add(bucket)
            self._background.submit(self._make, bucket)
        return None

    def play(self, bucket: Bucket, ids: Ids, offsets: Tensor) -> Tensor:
        """Last hidden states float[bucket.tokens, h] of a bucketed batch, valid until the next is played."""
        self._fill(bucket, ids, offsets)
        try:
            self._recorded[bucket][0]()
        except Exception as error:
            self._give_up(error)  # whether the device still answers is asked by whoever catches this
            raise
        return self._states(bucket)

    def forget(self) -> None:
        """Drop all recordings, for their memory or since the pass they are of was replaced; they are made again when asked for.

        For the thread that may launch, once nothing that was launched runs any more.
        """
        self._recorded.clear()
        self._asked.clear()
        self._record = self._recorder()

    def settle(self) -> None:
        """Wait until what was asked for so far has been made or given up."""
        self._background.submit(lambda: None).result()

    def close(self) -> None:
        """Make no more, and drop what there is."""
        self._closed.set()
        self._background.shutdown(wait=False, cancel_futures=True)
        self._recorded.clear()
        self._buffers = None

    def _has_room(self) -> bool:
        if len(self._recorded) + len(self._asked - self._recorded.keys()) < MAX_RECORDINGS:
            return True
        _, last_used = next(iter(self._recorded.values()), (None, self._passes))
        return self._passes - last_used > UNUSED_PASSES

    def _make(self, bucket: Bucket) -> None:
        """In the background. Where another model compiles or records, that is not waited for: the next batch asks again."""
        if not BUSY_WITH_DEVICE.acquire(blocking=False):
            self._asked.discard(bucket)
            return
        try:
            with self._alone():
                if not self.off:
                    self._make_room()
                    self._recorded[bucket] = self._checked(bucket), self._passes
        except Exception as error:  # torch, its libraries and a model's own code each raise their own kinds
            self._give_up(error)
        finally:
            self._asked.discard(bucket)
            BUSY_WITH_DEVICE.release()

    def _make_room(self) -> None:
        if len(self._recorded) >= MAX_RECORDINGS:
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()  # it may be playing just now
            self._recorded.popitem(last=False)

    def _checked(self, bucket: Bucket) -> Replay:
        """Recorded, played, and found to compute what it was made of. Raises RuntimeError if not."""
        sample = padded(self._sample(bucket), bucket)
        ids, offsets = self._trunk.place(sample), torch.as_tensor(sample.cu_seqlens, device=self._device)
        expected = self._trunk.run(ids, self._trunk.layout(sample, offsets, bound=bucket.longest))
        self._fill(bucket, ids, offsets, like=expected)

        def run() -> None:
            inputs, ends = self._inputs(bucket)
            self._states(bucket).copy_(self._trunk.run(inputs, self._trunk.layout(sample, ends, bound=bucket.longest)))

        run()  # libraries choose their kernels and take their workspaces before anything is recorded
        replay = self._record(run)
        self._states(bucket).zero_()
        replay()
        worst = deviation(self._states(bucket), expected)
        if not worst <= self._tolerance:  # NaN fails too
            raise RuntimeError(f"a recorded pass differs by {worst:.2g} from the pass itself")
        return replay

    def _sample(self, bucket: Bucket) -> PackedBatch:
        first = self._spec.positions.offset
        ids = np.arange(first, first + bucket.longest, dtype=np.int64) % self._spec.vocab_size
        return pack([Encoding(ids)], frozenset(), self._spec.positions)

    def _fill(self, bucket: Bucket, ids: Ids, offsets: Tensor, *, like: Tensor | None = None) -> None:
        if self._buffers is None:
            assert like is not None
            self._buffers = self._new_buffers(ids, like)
        there, ends = self._inputs(bucket)
        for name, values in there.items():
            values.copy_(ids[name])
        ends.copy_(offsets)

    def _new_buffers(self, ids: Ids, like: Tensor) -> tuple[Ids, Tensor, Tensor]:
        tokens = self._sizes.tokens
        ends = torch.zeros(SEQUENCES[-1] + 1, dtype=torch.int64, device=self._device)
        return {name: one.new_zeros(tokens) for name, one in ids.items()}, ends, like.new_zeros(tokens, like.shape[1])

    def _inputs(self, bucket: Bucket) -> tuple[dict[str, Tensor], Tensor]:
        assert self._buffers is not None
        ids, ends, _ = self._buffers
        return {name: values[: bucket.tokens] for name, values in ids.items()}, ends[: bucket.sequences + 1]

    def _states(self, bucket: Bucket) -> Tensor:
        assert self._buffers is not None
        return self._buffers[2][: bucket.tokens]

    def _give_up(self, error: Exception) -> None:
        if not self.off:
            self._closed.set()
            log.warning("small batches are launched kernel by kernel, as CUDA graphs failed: %s", " ".join(str(error).split()))
