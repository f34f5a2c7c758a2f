"""How many tokens a pass gets; several backends as one: the least loaded takes the next batch, and a lost one takes none."""

import asyncio
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.batch import Encoding, Head, PackedBatch, Padding, pack
from hybridtei.config import EngineConfig
from hybridtei.errors import BackendError, DeviceLost
from hybridtei.inference.backends.base import FEWEST, MOST, Replicas, busy_tokens
from hybridtei.inference.backends.torch.backend import TorchBackend
from hybridtei.inference.engine.service import EngineService
from hybridtei.inference.tasks.embed import Embed
from hybridtei.models.checkpoint.spec import read_spec
from hybridtei.system.machine import LaneKind
from tests import tolerances
from tests.fake_backend import FakeBackend, Held
from tests.inference.engine import small

SPEC = small.model_spec()
DENSE = frozenset({Head.DENSE})
HANG = 30


def batch(tokens: int) -> PackedBatch:
    return pack([Encoding(np.arange(tokens, dtype=np.int64))], DENSE, SPEC.positions)


@pytest.mark.parametrize(
    ("width", "tokens"), [(32, 512), (384, 512), (512, 512), (768, 256), (1024, 256), (2048, 128)]
)
def test_a_core_is_given_the_tokens_that_the_table_asks_for(width: int, tokens: int) -> None:
    assert busy_tokens(width) == tokens
    assert busy_tokens(width, cores=4) == 4 * tokens
    assert busy_tokens(width, most=256) == min(tokens, 256)


@given(st.integers(0, 200_000))
def test_wider_models_are_given_fewer_tokens_within_bounds(width: int) -> None:
    assert FEWEST <= busy_tokens(width + 1) <= busy_tokens(width) <= MOST
    assert busy_tokens(width).bit_count() == 1


def test_the_replica_with_the_fewest_tokens_under_way_is_next() -> None:
    gates = [Held(), Held()]
    backend = Replicas([FakeBackend(SPEC, gate=gate) for gate in gates])
    threads = [
        threading.Thread(target=backend.forward, args=(batch(tokens),))
        for tokens in (40, 10, 10, 10)
    ]
    for thread, expected in zip(
        threads, (0, 1, 1, 1), strict=True
    ):  # 40 there; then 10, 20, 30 here
        thread.start()
        assert gates[expected].entered.acquire(timeout=HANG)
    assert [replica.running for replica in backend.replicas] == [40, 30]
    for gate in gates:
        gate.open()
    for thread in threads:
        thread.join(HANG)
    assert [replica.running for replica in backend.replicas] == [0, 0]
    assert backend.forwards == 4


def test_idle_replicas_take_turns_by_tokens() -> None:
    backend = Replicas([FakeBackend(SPEC) for _ in range(3)])
    for tokens in (30, 10, 10, 10, 10):
        backend.forward(batch(tokens))
    assert [replica.served for replica in backend.replicas] == [30, 20, 20]


def test_the_whole_has_the_lanes_of_all_and_looks_like_one() -> None:
    backend = Replicas([FakeBackend(SPEC, lanes=1), FakeBackend(SPEC, lanes=2)])
    assert backend.lanes == (LaneKind.BULK,) * 3
    assert (backend.name, backend.dtype, backend.padding, backend.spec) == (
        "fake",
        "float32",
        Padding.NONE,
        SPEC,
    )


def test_a_batch_that_fails_takes_no_load_with_it() -> None:
    backend = Replicas([FakeBackend(SPEC, fail_on=7), FakeBackend(SPEC, fail_on=7)])
    with pytest.raises(BackendError):
        backend.forward(batch(10))
    assert [replica.running for replica in backend.replicas] == [0, 0]


def test_a_lost_device_is_left_out_and_the_last_one_ends_it() -> None:
    def lose(_: PackedBatch) -> None:
        raise DeviceLost("cuda:0 does not answer any more")

    backend = Replicas([FakeBackend(SPEC, gate=lose), FakeBackend(SPEC)])
    with pytest.raises(BackendError, match="cuda:0 does not answer any more") as caught:
        backend.forward(batch(10))
    assert not isinstance(caught.value, DeviceLost)  # the others serve on
    for _ in range(5):
        assert backend.forward(batch(10)).dense is not None
    backend.replicas[1].backend = FakeBackend(SPEC, gate=lose)
    for _ in range(2):
        with pytest.raises(DeviceLost):
            backend.forward(batch(10))


class Card(FakeBackend):
    def __init__(self, room: int, device: str) -> None:
        super().__init__(SPEC)
        self.room, self.device = room, device

    def max_tokens(self, limit: int, longest: int, fraction: float, sharing: int = 1) -> int:
        return min(limit, int(self.room * fraction) // sharing)


def test_the_smallest_memory_bounds_the_pass_and_replicas_on_one_device_share_it() -> None:
    assert (
        Replicas([Card(9000, "a"), Card(5000, "b"), Card(7000, "c")]).max_tokens(8000, 10, 0.5)
        == 2500
    )
    assert (
        Replicas([Card(9000, "a"), Card(9000, "a"), Card(9000, "b")]).max_tokens(8000, 10, 0.5)
        == 2250
    )
    assert Replicas([FakeBackend(SPEC)]).max_tokens(8000, 10, 0.5) == 8000


async def test_two_of_torch_serve_one_queue(bert: Path) -> None:
    """A real engine over two real copies of a model: every answer is right, and both have worked."""
    spec = read_spec(bert)
    alone = TorchBackend(spec)
    backend = Replicas([TorchBackend(spec), TorchBackend(spec)])
    draw = np.random.default_rng(0)
    texts = [
        draw.integers(5, spec.vocab_size, int(length)).tolist()
        for length in draw.integers(2, 40, 60)
    ]
    model = small.model(spec)
    service = EngineService(model, backend, EngineConfig(tokenization_workers=1), budget_tokens=64)
    await service.start()
    answers = await asyncio.gather(
        *[service.run(Embed([ids], DENSE, normalize=False)) for ids in texts]
    )
    await service.stop()
    found = np.concatenate([one.answer.dense for one in answers])
    for ids, row in zip(texts, found, strict=True):
        prepared = Embed([ids], DENSE, normalize=False).prepare(model)
        expected = alone.forward(pack(prepared, DENSE, spec.positions)).dense
        np.testing.assert_allclose(row, expected[0], atol=tolerances.WEIGHTS["float32"], rtol=0)
    assert all(replica.served for replica in backend.replicas)
