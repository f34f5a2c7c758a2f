"""A GPU that fails, played by the trunk: memory that runs out, a kernel that breaks, a device that
is gone. What is around it is real: the backend, the engine, its lanes."""

import gc
import weakref

import numpy as np
import pytest
import torch

from conformance.small import tolerances
from hybridtei.batch import Head, pack
from hybridtei.config import EngineConfig
from hybridtei.errors import BackendError, PartlyFailed, Unhealthy
from hybridtei.inference.backends.torch.backend import TorchBackend
from hybridtei.inference.backends.torch.memory import is_out_of_memory
from hybridtei.inference.engine.service import EngineService
from hybridtei.inference.tasks.embed import Embed
from hybridtei.models.checkpoint.spec import read_spec
from hybridtei.system.machine import LaneKind
from tests.inference.backends.outputs import on_gpu, random_encodings, same
from tests.inference.engine import small
from tests.near import near

DENSE = frozenset({Head.DENSE})


class Failing:
    """A trunk with room for `tokens`; it raises `error` where that was set. Everything else is the
    real one's."""

    def __init__(self, trunk, tokens=10**9):
        self._trunk = trunk
        self.tokens = tokens
        self.error = None
        self.held = []

    def __getattr__(self, name):
        return getattr(self._trunk, name)

    def __call__(self, batch, *others):
        if self.error is not None:
            raise self.error
        hidden = self._trunk(batch, *others)
        if len(batch.input_ids) > self.tokens:
            self.held.append(weakref.ref(hidden))
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {len(batch.input_ids)} MiB.\nMore of it"
            )
        return hidden


@pytest.fixture
def backend(hybrid):
    backend = TorchBackend(read_spec(hybrid))
    backend._trunk = Failing(backend._trunk)
    return backend


def batch(backend, lengths):
    return pack(random_encodings(backend.spec, lengths), backend.spec.heads, backend.spec.positions)


def test_short_memory_costs_passes_and_no_answer(backend):
    lengths = [9, 30, 4, 17, 22, 6]
    expected = backend.forward(batch(backend, lengths))
    backend._trunk.tokens = 40
    found = backend.forward(batch(backend, lengths))
    same(found, expected, len(lengths))


def test_what_a_refused_pass_had_allocated_is_gone_before_the_next(backend):
    backend._trunk.tokens = 40
    alive = []
    backend.make_room = lambda: alive.append(
        sum(held() is not None for held in backend._trunk.held)
    )
    # Nothing may wait for the collector
    gc.disable()
    try:
        backend.forward(batch(backend, [30, 30, 30]))
    finally:
        gc.enable()
    assert alive
    assert not any(alive)


def test_a_sequence_that_does_not_fit_is_named_with_its_length(backend):
    backend._trunk.tokens = 40
    with pytest.raises(
        PartlyFailed, match="a sequence of 70 tokens does not fit into memory: CUDA out of memory"
    ) as caught:
        backend.forward(batch(backend, [10, 70, 20]))
    assert caught.value.rows == [0, 2]
    assert "More of it" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "short"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `x`"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), False),
    ],
)
def test_which_errors_are_for_want_of_memory(error, short):
    assert is_out_of_memory(error) is short


def ids(backend, length, seed):
    return np.random.default_rng(seed).integers(5, backend.spec.vocab_size, length).tolist()


async def test_a_server_whose_device_is_lost_says_so_and_is_unhealthy(backend, monkeypatch, caplog):
    service = EngineService(
        small.model(backend.spec), backend, EngineConfig(tokenization_workers=1), budget_tokens=400
    )
    await service.start()
    await service.run(Embed([ids(backend, 9, 0)], DENSE))
    monkeypatch.setattr(backend, "answers", lambda: False)
    backend._trunk.error = RuntimeError("CUDA error: device-side assert triggered")
    with pytest.raises(
        BackendError, match="the engine stopped: cpu does not answer any more; a restart is needed"
    ):
        await service.run(Embed([ids(backend, 9, 1)], DENSE))
    with pytest.raises(Unhealthy):
        await service.check_health()
    await service.stop()
    assert "a lane died" in caplog.text


@on_gpu
def test_on_a_gpu_a_pass_of_all_that_fits_fits(hybrid):
    backend = TorchBackend(read_spec(hybrid), dtype="float16", device="cuda")
    assert (backend.lanes, backend.ahead) == ((LaneKind.BULK,), 1)
    most = backend.max_tokens(100_000, 64, 0.5)
    assert backend.forward(batch(backend, [64] * (most // 64))).dense is not None


@on_gpu
def test_on_a_gpu_a_batch_beyond_its_memory_is_computed_in_halves(hybrid):
    spec = read_spec(hybrid)
    backend, roomy = (TorchBackend(spec, dtype="float16", device="cuda") for _ in range(2))
    asked = batch(backend, [64] * 4096)
    expected, before = roomy.forward(asked), backend.forwards
    roomy.close()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + (16 << 20)) / total)
    try:
        found = backend.forward(asked)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert backend.forwards > before + 1
    near(found.dense, expected.dense, tolerances.WEIGHTS["float16"])


@on_gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_gpu_computes_what_the_cpu_does(hybrid, dtype):
    spec = read_spec(hybrid)
    exact, there = TorchBackend(spec), TorchBackend(spec, dtype=dtype, device="cuda")
    asked = batch(exact, [9, 30, 4, 17, 22, 6] * 3)
    ours, theirs = there.forward(asked), exact.forward(asked)
    near(ours.dense, theirs.dense, tolerances.WEIGHTS[dtype])
    near(ours.tokens.values, theirs.tokens.values, tolerances.HIDDEN[dtype])
