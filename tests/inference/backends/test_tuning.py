"""`hybridtei tune`: the curve of tokens a second against the size of a pass, and the flags it
names."""

import threading
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.small.fake_backend import FakeBackend
from hybridtei.config import EngineConfig, ModelConfig
from hybridtei.inference.backends.tuning import FIRST_TOKENS, FLAT, PASSES, enough, measure, tune
from hybridtei.inference.load import find_model, load_model
from hybridtei.system.machine import LaneKind, both_lanes
from tests.inference.engine import small

curves = st.lists(st.floats(0.1, 1e6), min_size=1, max_size=10).map(
    lambda rates: {FIRST_TOKENS * 2**i: rate for i, rate in enumerate(rates)}
)


class Hardware:
    """A clock that the passes move on: a fixed cost, and one for each token beyond what fits the
    fixed cost."""

    def __init__(self, saturated_at):
        self.now = 0.0
        self.saturated_at = saturated_at

    def __call__(self, batch):
        self.now += max(len(batch.input_ids), self.saturated_at) * 0.001

    def clock(self):
        return self.now


@given(curves)
def test_enough_is_the_smallest_size_that_is_about_as_fast_as_any(rates):
    chosen, best = enough(rates), max(rates.values())
    assert rates[chosen] >= FLAT * best
    assert all(rate < FLAT * best for tokens, rate in rates.items() if tokens < chosen)


@pytest.mark.parametrize("saturated_at", [64, 256, 2048])
def test_the_size_that_saturates_the_hardware_is_found(saturated_at):
    hardware = Hardware(saturated_at)
    backend = FakeBackend(small.model_spec(), gate=hardware)
    assert enough(dict(measure(backend, 4096, clock=hardware.clock))) == saturated_at


def test_the_fastest_pass_of_a_size_counts():
    now, seconds = 0.0, iter([3, 1, 2, 0.5, 4])

    def gate(batch):
        nonlocal now
        now += next(seconds)

    ((_, rate),) = measure(FakeBackend(small.model_spec(), gate=gate), 64, clock=lambda: now)
    assert rate == pytest.approx(64 / 0.5)
    assert not [*seconds]
    assert PASSES == 5


def test_a_lane_is_measured_and_counts_as_often_as_there_are_lanes_for_long_texts():
    entered, threads, hardware = [], set(), Hardware(1)

    def gate(batch):
        hardware(batch)
        threads.add(threading.get_ident())

    backend = FakeBackend(small.model_spec(), gate=gate)
    backend.enter_lane = lambda kind: entered.append(threading.get_ident())
    for backend.lanes, expected in (
        (both_lanes(1), 1000),
        ((LaneKind.BULK,), 1000),
        (both_lanes(3), 3000),
    ):
        assert [rate for _, rate in measure(backend, 256, clock=hardware.clock)] == pytest.approx(
            [expected] * 3
        )
    assert threads == {*entered}
    assert threading.get_ident() not in threads


def test_a_table_and_the_flags_are_printed_and_nothing_is_kept(bert, cache):
    config, engine = (
        ModelConfig(model_id=str(bert), dtype="float32"),
        EngineConfig(max_batch_tokens=128),
    )
    lines = [*tune(config, find_model(config), engine)]
    titles = [line.split()[0] for line in lines if line.endswith(":") and "one lane times" in line]
    assert titles == ["ort", "openvino", "torch"]
    assert sum("tokens a pass" in line for line in lines) == 2 * len(titles)
    assert sum("a pass of the server takes up to 128" in line for line in lines) == len(titles)
    flags = lines[-len(titles) :]
    assert {" ".join(line.split()[:4]) for line in flags} == {
        f"--backend {name} --dtype float32" for name in titles
    }
    rates = [float(line.split()[4]) for line in flags]
    assert all(one >= other for one, other in pairwise(rates))
    assert not cache.exists()


def test_what_cannot_run_says_why_and_names_no_flags(bert):
    config = ModelConfig(model_id=str(bert), backend="torch", dtype="int8")
    assert [*tune(config, find_model(config), EngineConfig())] == []
    config = ModelConfig(model_id=str(bert), dtype="fp8")
    (line,) = tune(config, find_model(config), EngineConfig())
    assert line.startswith("torch fp8: no, ")


def test_a_start_measures_nothing_and_keeps_nothing(bert, cache):
    """Its passes are those of the self-test."""
    loaded = load_model(ModelConfig(model_id=str(bert), backend="ort"), EngineConfig())
    assert loaded.backend.forwards == 2
    assert loaded.budget_tokens == loaded.backend.busy_tokens
    assert not cache.exists()
    few = load_model(
        ModelConfig(model_id=str(bert), backend="ort"),
        EngineConfig(max_batch_tokens=64, auto_truncate=True),
    )
    assert few.budget_tokens == 64
