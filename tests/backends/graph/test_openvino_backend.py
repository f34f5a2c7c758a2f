"""OpenVINO against torch, output by output, in both precisions; neighbours and threads that change nothing; whose priority."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("openvino", reason="the openvino extra is not installed")

import openvino as ov

from hybridtei.backends.graph import openvino_backend
from hybridtei.backends.graph.openvino_backend import OpenVinoBackend
from hybridtei.backends.graph.ops import family_graph
from hybridtei.backends.graph.writer import Graph
from hybridtei.backends.torch.backend import TorchBackend
from hybridtei.batch import Encoding, Head, Padding, pack
from hybridtei.checkpoint.modules import POOLINGS
from hybridtei.checkpoint.spec import ModelSpec, read_spec
from hybridtei.checkpoint.weights import Weights
from hybridtei.config import ModelConfig
from hybridtei.errors import BackendError, LoadError, WeightMismatch
from hybridtei.load import find_model
from hybridtei.outputs import HeadOutputs
from hybridtei.system.machine import LaneKind
from hybridtei.text.tokenizer import Tokenizer
from tests import tiny, tolerances
from tests.backends.torch.test_backend import columns_of, sixty_four
from tests.backends.torch.test_trunk import random_encodings
from tests.sampled import sampled
from tests.tiny import change

Copied = Callable[[Path], Path]
EVERYTHING = frozenset({Head.DENSE, Head.SPARSE, Head.MULTIVECTOR, Head.TOKENS})
ABLE = "BF16" in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
ABLE_ONLY = pytest.mark.skipif(not ABLE, reason="this processor has no bfloat16")
DTYPES = ["float32", pytest.param("bfloat16", marks=ABLE_ONLY)]
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only there has each thread a priority of its own")


def by_dtype(names: Iterable[str], quick: Collection[tuple[str, str]]) -> list[Any]:
    """Each name in each precision, of which some are quick."""
    both = sampled(itertools.product(names, ("float32", "bfloat16")), quick)
    return [pytest.param(*one.values, marks=[*one.marks, *([ABLE_ONLY] if "bfloat16" in one.values else [])]) for one in both]


def openvino(spec: ModelSpec, **settings: Any) -> OpenVinoBackend:
    return OpenVinoBackend(spec, tiny.graph_of(spec.model_type), Weights.open(spec.folder), **settings)


def run(backend: Any, encodings: list[Encoding], heads: frozenset[Head] | None = None, **how: bool) -> HeadOutputs:
    return backend.forward(pack(encodings, heads or backend.spec.heads, backend.spec.positions), **how)


def same(ours: HeadOutputs, theirs: HeadOutputs, rows: int, dtype: str = "float32") -> None:
    """Relative to a row's largest value, where that is above 1."""
    for i in range(rows):
        found, expected = columns_of(ours, i), columns_of(theirs, i)
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            assert found[name].dtype == np.float32
            scale = max(1.0, float(np.abs(values).max(initial=0)))
            np.testing.assert_allclose(found[name], values, atol=scale * tolerances.HIDDEN[dtype], rtol=0, err_msg=name)


def agree(spec: ModelSpec, dtype: str = "float32") -> None:
    """Torch in float32 and OpenVINO, every output of a model."""
    texts = random_encodings(spec)
    same(run(openvino(spec, dtype=dtype), texts), run(TorchBackend(spec), texts), len(texts), dtype)


@pytest.fixture(scope="module")
def m3_backend(m3: Path) -> OpenVinoBackend:
    return openvino(read_spec(m3))


@pytest.fixture(scope="module", params=DTYPES)
def hybrid_backend(request: pytest.FixtureRequest, hybrid: Path) -> OpenVinoBackend:
    return openvino(read_spec(hybrid), dtype=request.param)


# --- against torch -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "dtype"), by_dtype([*tiny.FAMILIES], {*((name, "float32") for name in tiny.QUICK), ("qwen3", "bfloat16")})
)
def test_a_graph_serves_other_weights_of_its_shape(tmp_path: Path, model_type: str, dtype: str) -> None:
    """All ids of the vocabulary, padding among them, token types, lengths of 1 to 120 in one batch."""
    agree(read_spec(tiny.write_family(tmp_path, model_type, seed=1), pooling="mean"), dtype)


@pytest.mark.parametrize("pooling", sampled(POOLINGS, {"max"}))
def test_every_pooling_agrees(bert: Path, pooling: str) -> None:
    agree(read_spec(bert, pooling=pooling))


@pytest.mark.parametrize(("name", "dtype"), by_dtype(["m3", "hybrid"], {("m3", "float32"), ("hybrid", "bfloat16")}))
def test_all_heads_agree(request: pytest.FixtureRequest, name: str, dtype: str) -> None:
    spec = read_spec(request.getfixturevalue(name))
    assert spec.heads == EVERYTHING
    agree(spec, dtype)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_weights_in_half_precision_are_widened(bert: Path, copied: Copied, stored: torch.dtype) -> None:
    agree(read_spec(change(copied(bert), lambda tensors: {name: tensor.to(stored) for name, tensor in tensors.items()})))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_trunk_computes_in_the_precision_asked_for(bert: Path, dtype: str) -> None:
    spec = read_spec(bert)
    models = openvino(spec, dtype=dtype)._models
    for model in (models._all_cores, models._express, models._bulk):
        run_time = [operation.rt_info for operation in model._model.get_runtime_model().get_ops()]
        used = {of["runtimePrecision"].astype(str) for of in run_time if of["layerType"].astype(str) == "FullyConnected"}
        assert used == {{"float32": "f32", "bfloat16": "bf16"}[dtype]}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_real_model_finds_the_same_texts(dtype: str) -> None:
    model = find_model(ModelConfig())
    graph = family_graph(model)
    tokenizer = Tokenizer.load(model.folder / "tokenizer.json", has_token_types=True)
    sentences = [f"{who} {does} {what}" for who in WHO for does in DOES for what in WHAT]
    texts = [tokenizer.cut(raw, 64, "Right") for raw in tokenizer.encode(sentences)]
    ours = unit(run(OpenVinoBackend(model, graph, Weights.open(model.folder), dtype=dtype), texts, frozenset({Head.DENSE})))
    theirs = unit(run(TorchBackend(model), texts, frozenset({Head.DENSE})))
    assert (ours * theirs).sum(axis=1).min() >= tolerances.REAL_COSINE[dtype]
    found, expected = (np.argsort(-vectors @ vectors.T, axis=1)[:, :10] for vectors in (ours, theirs))
    overlap = np.mean([len(set(one) & set(other)) / 10 for one, other in zip(found, expected, strict=True)])
    assert overlap >= {"float32": 0.999, "bfloat16": 0.97}[dtype]


WHO = ("The old gardener", "A young physicist", "Our neighbour's dog", "The central bank", "Nobody in the village")
DOES = ("quietly watched", "explained", "forgot about", "was asked to repair")
WHAT = ("the broken pump behind the school.", "why interest rates rise.", "a letter from 1912.", "two loud geese", "it.")


def unit(outputs: HeadOutputs) -> np.ndarray:
    assert outputs.dense is not None
    return outputs.dense / np.linalg.norm(outputs.dense, axis=1, keepdims=True)


# --- laws --------------------------------------------------------------------------------------------------------------


def test_neighbours_and_their_order_change_no_output(hybrid_backend: OpenVinoBackend) -> None:
    texts = sixty_four(hybrid_backend.spec.vocab_size)
    order = np.random.default_rng(0).permutation(len(texts))
    together, shuffled = run(hybrid_backend, texts), run(hybrid_backend, [texts[i] for i in order])
    for place, i in enumerate(order):
        alone = run(hybrid_backend, [texts[i]])
        same(together.take([int(i)]), alone, 1, hybrid_backend.dtype)
        same(shuffled.take([place]), alone, 1, hybrid_backend.dtype)


def test_all_lanes_at_once_compute_what_each_does_alone(hybrid_backend: OpenVinoBackend) -> None:
    texts = sixty_four(hybrid_backend.spec.vocab_size)
    alone = [run(hybrid_backend, [text]) for text in texts]
    before = hybrid_backend.forwards

    def lane(place: int) -> HeadOutputs:
        hybrid_backend.enter_lane(LaneKind.EXPRESS if place % 2 else LaneKind.BULK)
        return run(hybrid_backend, [texts[place % len(texts)]], use_all_cores=place % 5 == 0)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lane, range(128)))
    assert hybrid_backend.forwards == before + len(found)
    for place, outputs in enumerate(found):
        same(outputs, alone[place % len(texts)], 1, hybrid_backend.dtype)


def test_threads_of_one_pass_change_nothing(hybrid: Path, hybrid_backend: OpenVinoBackend) -> None:
    texts = sixty_four(hybrid_backend.spec.vocab_size)
    team = openvino(read_spec(hybrid), threads=2, dtype=hybrid_backend.dtype)
    assert team.lanes == (LaneKind.BULK,)
    same(run(team, texts), run(hybrid_backend, texts), len(texts), hybrid_backend.dtype)


def test_a_model_of_large_matrices_is_compiled_once(
    hybrid: Path, hybrid_backend: OpenVinoBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len({id(model) for model in vars(hybrid_backend._models).values()}) > 1
    monkeypatch.setattr("hybridtei.backends.graph.openvino_backend.LARGE_BYTES", 1000)
    texts = sixty_four(hybrid_backend.spec.vocab_size)
    team = openvino(read_spec(hybrid), dtype=hybrid_backend.dtype)
    assert team.lanes == (LaneKind.BULK,)
    assert len({id(model) for model in vars(team._models).values()}) == 1
    same(run(team, texts), run(hybrid_backend, texts), len(texts), hybrid_backend.dtype)
    with ThreadPoolExecutor(4) as pool:
        alone = list(pool.map(lambda text: run(team, [text], use_all_cores=True), texts))
    for text, outputs in zip(texts, alone, strict=True):
        same(outputs, run(hybrid_backend, [text]), 1, hybrid_backend.dtype)


def test_what_came_out_is_not_touched_by_the_next_pass(m3_backend: OpenVinoBackend) -> None:
    one, other = sixty_four(m3_backend.spec.vocab_size)[:2]
    outputs = run(m3_backend, [one])
    before = {name: values.copy() for name, values in columns_of(outputs, 0).items()}
    run(m3_backend, [other])
    for name, values in columns_of(outputs, 0).items():
        np.testing.assert_array_equal(values, before[name])


def test_what_went_in_is_not_touched_by_any_pass(m3_backend: OpenVinoBackend) -> None:
    """Lent inputs are: a pass of another request, on ids of the same shape, writes over them."""
    model = m3_backend._models._express
    shapes = {name: (3, 7) if name == "seen" else (21,) for name in model.inputs}
    feeds = [{name: np.full(shape, value, dtype=np.int64) for name, shape in shapes.items()} for value in (1, 5)]
    for feed in feeds * 3:
        model.run(feed)
        model._idle.insert(0, model._model.create_infer_request())  # others come and go
    for feed, value in zip(feeds, (1, 5), strict=True):
        assert all((array == value).all() for array in feed.values())


@pytest.mark.parametrize(("least", "parts", "waste"), [(1, 8, 1.25), (8, 16, 1.125), (8, 32, 1.0625)])
def test_sizes_grow_a_little_to_one_of_few(least: int, parts: int, waste: float) -> None:
    sizes = [openvino_backend.grown(size, least, parts) for size in range(1, 1025)]
    assert all(size <= larger < size * waste + least for size, larger in enumerate(sizes, 1))
    assert sizes == sorted(sizes)
    assert len(set(sizes)) <= 85


def test_texts_as_long_as_the_table_of_positions_run(tmp_path: Path) -> None:
    spec = read_spec(tiny.write_bert(tmp_path, max_position_embeddings=27))
    backend = OpenVinoBackend(spec, family_graph(spec), Weights.open(tmp_path))
    texts = [Encoding(np.full(length, 7)) for length in (25, 26, 27)]
    same(run(backend, texts), run(TorchBackend(spec), texts), len(texts))


# --- priority ----------------------------------------------------------------------------------------------------------


@ON_LINUX
@pytest.mark.parametrize("kind", sampled([LaneKind.BULK, LaneKind.EXPRESS], [LaneKind.EXPRESS]))
def test_each_kind_of_lane_computes_at_its_own_priority(hybrid: Path, kind: LaneKind) -> None:
    """Also after other models were closed, whose idle threads OpenVINO keeps for the next one that is compiled alike."""
    keeper = ov.Core()  # or the threads would end with the last model
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    lower = min(ours + 7, 19)
    for other in (0, lower):
        openvino(read_spec(hybrid), bulk_niceness=other).close()
    backend = openvino(read_spec(hybrid), bulk_niceness=lower)
    texts = sixty_four(backend.spec.vocab_size)
    own: set[int] = set()

    def lane() -> None:
        own.add(threading.get_native_id())
        backend.enter_lane(kind)
        run(backend, texts, frozenset({Head.TOKENS}))

    before = cpu_ticks()
    with ThreadPoolExecutor(1) as pool:
        for _ in range(1000):  # however fast it is: until one thread has computed enough to tell
            pool.submit(lane).result()
            ticks = {thread: spent - before.get(thread, 0) for thread, spent in cpu_ticks().items()}
            busiest = max(ticks.keys() - own, key=lambda thread: ticks[thread])
            if ticks[busiest] > 5:
                break
        assert ticks[busiest] > 5
        assert os.getpriority(os.PRIO_PROCESS, busiest) == (lower if kind is LaneKind.BULK else ours)
    del keeper


def cpu_ticks() -> dict[int, int]:
    """Processor time that each thread of this process has had."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            fields = (task / "stat").read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):  # of a test before, which has just ended
            continue
        found[int(task.name)] = int(fields[11]) + int(fields[12])
    return found


# --- as a backend ------------------------------------------------------------------------------------------------------


def test_a_backend_says_what_it_is(hybrid_backend: OpenVinoBackend) -> None:
    assert (hybrid_backend.name, hybrid_backend.padding) == ("openvino", Padding.ATTENTION)
    assert hybrid_backend.dtype in ("float32", "bfloat16")
    assert hybrid_backend.busy_tokens > 0
    assert set(hybrid_backend.lanes) == set(LaneKind)


def test_importing_it_does_not_bring_telemetry(tmp_path: Path) -> None:
    program = "import hybridtei.backends.graph.openvino_backend, sys; print(sys.modules['openvino_telemetry'])"
    environment = {**os.environ, "HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "None"
    assert not [path for path in tmp_path.rglob("*") if "intel" in path.name.lower() or "openvino" in path.name.lower()]


@pytest.mark.parametrize("head", sorted(EVERYTHING))
def test_only_wanted_heads_are_computed_and_all_share_a_pass(m3_backend: OpenVinoBackend, head: Head) -> None:
    before = m3_backend.forwards
    found = columns_of(run(m3_backend, [Encoding(np.array([0, 7, 2]))], frozenset({head})), 0)
    assert set(found) == {{Head.SPARSE: "token_weights"}.get(head, str(head))}
    run(m3_backend, sixty_four(m3_backend.spec.vocab_size))
    assert m3_backend.forwards == before + 2


WRONG = [
    Encoding(np.array([2, 10_000, 3])),
    Encoding(np.array([2, -1, 3])),
    Encoding(np.array([5] * 1000)),
    Encoding(np.array([2, 9, 3]), np.array([0, 0, 2])),
]


@pytest.mark.parametrize("wrong", WRONG, ids=["id", "negative", "position", "type"])
def test_a_pass_that_fails_is_a_backend_error_and_the_next_one_works(hybrid_backend: OpenVinoBackend, wrong: Encoding) -> None:
    """OpenVINO itself would answer, with whatever lies beyond the table."""
    before = hybrid_backend.forwards
    with pytest.raises(BackendError, match=r"forward pass failed.*in a table of"):
        run(hybrid_backend, [wrong])
    assert hybrid_backend.forwards == before
    assert run(hybrid_backend, [Encoding(np.array([0, 7, 2]))]).dense is not None


def test_whatever_a_pass_raises_is_a_backend_error(m3_backend: OpenVinoBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    good = Encoding(np.array([0, 7, 2]))
    with monkeypatch.context() as patch:
        patch.setattr(m3_backend, "_heads", None)
        with pytest.raises(BackendError, match="forward pass failed"):
            run(m3_backend, [good])
    with monkeypatch.context() as patch:  # what the library itself refuses: shapes that do not belong together
        patch.setattr(openvino_backend, "end_to_end", lambda _, inputs, run, *more: run(mismatched(inputs)))
        with pytest.raises(BackendError, match="forward pass failed"):
            run(m3_backend, [good])
    assert run(m3_backend, [good]).dense is not None


def mismatched(names: frozenset[str]) -> dict[str, np.ndarray]:
    return {name: np.ones((1, 3 + place), dtype=np.int64) for place, name in enumerate(sorted(names))}


def test_a_closed_backend_fails_and_says_so(hybrid: Path) -> None:
    backend = openvino(read_spec(hybrid))
    run(backend, [Encoding(np.array([0, 7, 2]))])
    backend.close()
    with pytest.raises(BackendError, match="forward pass failed"):
        run(backend, [Encoding(np.array([0, 7, 2]))])


# --- graphs, weights and processors that do not fit --------------------------------------------------------------------

BIAS = "encoder.layer.1.output.dense.bias"


def test_a_missing_weight_is_an_error_that_names_it(bert: Path, copied: Copied) -> None:
    folder = change(copied(bert), lambda tensors: {name: tensor for name, tensor in tensors.items() if name != BIAS})
    with pytest.raises(WeightMismatch, match=rf"{folder}.*`{BIAS}`"):
        openvino(read_spec(folder))


def test_a_graph_of_another_family_is_a_mismatch(bert: Path) -> None:
    with pytest.raises(WeightMismatch, match=str(bert)):
        OpenVinoBackend(read_spec(bert), tiny.graph_of("modernbert"), Weights.open(bert))


@pytest.mark.parametrize("content", [b"", b"no protobuf"])
def test_a_graph_that_openvino_does_not_take_is_a_load_error(bert: Path, content: bytes) -> None:
    with pytest.raises(LoadError, match=f"{bert}: OpenVINO does not take the graph"):
        OpenVinoBackend(read_spec(bert), Graph(content, tiny.graph_of("bert").weights), Weights.open(bert))


def test_bfloat16_is_refused_where_the_processor_lacks_it(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Older(ov.Core):  # type: ignore[misc]
        def get_property(self, *_: object) -> list[str]:
            return ["FP32", "INT8"]

    monkeypatch.setattr(ov, "Core", Older)
    with pytest.raises(LoadError, match=rf"{bert}: this processor does not compute in bfloat16.*FP32, INT8"):
        openvino(read_spec(bert), dtype="bfloat16")
    openvino(read_spec(bert)).close()


@ABLE_ONLY
def test_another_precision_than_the_one_asked_for_is_a_load_error(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stubborn(ov.Core):  # type: ignore[misc]
        def compile_model(self, model: Any, device: str, settings: dict[str, Any]) -> Any:
            return super().compile_model(model, device, {**settings, "INFERENCE_PRECISION_HINT": "f32"})

    monkeypatch.setattr(ov, "Core", Stubborn)
    with pytest.raises(LoadError, match=f"{bert}: OpenVINO computes in f32, not in bf16"):
        openvino(read_spec(bert), dtype="bfloat16")


@pytest.mark.xfail(strict=False, reason="part 6: OpenVINO refuses to release memory while a pass runs, unless it just ended")
def test_memory_is_freed_beside_passes(hybrid: Path) -> None:
    """What is freed between two passes is no error of a pass, nor of the thread that frees it."""
    backend, over = openvino(read_spec(hybrid)), threading.Event()
    encodings = random_encodings(backend.spec, [5, 40, 64, 9])

    def passes() -> None:
        while not over.is_set():
            run(backend, encodings)

    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(passes) for _ in range(2)]
        try:
            for _ in range(200):
                backend.free_unused()
        finally:
            over.set()
        for one in running:
            one.result()
