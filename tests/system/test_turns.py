"""Short work passes long work at its portions, and runs once."""

import threading
from concurrent.futures import CancelledError

import pytest

from hybridtei.system.turns import Turns, give_way


@pytest.fixture
def turns():
    made = Turns(1, "test")
    yield made
    made.shutdown()


def test_short_work_runs_between_two_portions_of_long_work(turns):
    begun, queued, order = threading.Event(), threading.Event(), []

    def long():
        order.append("portion")
        begun.set()
        assert queued.wait(30)
        give_way()
        order.append("portion")

    ended = turns.submit(long, is_short=False)
    assert begun.wait(30)
    other = turns.submit(lambda: order.append("long"), is_short=False)
    short = [turns.submit(lambda: order.append("short"), is_short=True) for _ in range(3)]
    left = turns.submit(lambda: order.append("left"), is_short=True)
    assert left.cancel()
    queued.set()
    for future in (ended, other, *short):
        future.result(30)
    assert order == ["portion", "short", "short", "short", "portion", "long"]
    with pytest.raises(CancelledError):
        left.result(30)


def test_an_error_of_short_work_is_its_own(turns):
    def long():
        give_way()
        return "whole"

    def fails():
        raise ValueError("short")

    futures = [turns.submit(long, is_short=False), turns.submit(fails, is_short=True)]
    assert futures[0].result(30) == "whole"
    with pytest.raises(ValueError, match="short"):
        futures[1].result(30)
    assert turns.submit(lambda: 1, is_short=True).result(30) == 1


def test_without_turns_nothing_gives_way():
    give_way()
