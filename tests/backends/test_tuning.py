"""The curve of tokens a second against the size of a pass: when it ends, which size it names, what is remembered."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.backends import tuning
from hybridtei.backends.fake import FakeBackend
from hybridtei.backends.tuning import FIRST_TOKENS, FLAT, Curve, Point, measure
from hybridtei.batch import PackedBatch
from hybridtei.system.machine import LaneKind, both_lanes
from tests.engine import small

curves = st.lists(st.floats(0.1, 1e6), min_size=1, max_size=10).map(
    lambda rates: Curve([Point(FIRST_TOKENS * 2**i, rate) for i, rate in enumerate(rates)])
)


class Hardware:
    """A clock that the passes move on: a fixed cost, and one for each token beyond what fits the fixed cost."""

    def __init__(self, saturated_at: int) -> None:
        self.now = 0.0
        self.saturated_at = saturated_at
        self.sizes: list[int] = []

    def __call__(self, batch: PackedBatch) -> None:
        self.sizes.append(len(batch.input_ids))
        self.now += max(len(batch.input_ids), self.saturated_at) * 0.001

    def clock(self) -> float:
        return self.now


@given(curves)
def test_the_budget_is_the_smallest_size_that_is_about_as_fast_as_any(curve: Curve) -> None:
    chosen = next(point for point in curve.points if point.tokens == curve.budget())
    assert chosen.tokens_per_s >= FLAT * curve.best_rate
    assert all(point.tokens_per_s < FLAT * curve.best_rate for point in curve.points if point.tokens < chosen.tokens)


def test_nothing_measured_names_no_budget() -> None:
    assert Curve([]).budget() is None
    assert Curve([]).best_rate == 0


@pytest.mark.parametrize("saturated_at", [64, 256, 2048])
def test_the_size_that_saturates_the_hardware_is_found_and_no_much_larger_one_tried(saturated_at: int) -> None:
    hardware = Hardware(saturated_at)
    backend = FakeBackend(small.model_spec(), gate=hardware)
    curve = Curve(list(measure(backend, 16384, clock=hardware.clock)))
    assert curve.budget() == saturated_at
    assert max(hardware.sizes) <= 4 * saturated_at


def test_the_cap_and_the_limit_end_it() -> None:
    hardware = Hardware(100_000)
    backend = FakeBackend(small.model_spec(), gate=hardware)
    assert [point.tokens for point in measure(backend, 256, clock=hardware.clock)] == [64, 128, 256]
    assert len(list(measure(backend, 16384, limit_seconds=1.0, clock=hardware.clock))) == 1
    assert len(list(measure(backend, 3, clock=hardware.clock))) == 1


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HYBRIDTEI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_measurement_is_remembered_for_what_it_was_made_with(cache: Path) -> None:
    spec = small.model_spec(config={"model_type": "bert", "hidden_size": 16})
    other = small.model_spec(config={"model_type": "bert", "hidden_size": 32})
    curve = Curve([Point(64, 10.0), Point(128, 20.0)])
    assert tuning.remembered("ort", "float32", spec) is None
    tuning.remember(curve, "ort", "float32", spec)
    assert tuning.remembered("ort", "float32", spec) == curve
    assert tuning.remembered("ort", "float32", spec, threads=2) is None
    assert tuning.remembered("ort", "int8", spec) is None
    assert tuning.remembered("ort", "float32", other) is None


def test_a_damaged_memory_or_no_place_for_it_is_no_error(cache: Path) -> None:
    spec = small.model_spec()
    tuning.remember(Curve([Point(64, 1.0)]), "ort", "float32", spec)
    (file,) = cache.iterdir()
    file.write_text("{")
    assert tuning.remembered("ort", "float32", spec) is None
    file.unlink()
    cache.rmdir()
    cache.write_text("a file where the folder should be")
    tuning.remember(Curve([Point(64, 1.0)]), "ort", "float32", spec)
    assert tuning.remembered("ort", "float32", spec) is None


def test_what_other_programs_take_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of one thread that is interrupted for nine tenths of the time."""
    computing, elapsed = Hardware(1), Hardware(1)
    monkeypatch.setattr(tuning, "process_time", computing.clock)
    monkeypatch.setattr(tuning, "perf_counter", lambda: 10 * elapsed.clock())

    def gate(batch: PackedBatch) -> None:
        computing(batch)
        elapsed(batch)

    backend = FakeBackend(small.model_spec(), gate=gate)
    for backend.lanes, backend.fills_cores, rate in (
        (both_lanes(1), False, 1000),
        ((LaneKind.BULK,), False, 100),
        (both_lanes(1), True, 100),
    ):
        assert [point.tokens_per_s for point in measure(backend, 256)] == pytest.approx([rate] * 3)
