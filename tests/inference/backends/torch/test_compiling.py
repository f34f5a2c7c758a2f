"""Passes by `torch.compile`, made at load: real dynamo with compilers that count, fail or lie, and inductor itself. The oracle
is the traced module. Recordings need a GPU; that what fills them reaches no text is shown here."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel

from hybridtei.batch import Encoding, Head, PackedBatch, pack
from hybridtei.config import EngineConfig, ModelConfig
from hybridtei.errors import LoadError
from hybridtei.inference.backends.heads import HeadLayers
from hybridtei.inference.backends.select import open_backend
from hybridtei.inference.backends.torch.backend import TorchBackend
from hybridtei.inference.backends.torch.compiling import NEAR, NEEDS, SIZES, compile_trunk, filled
from hybridtei.inference.backends.torch.fp8 import to_eight_bits
from hybridtei.inference.backends.torch.trunk import PaddedTrunk
from hybridtei.inference.load import load_model
from hybridtei.models.checkpoint.spec import read_spec
from hybridtei.system.machine import LaneKind
from tests import tiny, tolerances

BATCHES = ([5, 9], [2], [120, 3, 40], [1, 1, 1], [1])
FAMILIES = [
    "bert",
    "qwen3",
    "deberta-v2",
]  # positions in a table, by rotation, as biases of attention


class Counting:
    """A compiler that leaves the graph as it is, and counts what it made; `change`: what comes out."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor] = lambda out: out) -> None:
        self.made = 0
        self._change = change

    def __call__(self, graph: Any, _: list[torch.Tensor]) -> Callable[..., Any]:
        self.made += 1
        return lambda *inputs: tuple(self._change(out) for out in graph.forward(*inputs))


def failing(graph: Any, inputs: list[torch.Tensor]) -> Any:
    raise RuntimeError("no compiler is here\n" + 99 * "and a long story ")


def of_family(folder: Path, model_type: str, **loading: Any) -> TorchBackend:
    return TorchBackend(read_spec(tiny.write_family(folder, model_type), pooling="mean"), **loading)


def batch(backend: TorchBackend, lengths: list[int]) -> PackedBatch:
    draw = np.random.default_rng(0)
    encodings = [Encoding(draw.integers(5, backend.spec.vocab_size, length)) for length in lengths]
    return pack(encodings, frozenset({Head.DENSE}), backend.spec.positions)


def assert_alike(backend: TorchBackend, exact: TorchBackend, asked: PackedBatch) -> None:
    found, expected = backend.forward(asked).dense, exact.forward(asked).dense
    assert found is not None
    assert expected is not None
    np.testing.assert_allclose(found, expected, atol=tolerances.WEIGHTS["float32"], rtol=0)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_one_code_for_all_batches_and_none_is_made_later(tmp_path: Path, model_type: str) -> None:
    backend, compiler = of_family(tmp_path, model_type), Counting()
    exact = TorchBackend(backend.spec)
    compile_trunk(backend, compiler)
    made = compiler.made
    assert made == 3  # two layers: before, between and after their attention
    for lengths in BATCHES:
        assert_alike(backend, exact, batch(backend, lengths))

    def in_a_lane() -> None:
        backend.enter_lane(LaneKind.BULK)
        assert_alike(backend, exact, batch(backend, [7]))

    lane = threading.Thread(target=in_a_lane)
    lane.start()
    lane.join()
    assert compiler.made == made


def test_a_prefix_is_computed_once_by_compiled_code(tmp_path: Path) -> None:
    backend, compiler = of_family(tmp_path, "qwen3"), Counting()
    exact = TorchBackend(backend.spec)
    compile_trunk(backend, compiler)
    made = compiler.made
    texts = [Encoding(np.append(np.arange(5, 25), last)) for last in range(30, 40)]
    assert_alike(
        backend, exact, pack(texts, frozenset({Head.DENSE}), backend.spec.positions, prefix=20)
    )
    assert compiler.made == made


@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_fills_a_recorded_pass_reaches_no_text(tmp_path: Path, model_type: str) -> None:
    backend = of_family(tmp_path, model_type)
    trunk: Any = backend.trunk
    for lengths in ([1], [60], [1, 30, 2, 19], [100, 3, 61]):
        asked = batch(backend, lengths)
        ids, layout, count = trunk.place(asked), trunk.layout(asked), sum(lengths)
        size = next(size for size in SIZES if count <= size)
        with torch.inference_mode():
            found, expected = trunk.model(filled(ids, size), layout), trunk.model(ids, layout)
        assert found.shape[0] == size
        np.testing.assert_allclose(
            found[:count], expected, atol=tolerances.HIDDEN["float32"], rtol=0
        )


def test_a_trunk_in_eight_bits_is_compiled(tmp_path: Path) -> None:
    backend, exact = (of_family(tmp_path, "bert", dtype="bfloat16") for _ in range(2))
    for one in (backend, exact):
        assert to_eight_bits(one.trunk.model)
    backend.dtype = "fp8"
    compile_trunk(backend, Counting())
    asked = batch(backend, [9, 30, 4])
    np.testing.assert_array_equal(backend.forward(asked).dense, exact.forward(asked).dense)


@pytest.mark.slow
def test_inductor_serves_on_a_cpu(tmp_path: Path) -> None:
    """The self-test at load runs compiled code, too."""
    folder = tiny.write_bert(tmp_path, num_hidden_layers=1)
    config = ModelConfig(model_id=str(folder), pooling="mean", backend="torch", torch_compile=True)
    loaded = load_model(config, EngineConfig(max_batch_tokens=256))
    backend: Any = loaded.backend
    assert backend.trunk.compiled is not None
    exact = TorchBackend(backend.spec)
    for lengths in BATCHES:
        assert_alike(backend, exact, batch(backend, lengths))


@pytest.mark.parametrize(
    ("compiler", "why"),
    [
        (
            Counting(lambda out: 2 * out if out.is_floating_point() else out),
            "is allowed in float32: leave it out",
        ),
        (
            Counting(lambda out: out * float("nan") if len(out) == SIZES[0] else out),
            "differ from the module's by nan",
        ),
        (failing, f"failed ({NEEDS}; else leave it out): BackendCompilerFailed"),
        (failing, "no compiler is here"),
        ("no such", "no such"),
    ],
)
def test_code_that_fails_or_differs_is_refused(tmp_path: Path, compiler: Any, why: str) -> None:
    backend = of_family(tmp_path, "bert")
    with pytest.raises(LoadError) as caught:
        compile_trunk(backend, compiler)
    message = str(caught.value)
    assert message.startswith(f"{backend.spec.folder}: --torch-compile ")
    assert why in message
    assert "\n" not in message
    assert len(message) < 700
    assert backend.trunk.compiled is None  # type: ignore[union-attr]


def test_backends_and_modules_that_are_not_compiled_are_refused(bert: Path) -> None:
    config, spec = (
        ModelConfig(model_id=str(bert), backend="ort", torch_compile=True),
        read_spec(bert),
    )
    with pytest.raises(
        LoadError,
        match=r"--torch-compile is for the torch backend, and the model runs on ort here \(asked for\)",
    ):
        open_backend(config, spec)
    trunk = PaddedTrunk(AutoModel.from_pretrained(bert).eval(), spec, torch.device("cpu"))
    with pytest.raises(LoadError, match="transformers' own modules run bert: leave it out"):
        compile_trunk(TorchBackend(spec, loaded=(trunk, HeadLayers())))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("model_type", ["bert", "modernbert", "qwen3"])
def test_on_a_gpu_compiled_and_recorded_passes_compute_what_the_modules_do(
    tmp_path: Path, model_type: str, dtype: str
) -> None:
    backend = of_family(tmp_path, model_type, dtype=dtype, device="cuda")
    exact = TorchBackend(backend.spec, dtype=dtype, device="cuda")
    compile_trunk(backend)
    for lengths in (*BATCHES, [120] * 12):
        for _ in range(2):
            found, expected = (one.forward(batch(one, lengths)).dense for one in (backend, exact))
            assert found is not None
            assert expected is not None
            assert np.abs(found - expected).max() <= NEAR[dtype] * np.abs(expected).max()
