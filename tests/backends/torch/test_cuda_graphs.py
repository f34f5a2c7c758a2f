"""Recordings of small batches. Without a GPU a "recording" is the function itself, called again: buffers, buckets, limits and
failures are the real ones, and so is the model; attention reads where sequences end from the buffers, as flash kernels do.
Buckets are a calculation with laws, and the real trunk, to which padding must make no difference."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hybridtei.backends.torch.acceleration import AccelerationOptions
from hybridtei.backends.torch.backend import TorchBackend
from hybridtei.backends.torch.cuda_graphs import (
    FORMS,
    TOKENS,
    Bucket,
    Graphs,
    Recorder,
    Replay,
    bucket_of,
    buckets,
    padded,
)
from hybridtei.backends.torch.kernels import Sequences, per_sequence
from hybridtei.backends.torch.trunk import PackedTrunk
from hybridtei.batch import Encoding, PackedBatch, Positions, pack
from hybridtei.checkpoint.spec import read_spec
from hybridtei.errors import BackendError
from hybridtei.outputs import HeadOutputs
from tests import tiny, tolerances
from tests.backends.torch.test_backend import columns_of

LENGTHS = [[7], [1, 30, 2, 19], [64], [100, 3, 61], [5] * 20, [120] * 12]
ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Player:
    """A recorder whose recordings call the function again; counts what was recorded and played."""

    def __init__(self) -> None:
        self.recorded = self.played = 0

    @property
    def rides(self) -> int:
        """Batches that were played; each recording is played once more, to be checked."""
        return self.played - self.recorded

    def __call__(self, run: Callable[[], object]) -> Replay:
        self.recorded += 1

        def replay() -> None:
            self.played += 1
            run()

        return replay


def by_offsets(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, **asked) -> Tensor:
    """A kernel that believes the offsets alone, not what the host said when it was recorded."""
    lengths = sequences.offsets.diff().tolist()
    assert max(lengths) <= sequences.longest
    return per_sequence(q, k, v, Sequences(lengths, sequences.offsets), **asked)


def batch(backend: TorchBackend, lengths: list[int], seed: int = 0, *, typed: bool = False) -> PackedBatch:
    draw = np.random.default_rng(seed)
    encodings = [
        Encoding(draw.integers(5, backend.spec.vocab_size, length), draw.integers(0, 2, length) if typed else None)
        for length in lengths
    ]
    return pack(encodings, backend.spec.heads, backend.spec.positions)


def opened(folder: Path, recorder: Recorder, pooling: str | None = None) -> tuple[TorchBackend, Graphs]:
    backend = TorchBackend(read_spec(folder, pooling=pooling), acceleration=AccelerationOptions(graphs=True, recorder=recorder))
    backend.trunk.kernel = by_offsets
    backend.accelerate()
    assert backend.faster.graphs is not None
    return backend, backend.faster.graphs


def check(backend: TorchBackend, exact: TorchBackend, asked: PackedBatch, dtype: str = "float32") -> None:
    compare(backend.forward(asked), exact.forward(asked), dtype)


def compare(found: HeadOutputs, expected: HeadOutputs, dtype: str = "float32") -> None:
    assert expected.tokens is not None
    for row in range(len(expected.tokens)):
        ours, theirs = columns_of(found, row), columns_of(expected, row)
        assert ours.keys() == theirs.keys()
        for name, values in theirs.items():
            np.testing.assert_allclose(ours[name], values, atol=tolerances.HIDDEN[dtype], rtol=0, err_msg=name)


def folder_of(kind: str, request: pytest.FixtureRequest, folder: Path) -> Path:
    known = ("hybrid", "m3")
    return request.getfixturevalue(kind) if kind in known else tiny.write_family(folder, kind)


@pytest.mark.parametrize("kind", ["hybrid", "m3", "modernbert", "qwen3"])
def test_a_batch_that_is_played_gets_what_a_pass_computes(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    player, folder = Player(), folder_of(kind, request, tmp_path)
    pooling = None if kind in ("hybrid", "m3") else "mean"
    backend, graphs = opened(folder, player, pooling)
    exact = TorchBackend(backend.spec)
    made = buckets(backend.spec.max_input_length)
    assert len(graphs) == player.recorded == len({*made}) == len(TOKENS) * len(FORMS)
    for seed, lengths in enumerate([*LENGTHS, *reversed(LENGTHS)]):
        check(backend, exact, batch(backend, lengths, seed))
        check(backend, exact, batch(backend, lengths, seed, typed=backend.spec.has_token_types))
    assert player.rides == 4 * len(LENGTHS)
    backend.close()


def test_nothing_is_recorded_once_it_serves(hybrid: Path) -> None:
    player = Player()
    backend, _ = opened(hybrid, player)
    exact, before = TorchBackend(backend.spec), player.recorded
    for lengths in ([60], [1], [3, 50, 11], [16, 16, 16, 16], [100] * 20):
        check(backend, exact, batch(backend, lengths))
    assert (player.recorded, player.rides) == (before, 5)


@pytest.mark.parametrize("kind", ["raises", "plays nothing"])
def test_a_recording_that_fails_is_the_last_and_said_once(hybrid: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    def record(run: Callable[[], object]) -> Replay:
        if kind == "raises":
            raise RuntimeError("operation not permitted\nwhen stream is capturing")
        return lambda: None

    with caplog.at_level(logging.WARNING):
        backend, graphs = opened(hybrid, record)
        exact = TorchBackend(backend.spec)
        for lengths in LENGTHS:
            check(backend, exact, batch(backend, lengths))
        assert graphs.off
    (line,) = caplog.messages
    assert line.startswith("small batches are launched kernel by kernel, as CUDA graphs failed: ")
    assert line.endswith("when stream is capturing" if kind == "raises" else "differs by 1 from the pass itself")


def test_a_recording_that_breaks_later_fails_its_batch_and_no_other(hybrid: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken = threading.Event()

    def record(run: Callable[[], object]) -> Replay:
        def replay() -> None:
            if broken.is_set():
                raise RuntimeError("CUDA error: launch failure")
            run()

        return replay

    backend, graphs = opened(hybrid, record)
    exact = TorchBackend(backend.spec)
    backend.forward(batch(backend, [5]))
    broken.set()
    with pytest.raises(BackendError, match="launch failure"):
        backend.forward(batch(backend, [5]))
    assert graphs.off
    check(backend, exact, batch(backend, [5]))
    assert len([line for line in caplog.messages if "CUDA graphs failed" in line]) == 1


def test_passes_that_come_while_all_is_recorded_are_launched(hybrid: Path) -> None:
    entered, go_on, player = threading.Event(), threading.Event(), Player()

    def slow(run: Callable[[], object]) -> Replay:
        entered.set()
        assert go_on.wait(60)
        return player(run)

    acceleration = AccelerationOptions(graphs=True, recorder=slow)
    backend = TorchBackend(read_spec(hybrid), acceleration=acceleration)
    backend.trunk.kernel = by_offsets
    exact, asked = TorchBackend(backend.spec), batch(backend, [5])
    recording = threading.Thread(target=backend.accelerate)
    recording.start()
    assert entered.wait(60)
    check(backend, exact, asked)
    assert player.rides == 0
    go_on.set()
    recording.join()
    check(backend, exact, asked)
    assert player.rides == 1


def test_what_was_dropped_for_memory_stays_so(hybrid: Path) -> None:
    player = Player()
    backend, graphs = opened(hybrid, player)
    graphs.forget()
    check(backend, TorchBackend(backend.spec), batch(backend, [5]))
    assert (len(graphs), player.rides) == (0, 0)


def test_a_closed_backend_records_no_more(hybrid: Path) -> None:
    player = Player()
    backend, graphs = opened(hybrid, player)
    backend.close()
    assert graphs.off
    assert len(graphs) == 0
    assert backend.faster.graphs is None


def test_torch_has_what_a_recording_asks_of_it() -> None:
    """As far as can be told without a GPU: the names."""
    asked = inspect.signature(torch.cuda.graph.__init__).parameters
    assert {"cuda_graph", "pool", "stream", "capture_error_mode"} <= asked.keys()
    assert callable(torch.cuda.CUDAGraph.replay)
    assert callable(torch.cuda.graph_pool_handle)


@pytest.mark.gpu
@ON_GPU
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["hybrid", "modernbert", "qwen3"])
def test_on_a_gpu_what_is_played_is_what_is_launched(
    kind: str, dtype: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    spec = read_spec(folder_of(kind, request, tmp_path), pooling=None if kind == "hybrid" else "mean")
    backend = TorchBackend(spec, dtype=dtype, device="cuda", acceleration=AccelerationOptions(graphs=True))
    exact = TorchBackend(spec, dtype=dtype, device="cuda")
    backend.accelerate()
    graphs = backend.faster.graphs
    if graphs is None:
        pytest.skip(f"{backend.trunk.attention.name} cannot be recorded")
    assert not graphs.off
    assert len(graphs) > 1
    for seed, lengths in enumerate([*LENGTHS, *reversed(LENGTHS)]):
        check(backend, exact, batch(backend, lengths, seed), dtype)
    backend.close()


@pytest.mark.gpu
@ON_GPU
def test_on_a_gpu_recordings_leave_room_for_passes(hybrid: Path) -> None:
    backend = TorchBackend(read_spec(hybrid), dtype="float16", device="cuda", acceleration=AccelerationOptions(graphs=True))
    most = backend.max_tokens(100_000, 64, 0.5)
    backend.accelerate()
    for lengths in LENGTHS:
        backend.forward(batch(backend, lengths))
    assert backend.forward(batch(backend, [64] * (most // 64))).dense is not None


ANY_LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=40)


def batch_of(lengths: list[int], positions: Positions | None = None, vocab_size: int = 500) -> PackedBatch:
    draw = np.random.default_rng(0)
    encodings = [Encoding(draw.integers(5, vocab_size, length), adapter=i % 3) for i, length in enumerate(lengths)]
    return pack(encodings, frozenset(), positions or Positions())


@given(ANY_LENGTHS, st.sampled_from([300, 512, 8192]))
def test_a_bucket_holds_its_batch_and_is_one_of_few(lengths: list[int], longest: int) -> None:
    asked = batch_of(lengths)
    found, made = bucket_of(asked, longest), buckets(longest)
    able = [one for one in made if one.tokens >= sum(lengths) and one.longest >= max(lengths)]
    if found is None:
        assert not any(one.sequences > len(lengths) + one.tokens // one.longest for one in able)
        return
    assert found in able
    assert found.sequences >= len(lengths)
    assert found.tokens == min(one.tokens for one in able)
    assert len(made) == len(TOKENS) * len(FORMS)


@given(ANY_LENGTHS)
def test_a_padded_batch_begins_with_the_batch_and_fills_its_bucket(lengths: list[int]) -> None:
    asked = batch_of(lengths)
    bucket = bucket_of(asked, 512)
    if bucket is None:
        return
    bucketed = padded(asked, bucket)
    assert len(bucketed) == bucket.sequences
    assert len(bucketed.input_ids) == len(bucketed.position_ids) == bucketed.cu_seqlens[-1] == bucket.tokens
    np.testing.assert_array_equal(bucketed.input_ids[: len(asked.input_ids)], asked.input_ids)
    np.testing.assert_array_equal(bucketed.position_ids[: len(asked.input_ids)], asked.position_ids)
    np.testing.assert_array_equal(bucketed.cu_seqlens[: len(asked) + 1], asked.cu_seqlens)
    if asked.adapter_ids is not None:
        assert bucketed.adapter_ids is not None
        assert len(bucketed.adapter_ids) == bucket.tokens
        np.testing.assert_array_equal(bucketed.adapter_ids[: len(asked.input_ids)], asked.adapter_ids)
    assert (bucketed.lengths >= 0).all()
    assert bucketed.max_seqlen <= bucket.longest
    assert set(bucketed.position_ids) <= set(asked.position_ids)


def test_a_batch_that_fills_its_bucket_gets_empty_sequences_only() -> None:
    asked = batch_of([60, 4])
    bucketed = padded(asked, Bucket(64, 4, 64))
    assert bucketed.lengths.tolist() == [60, 4, 0, 0]


@pytest.mark.parametrize("lengths", [[5], [64], [1] * 64, [128] * 16])
def test_few_sizes_for_likely_batches(lengths: list[int]) -> None:
    assert bucket_of(batch_of(lengths), 512) is not None


def test_what_is_too_large_or_has_unseen_tokens_has_no_bucket() -> None:
    assert bucket_of(batch_of([512] * 5), 512) is None
    assert bucket_of(batch_of([65]), 64) is None
    expanded = pack([Encoding(np.arange(5, 9), unseen=2)], frozenset(), Positions())
    assert bucket_of(expanded, 512) is None


def states(trunk: PackedTrunk, asked: PackedBatch, bound: int | None = None) -> np.ndarray:
    with torch.inference_mode():
        return trunk.run(trunk.place(asked), trunk.layout(asked, bound=bound)).numpy()


@pytest.mark.parametrize("model_type", sorted(tiny.FAMILIES.keys() - tiny.BIASED))
def test_padding_changes_no_text(tmp_path: Path, model_type: str) -> None:
    backend = TorchBackend(read_spec(tiny.write_family(tmp_path, model_type), pooling="mean"))
    spec = backend.spec
    for lengths in ([7], [1, 30, 2, 19], [64], [100, 3, 61]):
        asked = batch_of(lengths, spec.positions, spec.vocab_size)
        bucket = bucket_of(asked, spec.max_input_length)
        assert bucket is not None
        bucketed = padded(asked, bucket)
        found = states(backend.trunk, bucketed, bucket.longest)[: len(asked.input_ids)]
        expected = states(backend.trunk, asked)
        np.testing.assert_allclose(found, expected, atol=tolerances.HIDDEN["float32"], rtol=0)
        for start, end in zip(asked.cu_seqlens, asked.cu_seqlens[1:], strict=False):
            ours, theirs = (rows[start:end].mean(0) for rows in (found, expected))
            np.testing.assert_allclose(
                ours / np.linalg.norm(ours), theirs / np.linalg.norm(theirs), atol=tolerances.UNIT["float32"], rtol=0
            )
