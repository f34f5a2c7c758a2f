"""How many permits a server has."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.small.fake_backend import FakeBackend
from hybridtei.batch import Encoding, Head, Positions
from hybridtei.inference.engine.chunks import permits_for
from hybridtei.inference.engine.core import EngineCore
from tests.inference.engine import small


@pytest.mark.parametrize(
    ("budget", "length"),
    [(16384, 16), (16384, 50), (16384, 512), (4096, 16), (65536, 50), (512, 333)],
)
def test_on_a_gpu_permits_of_short_texts_fill_every_pass_under_way(budget, length):
    """And the core, asked for one pass after the other, finds that many in what waits."""
    backend = FakeBackend(small.model_spec())
    backend.ahead = 1
    permits = permits_for(512, backend, budget)
    core = EngineCore(max_tokens=budget, positions=Positions())
    core.add(
        [Encoding(np.full(length, number)) for number in range(permits)], frozenset({Head.DENSE})
    )
    passes = [core.take(device_idle=False) for _ in range(len(backend.lanes) + backend.ahead)]
    assert all(batch is not None and budget - length < batch.tokens <= budget for batch in passes)


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_on_a_cpu_permits_do_not_follow_the_budget(permits, budget):
    assert permits_for(permits, FakeBackend(small.model_spec()), budget) == permits
