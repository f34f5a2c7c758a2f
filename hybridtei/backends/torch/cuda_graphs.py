"""Small batches on a GPU as one launch: the packed pass recorded for a bucket of shapes, and played again from fixed buffers.

A single query costs a GPU less than its host takes to launch some hundred kernels one by one. A recording launches all of them
at once. It fixes every shape: tokens, sequences, and the longest sequence that attention is told of. What a batch lacks of its
bucket is filled with sequences of their own behind the real ones, which no text sees, and with empty ones behind these. So the
rows of a batch are the first of what comes out, and its offsets the first of the bucket's.

All buckets are recorded before texts are served. A recording is played once and
compared with what it was made of before any text sees it. Whatever fails ends recordings for good, with one line in the log.

Buffers and intermediate values are shared by all recordings, since passes follow each other on one stream; each
leaves its states in the same place, to be read before the next pass is launched.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hybridtei.backends.torch.compiling import SAME, deviation
from hybridtei.backends.torch.trunk import Ids, PackedTrunk
from hybridtei.batch import Encoding, Offsets, PackedBatch, pack

if TYPE_CHECKING:
    from hybridtei.checkpoint.spec import ModelSpec

log = logging.getLogger(__name__)

TOKENS = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
# (sequences, tokens of each) at most: some texts of any length, or many short ones. Attention starts blocks by the product of
# the two, for empty sequences too. What fits neither is launched kernel by kernel.
FORMS = ((16, 2048), (256, 128))
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

    def all(self) -> list[Bucket]:
        """The largest first, so that the others find the memory of their intermediate values."""
        tokens = [size for size in reversed(TOKENS) if size <= self.tokens]
        return [Bucket(size, min(most, size), min(longest, self.longest, size)) for size in tokens for most, longest in FORMS]

    def of(self, batch: PackedBatch) -> Bucket | None:
        """The smallest bucket a batch fits into, or None: too large, or with tokens that are not to be seen."""
        count = len(batch.input_ids)
        tokens = next((size for size in TOKENS if count <= size <= self.tokens), None)
        if tokens is None or batch.unseen is not None:
            return None
        for most, longest in FORMS:
            bucket = Bucket(tokens, min(most, tokens), min(longest, self.longest, tokens))
            filled = len(batch) + -(-(tokens - count) // bucket.longest)
            if batch.max_seqlen <= bucket.longest and filled <= bucket.sequences:
                return bucket
        return None


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


OFFSETS = "offsets"  # among a batch's integers: `cu_seqlens`
BYTES_OF_RECORDING = 4 << 20  # of its list of launches on the device; an estimate

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
        self._tolerance = SAME[dtype]
        self._recorded: dict[Bucket, Replay] = {}
        self._buffers: tuple[Ids, Tensor] | None = None
        self._closed = threading.Event()

    def __len__(self) -> int:
        return len(self._recorded)

    def __contains__(self, bucket: Bucket) -> bool:
        """Whether it may be played: for the thread that may launch."""
        return not self.off and bucket in self._recorded

    @property
    def off(self) -> bool:
        """Whether there will be none: something failed, or `close` was called."""
        return self._closed.is_set()

    def record(self) -> None:
        """Record all buckets, anew if they were. Passes that come meanwhile wait for one bucket at most and are launched
        kernel by kernel."""
        try:
            with self._alone():
                self.forget()
                record = self._recorder()
            for bucket in self._sizes.all():
                with self._alone():
                    if self.off:
                        return
                    self._recorded[bucket] = self._checked(bucket, record)
        except Exception as error:  # torch, its libraries and a model's own code each raise their own kinds
            self._give_up(error)

    def find(self, batch: PackedBatch) -> Bucket | None:
        """The bucket of a batch if it is recorded."""
        bucket = self._sizes.of(batch)
        return bucket if bucket is not None and bucket in self else None

    def play(self, bucket: Bucket, ids: Ids) -> Tensor:
        """Last hidden states float[bucket.tokens, h] of a bucketed batch, valid until the next is played. `ids`: its integers,
        and "offsets"."""
        self._fill(bucket, ids)
        try:
            self._recorded[bucket]()
        except Exception as error:
            self._give_up(error)  # whether the device still answers is asked by whoever catches this
            raise
        return self._states(bucket)

    def forget(self) -> None:
        """Drop all recordings, for their memory; for the thread that may launch."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # one may be playing just now
        self._recorded.clear()

    def close(self) -> None:
        """Make no more, and drop what there is."""
        self._closed.set()
        self._recorded.clear()
        self._buffers = None

    def _checked(self, bucket: Bucket, record: Recorder) -> Replay:
        """Recorded, played, and found to compute what it was made of. Raises RuntimeError if not."""
        sample = padded(self._sample(bucket), bucket)
        asked = {**self._trunk.place(sample), OFFSETS: torch.as_tensor(sample.cu_seqlens, device=self._device)}

        def states_of(ids: Ids) -> Tensor:
            return self._trunk.run(ids, self._trunk.layout(sample, ids[OFFSETS], bound=bucket.longest))

        def run() -> None:
            self._states(bucket).copy_(states_of(self._inputs(bucket)))

        expected = states_of(asked)
        if self._buffers is None:
            most = max(self._sizes.tokens, *(sequences + 1 for sequences, _ in FORMS))
            self._buffers = (
                {name: one.new_zeros(most) for name, one in asked.items()},
                expected.new_zeros(most, expected.shape[1]),
            )
        self._fill(bucket, asked)
        run()  # libraries choose their kernels and take their workspaces before anything is recorded
        replay = record(run)
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

    def _fill(self, bucket: Bucket, ids: Ids) -> None:
        for name, values in self._inputs(bucket).items():
            values.copy_(ids[name])

    def _inputs(self, bucket: Bucket) -> Ids:
        assert self._buffers is not None
        sizes = {OFFSETS: bucket.sequences + 1}
        return {name: values[: sizes.get(name, bucket.tokens)] for name, values in self._buffers[0].items()}

    def _states(self, bucket: Bucket) -> Tensor:
        assert self._buffers is not None
        return self._buffers[1][: bucket.tokens]

    def _give_up(self, error: Exception) -> None:
        if not self.off:
            self._closed.set()
            log.warning("small batches are launched kernel by kernel, as CUDA graphs failed: %s", " ".join(str(error).split()))
