"""The priority of threads, as the operating system sees it."""

from __future__ import annotations

import os
import threading

import pytest

from hybridtei.system import cpu as lanes
from hybridtei.system.cpu import LaneKind, both_lanes, lower_priority


def test_as_many_of_each_as_cores():
    assert both_lanes(2) == (LaneKind.EXPRESS, LaneKind.EXPRESS, LaneKind.BULK, LaneKind.BULK)


def test_only_the_calling_thread_gives_way():
    before = os.getpriority(os.PRIO_PROCESS, 0)
    seen: list[int | bool] = []

    def lane() -> None:
        seen.extend([lower_priority(before + 3), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())])

    thread = threading.Thread(target=lane)
    thread.start()
    thread.join()
    assert seen == [True, before + 3]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


def test_a_refusal_is_told_not_raised(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(lanes.os, "setpriority", refuse)
    assert lower_priority(5) is False
