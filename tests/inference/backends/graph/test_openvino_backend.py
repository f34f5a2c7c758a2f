"""OpenVINO: bfloat16 against torch in float32, models that are compiled once, whose priority, what
it refuses. Laws of all backends: tests/inference/backends/test_laws.py."""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("openvino", reason="the openvino extra is not installed")

import openvino as ov

from conformance.families.oracle import open_engine
from conformance.small import tiny
from hybridtei.batch import Encoding, Head
from hybridtei.errors import BackendError, LoadError
from hybridtei.inference.backends.graph import openvino_backend
from hybridtei.inference.backends.graph.openvino_backend import OpenVinoBackend
from hybridtei.inference.backends.graph.writer import Graph
from hybridtei.inference.backends.torch.backend import TorchBackend
from hybridtei.models.checkpoint.spec import read_spec
from hybridtei.models.checkpoint.weights import Weights
from hybridtei.system.machine import LaneKind
from tests.inference.backends.outputs import random_encodings, run, same, sixty_four
from tests.precisions import openvino_has_bfloat16
from tests.ran import ran
from tests.sampled import sampled

ABLE = openvino_has_bfloat16()
ABLE_ONLY = pytest.mark.skipif(not ABLE, reason="this processor has no bfloat16")
DTYPES = ["float32", "bfloat16"] if ABLE else ["float32"]
ON_LINUX = pytest.mark.skipif(
    sys.platform != "linux", reason="only there has each thread a priority of its own"
)


def openvino(spec, **settings):
    return OpenVinoBackend(
        spec, tiny.graph_of(spec.model_type), Weights.open(spec.folder), **settings
    )


@pytest.fixture(scope="module")
def m3_backend(m3):
    return openvino(read_spec(m3))


@pytest.fixture(scope="module", params=DTYPES)
def hybrid_backend(request, hybrid):
    return openvino(read_spec(hybrid), dtype=request.param)


# --- precision


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_trunk_computes_in_the_precision_asked_for(bert, dtype):
    spec = read_spec(bert)
    models = openvino(spec, dtype=dtype)._models
    for model in (models._all_cores, models._express, models._bulk):
        run_time = [operation.rt_info for operation in model._model.get_runtime_model().get_ops()]
        used = {
            of["runtimePrecision"].astype(str)
            for of in run_time
            if of["layerType"].astype(str) == "FullyConnected"
        }
        assert used == {{"float32": "f32", "bfloat16": "bf16"}[dtype]}


# --- laws


def test_threads_of_one_pass_change_nothing(m3_backend):
    texts = sixty_four(m3_backend.spec.vocab_size)
    team = openvino(m3_backend.spec, threads=2)
    assert team.lanes == (LaneKind.BULK,)
    same(run(team, texts), run(m3_backend, texts), len(texts))


def test_a_model_of_large_matrices_is_compiled_once(hybrid, hybrid_backend, monkeypatch):
    assert len({id(model) for model in vars(hybrid_backend._models).values()}) > 1
    monkeypatch.setattr("hybridtei.inference.backends.graph.openvino_backend.LARGE_BYTES", 1000)
    texts = sixty_four(hybrid_backend.spec.vocab_size)
    team = openvino(read_spec(hybrid), dtype=hybrid_backend.dtype)
    assert team.lanes == (LaneKind.BULK,)
    assert len({id(model) for model in vars(team._models).values()}) == 1
    same(run(team, texts), run(hybrid_backend, texts), len(texts), hybrid_backend.dtype)
    with ThreadPoolExecutor(4) as pool:
        alone = list(pool.map(lambda text: run(team, [text], use_all_cores=True), texts))
    for text, outputs in zip(texts, alone, strict=True):
        same(outputs, run(hybrid_backend, [text]), 1, hybrid_backend.dtype)


def test_what_went_in_is_not_touched_by_any_pass(m3_backend):
    """Lent inputs are: a pass of another request, on ids of the same shape, writes over them."""
    model = m3_backend._models._express
    shapes = {name: (3, 7) if name == "seen" else (21,) for name in model.inputs}
    feeds = [
        {name: np.full(shape, value, dtype=np.int64) for name, shape in shapes.items()}
        for value in (1, 5)
    ]
    for feed in feeds * 3:
        model.run(feed)
        # Others come and go
        model._idle.insert(0, model._model.create_infer_request())
    for feed, value in zip(feeds, (1, 5), strict=True):
        assert all((array == value).all() for array in feed.values())


@pytest.mark.parametrize(
    ("least", "parts", "waste"), [(1, 8, 1.25), (8, 16, 1.125), (8, 32, 1.0625)]
)
def test_sizes_grow_a_little_to_one_of_few(least, parts, waste):
    sizes = [openvino_backend.grown(size, least, parts) for size in range(1, 1025)]
    assert all(size <= larger < size * waste + least for size, larger in enumerate(sizes, 1))
    assert sizes == sorted(sizes)
    assert len(set(sizes)) <= 85


def test_texts_as_long_as_the_table_of_positions_run(tmp_path):
    spec = read_spec(tiny.write_bert(tmp_path, max_position_embeddings=27))
    backend = open_engine("openvino", spec)
    texts = [Encoding(np.full(length, 7)) for length in (25, 26, 27)]
    same(run(backend, texts), run(TorchBackend(spec), texts), len(texts))


# --- priority


@ON_LINUX
@pytest.mark.parametrize("kind", sampled([LaneKind.BULK, LaneKind.EXPRESS], [LaneKind.EXPRESS]))
def test_each_kind_of_lane_computes_at_its_own_priority(hybrid, kind):
    """Also after other models were closed, whose idle threads OpenVINO keeps for the next one that
    is compiled alike."""
    # Or the threads would end with the last model
    keeper = ov.Core()
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    lower = min(ours + 7, 19)
    for other in (0, lower):
        openvino(read_spec(hybrid), bulk_niceness=other).close()
    backend = openvino(read_spec(hybrid), bulk_niceness=lower)
    texts = sixty_four(backend.spec.vocab_size)
    own = set()

    def lane():
        own.add(threading.get_native_id())
        backend.enter_lane(kind)
        run(backend, texts, frozenset({Head.TOKENS}))

    before = cpu_ticks()
    with ThreadPoolExecutor(1) as pool:
        # However fast it is: until one thread has computed enough to tell
        for _ in range(1000):
            pool.submit(lane).result()
            ticks = {thread: spent - before.get(thread, 0) for thread, spent in cpu_ticks().items()}
            busiest = max(ticks.keys() - own, key=lambda thread: ticks[thread])
            if ticks[busiest] > 5:
                break
        assert ticks[busiest] > 5
        assert os.getpriority(os.PRIO_PROCESS, busiest) == (
            lower if kind is LaneKind.BULK else ours
        )
    del keeper


def cpu_ticks():
    """Processor time that each thread of this process has had."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            fields = (task / "stat").read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            # Of a test before, which has just ended
            continue
        found[int(task.name)] = int(fields[11]) + int(fields[12])
    return found


def test_importing_it_does_not_bring_telemetry(tmp_path):
    program = "import hybridtei.inference.backends.graph.openvino_backend, sys; print(sys.modules['openvino_telemetry'])"
    environment = {
        **os.environ,
        "HOME": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path),
    }
    done = ran([sys.executable, "-c", program], env=environment, check=True)
    assert done.stdout.strip() == "None"
    assert not [
        path
        for path in tmp_path.rglob("*")
        if "intel" in path.name.lower() or "openvino" in path.name.lower()
    ]


WRONG = [
    Encoding(np.array([2, 10_000, 3])),
    Encoding(np.array([2, -1, 3])),
    Encoding(np.array([5] * 1000)),
    Encoding(np.array([2, 9, 3]), np.array([0, 0, 2])),
]


@pytest.mark.parametrize("wrong", WRONG, ids=["id", "negative", "position", "type"])
def test_numbers_beyond_a_table_are_refused(hybrid_backend, wrong):
    """OpenVINO itself would answer, with whatever lies beyond the table."""
    with pytest.raises(BackendError, match=r"forward pass failed.*in a table of"):
        run(hybrid_backend, [wrong])


def test_a_closed_backend_fails_and_says_so(hybrid):
    backend = openvino(read_spec(hybrid))
    run(backend, [Encoding(np.array([0, 7, 2]))])
    backend.close()
    with pytest.raises(BackendError, match="forward pass failed"):
        run(backend, [Encoding(np.array([0, 7, 2]))])


# --- graphs, weights and processors that do not fit


@pytest.mark.parametrize("content", [b"", b"no protobuf"])
def test_a_graph_that_openvino_does_not_take_is_a_load_error(bert, content):
    with pytest.raises(LoadError, match=f"{bert}: OpenVINO refuses the graph"):
        OpenVinoBackend(
            read_spec(bert), Graph(content, tiny.graph_of("bert").weights), Weights.open(bert)
        )


def test_bfloat16_is_refused_where_the_processor_lacks_it(bert, monkeypatch):
    class Older(ov.Core):
        def get_property(self, *_):
            return ["FP32", "INT8"]

    monkeypatch.setattr(ov, "Core", Older)
    with pytest.raises(
        LoadError, match=rf"{bert}: this processor does not compute in bfloat16.*FP32, INT8"
    ):
        openvino(read_spec(bert), dtype="bfloat16")
    openvino(read_spec(bert)).close()


@ABLE_ONLY
def test_another_precision_than_the_one_asked_for_is_a_load_error(bert, monkeypatch):
    class Stubborn(ov.Core):
        def compile_model(self, model, device, settings):
            return super().compile_model(
                model, device, {**settings, "INFERENCE_PRECISION_HINT": "f32"}
            )

    monkeypatch.setattr(ov, "Core", Stubborn)
    with pytest.raises(LoadError, match=f"{bert}: OpenVINO computes in f32, not in bf16"):
        openvino(read_spec(bert), dtype="bfloat16")


def test_memory_is_freed_beside_passes(hybrid):
    """What is freed between two passes is no error of a pass, nor of the thread that frees it."""
    backend, over = openvino(read_spec(hybrid)), threading.Event()
    encodings = random_encodings(backend.spec, [5, 40, 64, 9])

    def passes():
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
