"""What lies between the products of a pass, compiled before it serves: real torch.compile, with compilers that count, fail or
lie, and once with the real one. Only a GPU can show what it is for."""

from __future__ import annotations

import itertools
import logging
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import linear

from hybridtei.backends.torch.acceleration import AccelerationOptions, probes
from hybridtei.backends.torch.backend import TorchBackend
from hybridtei.backends.torch.compiling import NEAR, SAME, compile_pass, cut, deviation
from hybridtei.backends.torch.cuda_graphs import FORMS, TOKENS, Replay
from hybridtei.backends.torch.fp8 import quantised, to_eight_bits
from hybridtei.backends.torch.heads import HeadWeights
from hybridtei.backends.torch.load import load_family
from hybridtei.batch import Encoding, Head, PackedBatch, pack
from hybridtei.checkpoint.spec import read_spec
from tests import tiny
from tests.backends.torch.test_cuda_graphs import Player, by_offsets
from tests.sampled import sampled

COMPILED = ["bert", "modernbert", "qwen3", "gemma3_text", "nomic_bert"]
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


def opened(folder: Path, compiler: Any, **acceleration: Any) -> TorchBackend:
    spec = read_spec(folder, pooling="mean")
    backend = TorchBackend(spec, acceleration=AccelerationOptions(compiled="true", compiler=compiler, **acceleration))
    backend.trunk.kernel = by_offsets
    backend.accelerate()
    return backend


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
    ("model_type", "joined"), sampled(itertools.product(COMPILED, [False, True]), {("modernbert", True), ("qwen3", True)})
)
def test_one_code_for_all_layers_and_batches_and_none_is_made_later(tmp_path: Path, model_type: str, joined: bool) -> None:
    compiler = Counting()
    spec = read_spec(tiny.write_family(tmp_path, model_type), pooling="mean")
    trunk, _ = load_family(spec, torch.float32, torch.device("cpu"), joined=joined)
    acceleration = AccelerationOptions(compiled="true", compiler=compiler)
    backend = TorchBackend(spec, loaded=(trunk, HeadWeights()), acceleration=acceleration)
    backend.accelerate()
    model, pieces = cut(trunk.model)
    calls = sum(f"{node.target}".startswith("piece_") for node in model.graph.nodes)
    assert (backend.faster.fault, compiler.made) == (None, len(pieces))
    assert calls > len(pieces)  # of two layers
    used = []
    for lengths in BATCHES:
        before = compiler.runs
        backend.forward(batch(backend, lengths))
        used.append(compiler.runs - before)
    assert used == [calls * (place != ALONE) for place in range(len(BATCHES))]
    assert compiler.made == len(pieces)
    assert max(deviations(backend)) < 1e-5


@pytest.mark.parametrize("model_type", COMPILED)
def test_a_pass_in_pieces_is_the_pass(tmp_path: Path, model_type: str) -> None:
    backend = TorchBackend(read_spec(tiny.write_family(tmp_path, model_type), pooling="mean"))
    trunk, (probe, _) = backend.trunk, probes(backend.spec)
    before = trunk.model.code
    model, _ = cut(trunk.model)
    ids, layout = trunk.place(probe), trunk.layout(probe)
    assert torch.equal(model(ids, layout), trunk.model(ids, layout))
    assert trunk.model.code == before


@pytest.mark.parametrize("model_type", ["bert", "qwen3"])
def test_in_fp8_rows_are_quantised_by_what_makes_them(tmp_path: Path, model_type: str) -> None:
    spec = read_spec(tiny.write_family(tmp_path, model_type), pooling="mean")
    trunk, _ = load_family(spec, torch.bfloat16, torch.device("cpu"), joined=True)
    backend = TorchBackend(spec, dtype="bfloat16", loaded=(trunk, HeadWeights()))
    layers = to_eight_bits(trunk.model)
    model, pieces = cut(trunk.model)
    targets = [node.target for node in model.graph.nodes]
    assert layers
    assert quantised not in targets
    assert linear not in targets
    compiler = Counting()
    assert compile_pass(trunk, probes(backend.spec), dtype="fp8", compiler=compiler) is None
    assert compiler.made == len(pieces)
    for probe in probes(backend.spec):
        ids, layout = trunk.place(probe), trunk.layout(probe)
        assert deviation(trunk.run(ids, layout), trunk.model(ids, layout)) <= SAME["fp8"]


def test_recordings_are_of_what_is_compiled(bert: Path) -> None:
    player, counting, made = Player(), Counting(), list[int]()

    def record(run: Callable[[], object]) -> Replay:
        made.append(counting.made)
        return player(run)

    backend = opened(bert, counting, graphs=True, recorder=record)
    assert {*made} == {counting.made}
    assert counting.made > 0
    graphs = backend.faster.graphs
    assert graphs is not None
    assert player.recorded == len(graphs) == len(TOKENS) * len(FORMS)
    rides, before = player.rides, counting.runs
    backend.forward(batch(backend, [6, 8], 1))
    assert player.rides == rides + 1
    assert counting.runs > before
    assert max(deviations(backend)) < 1e-5


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_the_real_compiler(tmp_path: Path) -> None:
    backend = opened(tiny.write_bert(tmp_path, num_hidden_layers=1), "inductor")
    assert backend.faster.fault is None
    assert backend.trunk.instead is not None
    assert 0 < max(deviations(backend)) < 1e-5  # it computes in another order, or it would not be it


def lying(graph: Any, inputs: list[torch.Tensor]) -> Any:
    return Counting(lambda out: 2 * out if out.is_floating_point() else out)(graph, inputs)


def failing(graph: Any, inputs: list[torch.Tensor]) -> Any:
    raise RuntimeError("no compiler is here\n" + 99 * "and a long story ")


@pytest.mark.parametrize(
    ("compiler", "why"),
    [
        pytest.param(lying, "what it made differs by", marks=pytest.mark.slow),
        (failing, "no compiler is here"),
        ("no such", "no such"),
    ],
)
def test_what_fails_or_differs_leaves_the_modules_with_one_line(
    bert: Path, compiler: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "hybridtei"):
        backend = opened(bert, compiler)
        assert max(deviations(backend)) == 0
    assert backend.trunk.instead is None
    (line,) = [record.message for record in caplog.records if record.name.startswith("hybridtei")]
    assert line.startswith("torch.compile: the modules serve on: ")
    assert why in line
    assert f"{backend.faster.fault}" in line
    assert "\n" not in line
    assert len(line) < 400


@pytest.mark.slow
def test_what_breaks_later_gives_way_and_the_batch_is_answered(bert: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken = threading.Event()

    def breaking(out: torch.Tensor) -> torch.Tensor:
        if broken.is_set():
            raise RuntimeError("a kernel was not found")
        return out

    backend = opened(bert, Counting(breaking))
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

    backend = opened(bert, Counting(needing))
    small.set()
    before = backend.forwards
    assert backend.forward(batch(backend, [12, 12, 12])).dense is not None
    assert backend.forwards > before + 1
    assert backend.trunk.instead is not None


def test_a_family_that_does_not_run_packed_is_not_compiled(tmp_path: Path) -> None:
    spec = read_spec(tiny.write_family(tmp_path, "mpnet"), pooling="mean")
    backend = TorchBackend(spec, acceleration=AccelerationOptions(compiled="true", compiler=failing))
    backend.accelerate()
    assert (backend.faster.fault, backend.trunk.packs) == (None, False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("model_type", ["bert", "modernbert", "qwen3"])
def test_on_a_gpu_what_is_compiled_computes_what_the_modules_do(tmp_path: Path, model_type: str, dtype: str) -> None:
    spec = read_spec(tiny.write_family(tmp_path, model_type), pooling="mean")
    exact = TorchBackend(spec, dtype=dtype, device="cuda")
    backend = TorchBackend(spec, dtype=dtype, device="cuda", acceleration=AccelerationOptions(graphs=True, compiled="auto"))
    backend.accelerate()
    assert backend.faster.fault is None
    assert backend.trunk.instead is not None
    for _ in range(2):  # kernel by kernel, then recorded
        for lengths in BATCHES:
            found, expected = (one.forward(batch(one, lengths)).dense for one in (backend, exact))
            assert np.abs(found - expected).max() <= NEAR[dtype] * np.abs(expected).max()
    backend.close()
