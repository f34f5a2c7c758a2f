"""Small batches on a GPU as one launch: the packed pass recorded for a bucket of shapes, and played again from fixed buffers.

A single query costs a GPU less than its host takes to launch some hundred kernels one by one. A recording launches all of them
at once. It fixes every shape: tokens, sequences, and the longest sequence that attention is told of. What a batch lacks of its
bucket is filled with sequences of their own behind the real ones, which no text sees, and with empty ones behind these. So the
rows of a batch are the first of what comes out, and its offsets the first of the bucket's.

All buckets are recorded before texts are served. A recording is played once and compared with what it was made of before any
text sees it. Whatever fails ends recordings for good, with one line in the log. Buffers and intermediate values are shared by
all recordings, since passes follow each other on one stream; each leaves its states in the same place, to be read before the
next pass is launched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hybridtei.backends.torch.compiling import SAME, deviation
from hybridtei.backends.torch.memory import made_up
from hybridtei.backends.torch.trunk import Ids, PackedTrunk
from hybridtei.batch import Offsets, PackedBatch

if TYPE_CHECKING:
    from hybridtei.backends.torch.backend import TorchBackend

log = logging.getLogger(__name__)

TOKENS = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
# (sequences, tokens of each) at most: some texts of any length, or many short ones. Attention starts blocks by the product of
# the two, for empty sequences too. What fits neither is launched kernel by kernel.
FORMS = ((16, 2048), (256, 128))


@dataclass(frozen=True, slots=True)
class Bucket:
    """So many tokens, sequences (real ones, those of padding, empty ones), and at most so many tokens in each."""

    tokens: int
    sequences: int
    longest: int


def buckets(longest: int) -> list[Bucket]:
    """Those of a model whose texts have at most `longest` tokens; the first is the largest, whose memory the others use."""
    return [Bucket(size, min(most, size), min(length, longest, size)) for size in reversed(TOKENS) for most, length in FORMS]


def bucket_of(batch: PackedBatch, longest: int) -> Bucket | None:
    """The smallest bucket a batch fits into, or None: too large, or with tokens that are not to be seen."""
    count = len(batch.input_ids)
    tokens = next((size for size in TOKENS if count <= size), None)
    if tokens is None or batch.unseen is not None:
        return None
    for most, length in FORMS:
        bucket = Bucket(tokens, min(most, tokens), min(length, longest, tokens))
        filled = len(batch) + -(-(tokens - count) // bucket.longest)
        if batch.max_seqlen <= bucket.longest and filled <= bucket.sequences:
            return bucket
    return None


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


def on_gpu(stream: torch.cuda.Stream) -> Recorder:
    """Records what is launched on that stream. All recordings of one recorder share memory for what they do not return."""
    with torch.cuda.device(stream.device):
        pool = torch.cuda.graph_pool_handle()

    def record(run: Callable[[], object]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        # thread_local: what other threads do meanwhile, such as waiting for the last batch, is none of its business
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            run()
        return graph.replay

    return record


class Graphs:
    """The recordings of one backend. `find` is for any thread, `play` for the one that may launch. `off`: none will come."""

    def __init__(self, backend: TorchBackend, trunk: PackedTrunk, record: Recorder) -> None:
        self._backend, self._trunk, self._record = backend, trunk, record
        self._recorded: dict[Bucket, Replay] = {}
        self._buffers: tuple[Ids, Tensor] | None = None
        self.off = False

    def __len__(self) -> int:
        return len(self._recorded)

    def __contains__(self, bucket: Bucket) -> bool:
        """Whether it may be played: for the thread that may launch."""
        return not self.off and bucket in self._recorded

    def record(self) -> None:
        """Record all buckets. Passes that come meanwhile wait for one bucket at most and are launched kernel by kernel."""
        try:
            for bucket in buckets(self._backend.spec.max_input_length):
                with self._backend.alone():
                    if self.off:
                        return
                    self._recorded[bucket] = self._checked(bucket)
        except Exception as error:  # torch, its libraries and a model's own code each raise their own kinds
            self._give_up(error)

    def find(self, batch: PackedBatch) -> Bucket | None:
        """The bucket of a batch if it is recorded."""
        bucket = bucket_of(batch, self._backend.spec.max_input_length)
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
        """Drop all recordings, for their memory; for the thread that may launch, once none is played any more."""
        self._recorded.clear()

    def close(self) -> None:
        """Make no more, and drop what there is."""
        self.off, self._buffers = True, None
        self.forget()

    def _checked(self, bucket: Bucket) -> Replay:
        """Recorded, played, and found to compute what it was made of. Raises RuntimeError if not."""
        sample = padded(made_up(self._backend.spec, [bucket.longest]), bucket)
        asked = {**self._trunk.place(sample), OFFSETS: torch.as_tensor(sample.cu_seqlens, device=self._backend.device)}

        def states_of(ids: Ids) -> Tensor:
            return self._trunk.run(ids, self._trunk.layout(sample, ids[OFFSETS], bound=bucket.longest))

        def run() -> None:
            self._states(bucket).copy_(states_of(self._inputs(bucket)))

        expected = states_of(asked)
        if self._buffers is None:
            inputs = {name: one.new_zeros(TOKENS[-1]) for name, one in asked.items()}  # more than any bucket has sequences
            self._buffers = inputs, expected.new_zeros(TOKENS[-1], expected.shape[1])
        self._fill(bucket, asked)
        run()  # libraries choose their kernels and take their workspaces before anything is recorded
        replay = self._record(run)
        self._states(bucket).zero_()
        replay()
        worst = deviation(self._states(bucket), expected)
        if not worst <= SAME[self._backend.dtype]:  # NaN fails too
            raise RuntimeError(f"a recorded pass differs by {worst:.2g} from the pass itself")
        return replay

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
            self.off = True
            log.warning("small batches are launched kernel by kernel, as CUDA graphs failed: %s", " ".join(str(error).split()))
