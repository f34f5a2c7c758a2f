"""Compiled behind the first answers: real torch.compile, with compilers that count, wait, fail or lie, and once with the real
one. Only a GPU can show what it is for.
Attention as one operation: the layout that is meant answers, by thread, and torch's own checks pass."""

from __future__ import annotations

import itertools
import logging
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch

from hybridtei.backends.torch.acceleration import AccelerationOptions
from hybridtei.backends.torch.backend import TorchBackend
from hybridtei.backends.torch.compiling import NEAR, Compiling, meant, opaque
from hybridtei.backends.torch.cuda_graphs import FORMS, TOKENS
from hybridtei.backends.torch.heads import HeadWeights
from hybridtei.backends.torch.layout import PackedLayout
from hybridtei.backends.torch.load import load_family
from hybridtei.batch import Encoding, Head, PackedBatch, offsets_of, pack
from hybridtei.checkpoint.spec import read_spec
from tests import tiny
from tests.backends.torch import textbook
from tests.backends.torch.test_cuda_graphs import Player, by_offsets
from tests.sampled import sampled

HANG = 120
BATCHES = ([5, 9], [2], [120, 3, 40], [1, 1, 1], [1])
ALONE = len(BATCHES) - 1  # of one token: torch makes no code for a size of 1 that fits another


class Counting:
    """A compiler that leaves the graph as it is, and counts what it made and how often that ran."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor] = lambda out: out) -> None:
        self.made = self.runs = 0
        self._change = change

    def __call__(self, graph: Any, _: list[torch.Tensor]) -> Callable[..., Any]:
        self.made += 1

        def run(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            self.runs += 1
            return tuple(self._change(out) for out in graph.forward(*inputs))

        return run


def opened(folder: Path, compiler: Any, **acceleration: Any) -> tuple[TorchBackend, Compiling]:
    spec = read_spec(folder, pooling="mean")
    backend = TorchBackend(spec, acceleration=AccelerationOptions(compiled="true", compiler=compiler, **acceleration))
    backend.trunk.kernel = by_offsets
    backend.accelerate()
    assert backend.faster.compiling is not None
    return backend, backend.faster.compiling


def batch(backend: TorchBackend, lengths: list[int], seed: int = 0) -> PackedBatch:
    draw = np.random.default_rng(seed)
    encodings = [Encoding(draw.integers(5, backend.spec.vocab_size, length)) for length in lengths]
    return pack(encodings, frozenset({Head.DENSE}), backend.spec.positions)


def deviations(backend: TorchBackend) -> list[float]:
    exact, found = TorchBackend(backend.spec), []
    for lengths in BATCHES:
        asked = batch(backend, lengths)
        found.append(float(np.abs(backend.forward(asked).dense - exact.forward(asked).dense).max()))
    return found


@pytest.mark.parametrize(
    ("model_type", "joined"),
    sampled(
        itertools.product(["bert", "modernbert", "qwen3", "gemma3_text", "nomic_bert"], [False, True]),
        {("modernbert", True)},
    ),
)
def test_one_code_for_all_batches_and_none_is_made_later(tmp_path: Path, model_type: str, joined: bool) -> None:
    compiler = Counting()
    spec = read_spec(tiny.write_family(tmp_path, model_type), pooling="mean")
    trunk, _ = load_family(spec, torch.float32, torch.device("cpu"), joined=joined)
    acceleration = AccelerationOptions(compiled="true", compiler=compiler)
    backend = TorchBackend(spec, loaded=(trunk, HeadWeights()), acceleration=acceleration)
    backend.accelerate()
    compiling = backend.faster.compiling
    assert compiling is not None
    assert compiling.ended.wait(HANG)
    assert (compiling.fault, compiler.made) == (None, 1)
    used = []
    for lengths in BATCHES:
        before = compiler.runs
        backend.forward(batch(backend, lengths))
        used.append(compiler.runs - before)
    assert used == [int(place != ALONE) for place in range(len(BATCHES))]
    assert compiler.made == 1
    assert max(deviations(backend)) < 1e-5


@pytest.mark.slow
def test_answers_do_not_wait_and_the_swap_makes_recordings_anew(bert: Path) -> None:
    begun, go_on, player = threading.Event(), threading.Event(), Player()
    counting = Counting()

    def slow(graph: Any, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        begun.set()
        assert go_on.wait(HANG)
        return counting(graph, inputs)

    backend, compiling = opened(bert, slow, graphs=True, recorder=player)
    graphs = backend.faster.graphs
    assert graphs is not None
    assert begun.wait(HANG)
    assert max(deviations(backend)) < 1e-5
    assert not compiling.ended.is_set()
    assert backend.trunk.instead is None
    go_on.set()
    assert compiling.ended.wait(HANG)
    assert backend.trunk.instead is not None
    backend.forward(batch(backend, [5, 9]))
    assert len(graphs) == len(TOKENS) * len(FORMS)
    assert player.recorded == 2 * len(graphs)
    rides, before = player.rides, counting.runs
    backend.forward(batch(backend, [6, 8], 1))
    assert (player.rides - rides, counting.runs) == (1, before + 1)
    assert max(deviations(backend)) < 1e-5


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_the_real_compiler(tmp_path: Path) -> None:
    backend, compiling = opened(tiny.write_bert(tmp_path, num_hidden_layers=1), "inductor")
    assert compiling.ended.wait(4 * HANG)
    assert compiling.fault is None
    assert backend.trunk.instead is not None
    assert 0 < max(deviations(backend)) < 1e-5  # it computes in another order, or it would not be it


def lying(graph: Any, inputs: list[torch.Tensor]) -> Any:
    return Counting(lambda out: 2 * out if out.is_floating_point() else out)(graph, inputs)


def failing(graph: Any, inputs: list[torch.Tensor]) -> Any:
    raise RuntimeError("no compiler is here\n" + 99 * "and a long story ")


@pytest.mark.parametrize(
    ("compiler", "why"),
    [
        pytest.param(lying, "what it made differs by 1 from", marks=pytest.mark.slow),
        (failing, "no compiler is here"),
        ("no such", "no such"),
    ],
)
def test_what_fails_or_differs_leaves_the_modules_with_one_line(
    bert: Path, compiler: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "hybridtei"):
        backend, compiling = opened(bert, compiler)
        assert compiling.ended.wait(HANG)
        assert max(deviations(backend)) == 0
    assert backend.trunk.instead is None
    (line,) = [record.message for record in caplog.records if record.name.startswith("hybridtei")]
    assert line.startswith("torch.compile: the module itself serves on: ")
    assert why in line
    assert "\n" not in line
    assert len(line) < 400


@pytest.mark.slow
def test_what_breaks_later_gives_way_and_the_batch_is_answered(bert: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken = threading.Event()

    def breaking(out: torch.Tensor) -> torch.Tensor:
        if broken.is_set():
            raise RuntimeError("a kernel was not found")
        return out

    backend, compiling = opened(bert, Counting(breaking))
    assert compiling.ended.wait(HANG)
    assert backend.trunk.instead is not None
    broken.set()
    assert max(deviations(backend)) == 0
    assert backend.trunk.instead is None
    assert len([line for line in caplog.messages if "a kernel was not found" in line]) == 1


@pytest.mark.slow
def test_short_memory_in_what_was_compiled_is_met_by_halves(bert: Path) -> None:
    small = threading.Event()

    def needing(out: torch.Tensor) -> torch.Tensor:
        if small.is_set() and out.shape[-2] > 20:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return out

    backend, compiling = opened(bert, Counting(needing))
    assert compiling.ended.wait(HANG)
    small.set()
    before = backend.forwards
    assert backend.forward(batch(backend, [12, 12, 12])).dense is not None
    assert backend.forwards > before + 1
    assert backend.trunk.instead is not None


@pytest.mark.slow
def test_closed_while_it_compiles_nothing_comes_of_it(bert: Path) -> None:
    begun = threading.Event()

    def endless(graph: Any, inputs: list[torch.Tensor]) -> Any:
        begun.set()
        never = threading.Event()
        while not never.wait(0.01):
            pass

    backend, compiling = opened(bert, endless)
    trunk = backend.trunk
    assert begun.wait(HANG)
    backend.close()
    assert compiling.ended.wait(HANG)
    assert (compiling.fault, trunk.instead) == ("abandoned", None)


def test_a_family_that_does_not_run_packed_is_not_compiled(tmp_path: Path) -> None:
    spec = read_spec(tiny.write_family(tmp_path, "mpnet"), pooling="mean")
    backend = TorchBackend(spec, acceleration=AccelerationOptions(compiled="true", compiler=failing))
    backend.accelerate()
    assert backend.faster.compiling is None


EXITING = """
import sys
from hybridtei.backends.torch.acceleration import AccelerationOptions
from hybridtei.backends.torch.backend import TorchBackend
from hybridtei.backends.torch.heads import HeadWeights
from hybridtei.backends.torch.load import load_family
from hybridtei.checkpoint.spec import read_spec
backend = TorchBackend(read_spec(sys.argv[1], pooling="mean"), acceleration=AccelerationOptions(compiled="true"))
backend.accelerate()
assert not backend.faster.compiling.ended.wait(float(sys.argv[2]))
print("gone")
"""


@pytest.mark.slow  # beside it, a backend is closed while it compiles
@pytest.mark.parametrize("seconds", ["0.01", "4"])
def test_a_process_may_end_while_it_compiles(bert: Path, seconds: str) -> None:
    command = [
        sys.executable,
        "-c",
        EXITING.replace("read_spec(sys.argv[1]", "read_spec(__import__('pathlib').Path(sys.argv[1])"),
    ]
    done = subprocess.run([*command, str(bert), seconds], capture_output=True, text=True, timeout=HANG, check=False)
    assert (done.returncode, done.stdout) == (0, "gone\n"), done.stderr[-3000:]
    assert "Traceback" not in done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("model_type", ["bert", "modernbert", "qwen3"])
def test_on_a_gpu_what_is_compiled_computes_what_the_modules_do(tmp_path: Path, model_type: str, dtype: str) -> None:
    spec = read_spec(tiny.write_family(tmp_path, model_type), pooling="mean")
    exact = TorchBackend(spec, dtype=dtype, device="cuda")
    backend = TorchBackend(spec, dtype=dtype, device="cuda", acceleration=AccelerationOptions(graphs=True, compiled="auto"))
    backend.accelerate()
    compiling = backend.faster.compiling
    assert compiling is not None
    assert compiling.ended.wait(600)
    assert compiling.fault is None
    for _ in range(2):  # kernel by kernel, then recorded
        for lengths in BATCHES:
            found, expected = (one.forward(batch(one, lengths)).dense for one in (backend, exact))
            assert np.abs(found - expected).max() <= NEAR[dtype] * np.abs(expected).max()
    backend.close()


@pytest.mark.parametrize(("window", "causal"), [(None, False), (3, False), (None, True), (3, True)])
def test_the_layout_that_is_meant_answers(window: int | None, causal: bool) -> None:
    q, k, v = textbook.drawn(textbook.LENGTHS, 2)
    layout = PackedLayout(offsets_of(textbook.LENGTHS))
    with meant(layout):
        found = opaque().attend(q, k, v, scale=0.7, window=window, causal=causal)
    assert torch.equal(found, layout.attend(q, k, v, scale=0.7, window=window, causal=causal))


def test_each_thread_means_its_own() -> None:
    x = torch.randn(6, 1, 4)
    found = {}

    def ask(lengths: tuple[int, ...]) -> None:
        with meant(PackedLayout(offsets_of(lengths))):
            found[lengths] = opaque().attend(x, x, x, scale=1.0, window=None, causal=False)

    with meant(PackedLayout(offsets_of([6]))):
        threads = [Thread(target=ask, args=(lengths,)) for lengths in ((6,), (3, 3), (1, 5))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ours = opaque().attend(x, x, x, scale=1.0, window=None, causal=False)
    assert torch.equal(ours, found[(6,)])
    assert not torch.allclose(found[(3, 3)], found[(1, 5)])


def test_torch_finds_the_operation_well_behaved() -> None:
    opaque()
    q, k, v = textbook.drawn([3, 5], 2)
    with meant(PackedLayout(offsets_of([3, 5]))):
        torch.library.opcheck(torch.ops.hybridtei.attend, (q, k, v), {"scale": 0.7, "window": 0, "causal": False})
