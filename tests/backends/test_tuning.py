"""The curve of tokens a second against the size of a pass: when it ends, which size it names, what is remembered."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.backends import tuning
from hybridtei.backends.fake import FakeBackend
from hybridtei.backends.tuning import AGREEMENT, FIRST_TOKENS, FLAT, MAX_BUSY, MAX_PASSES, PASSES, Curve, Point, measure
from hybridtei.batch import PackedBatch
from hybridtei.system import machine
from hybridtei.system.machine import STAT, LaneKind, OtherPrograms, both_lanes
from tests.engine import small

curves = st.lists(st.floats(0.1, 1e6), min_size=1, max_size=10).map(
    lambda rates: Curve([Point(FIRST_TOKENS * 2**i, rate, 0.0) for i, rate in enumerate(rates)])
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
    curve = Curve([Point(64, 10.0, 0.0), Point(128, 20.0, AGREEMENT)])
    assert tuning.remembered("ort", "float32", spec) is None
    tuning.remember(curve, "ort", "float32", spec)
    assert tuning.remembered("ort", "float32", spec) == curve
    assert tuning.remembered("ort", "float32", spec, threads=2) is None
    assert tuning.remembered("ort", "int8", spec) is None
    assert tuning.remembered("ort", "float32", other) is None


def test_what_is_in_doubt_is_not_kept(cache: Path) -> None:
    spec, sure, wide = small.model_spec(), Point(64, 10.0, 0.0), Point(128, 20.0, 2 * AGREEMENT)
    for curve in (Curve([sure], busy=MAX_BUSY + 0.01), Curve([wide]), Curve([sure, wide, wide])):
        assert curve.doubt is not None
        tuning.remember(curve, "ort", "float32", spec)
        assert tuning.remembered("ort", "float32", spec) is None
    assert Curve([sure, wide], busy=MAX_BUSY).doubt is None


def test_what_an_earlier_version_kept_is_measured_anew(cache: Path) -> None:
    spec = small.model_spec()
    tuning.remember(Curve([Point(64, 1.0, 0.0)]), "ort", "float32", spec)
    (file,) = cache.iterdir()
    file.write_text('[{"tokens": 64, "tokens_per_s": 1.0}]')
    assert tuning.remembered("ort", "float32", spec) is None


@pytest.mark.parametrize(
    ("seconds", "passes", "spread"),
    [([1, 1, 1], 3, 0), ([3, 1, 2, 1.05], 4, 0.05), ([1, 2, 3, 4, 5, 6], 6, 1), ([8, 9, 4, 4.2], 4, 0.05)],
)
def test_a_size_is_measured_until_its_two_fastest_passes_agree(seconds: list[float], passes: int, spread: float) -> None:
    now, durations = 0.0, iter(seconds)

    def gate(batch: PackedBatch) -> None:
        nonlocal now
        now += next(durations)

    backend = FakeBackend(small.model_spec(), gate=gate)
    (point,) = measure(backend, 64, clock=lambda: now)
    assert point.spread == pytest.approx(spread)
    assert len([*durations]) == len(seconds) - passes
    assert (PASSES, MAX_PASSES) == (3, 6)


BUSY = """
import os, subprocess, sys, time
core = sorted(os.sched_getaffinity(0))[-1]
os.sched_setaffinity(0, {core})
from hybridtei.backends import tuning
from hybridtei.backends.fake import FakeBackend
from hybridtei.config import EngineConfig
from hybridtei.load import _budget
from tests.engine import small
backend = FakeBackend(small.model_spec(), gate=lambda batch: time.sleep(0.05))
loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
try:
    time.sleep(0.2)
    budget = _budget(backend, 256)
finally:
    loop.kill()
assert budget == min(256, backend.busy_tokens), budget
assert tuning.remembered(backend.name, backend.dtype, backend.spec) is None
"""


@pytest.mark.skipif(not STAT.exists(), reason="the system does not say what other programs take")
def test_beside_a_busy_loop_a_start_keeps_no_measurement(cache: Path) -> None:
    done = subprocess.run([sys.executable, "-c", BUSY], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not cache.exists()


def test_processors_that_this_process_may_not_use_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: {1, 2})
    monkeypatch.setattr(machine, "available_cores", lambda: 2)
    now, stat = 100.0, tmp_path / "stat"
    monkeypatch.setattr(machine.time, "monotonic", lambda: now)
    monkeypatch.setattr(machine.time, "process_time", lambda: now / 2)
    tick = os.sysconf("SC_CLK_TCK")

    def write(busy: int, stolen: int) -> None:
        lines = [
            "cpu 1 2 3",
            f"cpu0 {9 * busy} 0 0 0 0 0 0 0 0 0",
            f"cpu1 {busy} 0 0 77 5 0 0 {stolen} 0 0",
            "cpu2 0 0 0 9 9 0 0 0 0 0",
        ]
        stat.write_text("\n".join(lines))

    write(0, 0)
    others = OtherPrograms(stat)
    now = 110.0
    write(10 * tick, 4 * tick)  # ten seconds, of which five were ours, and four that the host took
    assert others.share() == pytest.approx((10 - 5 + 4) / 10 / 2)
    assert OtherPrograms(tmp_path / "none").share() == 0


def test_a_damaged_memory_or_no_place_for_it_is_no_error(cache: Path) -> None:
    spec = small.model_spec()
    tuning.remember(Curve([Point(64, 1.0, 0.0)]), "ort", "float32", spec)
    (file,) = cache.iterdir()
    file.write_text("{")
    assert tuning.remembered("ort", "float32", spec) is None
    file.unlink()
    cache.rmdir()
    cache.write_text("a file where the folder should be")
    tuning.remember(Curve([Point(64, 1.0, 0.0)]), "ort", "float32", spec)
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
        (both_lanes(3), False, 3000),
    ):
        assert [point.tokens_per_s for point in measure(backend, 256)] == pytest.approx([rate] * 3)


@pytest.mark.parametrize("fills_cores", [False, True])
def test_a_pass_that_would_take_all_cores_is_measured_in_a_lane(fills_cores: bool) -> None:
    """Beside backends whose lanes take a core each, it would seem as fast as all their lanes are."""
    entered, threads = list[int](), set[int]()
    backend = FakeBackend(small.model_spec(), gate=lambda _: threads.add(threading.get_ident()))
    backend.fills_cores = fills_cores
    backend.enter_lane = lambda kind: entered.append(threading.get_ident())  # type: ignore[method-assign]
    assert len(list(measure(backend, 128))) == 2
    assert [*threads] == (entered if fills_cores else [threading.get_ident()])
