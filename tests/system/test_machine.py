"""What a process may use: processors, priorities of lanes, the user's cache folder; and what its
children are given."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hybridtei.errors import LoadError
from hybridtei.inference.backends.graph.onnx_backend import move_to
from hybridtei.system import machine
from hybridtei.system.machine import (
    LaneKind,
    available_cores,
    both_lanes,
    cache_folder,
    lower_priority,
    own_processors,
)

HERE = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("max 100000", HERE),
        ("50000 100000", 1),
        ("100000 100000", 1),
        ("nonsense", HERE),
        ("0 0", HERE),
    ],
)
def test_the_least_of_mask_and_quota(tmp_path, quota, cores):
    file = tmp_path / "cpu.max"
    file.write_text(quota + "\n")
    assert available_cores(file) == cores


@pytest.mark.parametrize(
    ("quota", "cores"), [("-1", HERE), ("50000", 1), ("100000", 1), ("nonsense", HERE)]
)
def test_a_quota_of_cgroup_v1(tmp_path, quota, cores):
    files = (tmp_path / "cpu.cfs_quota_us", tmp_path / "cpu.cfs_period_us")
    for file, value in zip(files, (quota, "100000"), strict=True):
        file.write_text(value + "\n")
    assert available_cores(tmp_path / "none", files) == cores


def test_no_quota_file(tmp_path):
    assert available_cores(tmp_path / "none") == HERE


def test_a_process_with_a_part_of_each_processor_owns_none(monkeypatch):
    assert list(own_processors()) == sorted(os.sched_getaffinity(0))
    monkeypatch.setenv(machine.GRANTED, "1")
    assert len(own_processors()) == (HERE if HERE == 1 else 0)


def test_a_thread_moves_there_and_back():
    everywhere = os.sched_getaffinity(0)
    before = move_to([min(everywhere)])
    assert (before, os.sched_getaffinity(0)) == (everywhere, {min(everywhere)})
    move_to(before)
    assert os.sched_getaffinity(0) == everywhere


def test_a_processor_that_is_not_there_is_no_error():
    everywhere = os.sched_getaffinity(0)
    assert not move_to([max(everywhere) + 1000])
    assert os.sched_getaffinity(0) == everywhere


def test_as_many_of_each_as_cores():
    assert both_lanes(2) == (LaneKind.EXPRESS, LaneKind.EXPRESS, LaneKind.BULK, LaneKind.BULK)


def test_only_the_calling_thread_gives_way():
    before = os.getpriority(os.PRIO_PROCESS, 0)

    def lane():
        is_lowered = lower_priority(before + 3)
        return is_lowered, os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(lane).result() == (True, before + 3)
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


def test_a_refusal_is_told_not_raised(monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(machine.os, "setpriority", refuse)
    assert lower_priority(5) is False


@pytest.fixture
def no_places(monkeypatch):
    for name in ("HYBRIDTEI_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_places")
@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HYBRIDTEI_CACHE": "/own", "XDG_CACHE_HOME": "/xdg", "HOME": "/home/a"}, "/own"),
        ({"XDG_CACHE_HOME": "/xdg", "HOME": "/home/a"}, "/xdg/hybridtei/kind"),
        ({"HOME": "/home/a"}, "/home/a/.cache/hybridtei/kind"),
        (
            {"HYBRIDTEI_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/home/a"},
            "/home/a/.cache/hybridtei/kind",
        ),
    ],
)
def test_it_is_where_the_user_says(monkeypatch, environment, expected):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_folder("kind") == Path(expected)


@pytest.mark.usefixtures("no_places")
def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    def nobody():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody)
    with pytest.raises(LoadError, match="HYBRIDTEI_CACHE"):
        cache_folder("kind")
