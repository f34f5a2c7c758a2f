import asyncio
import contextlib
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.errors import StoreError, StoreUnavailable
from hybridtei.system import retries
from hybridtei.system.retries import LONGEST_PAUSE_S


class Time:
    """A clock that only pauses move."""

    def __init__(self):
        self.now, self.pauses = 0.0, []

    def clock(self):
        return self.now

    async def sleep(self, seconds):
        self.pauses.append(seconds)
        self.now += seconds


def run(time, outcomes, patience_s, jitter=0.0):
    """Outcomes one a try, the last of them for ever."""
    left = list(outcomes)

    async def attempt():
        outcome = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retries, "time", SimpleNamespace(monotonic=time.clock))
        patch.setattr(retries, "random", SimpleNamespace(random=lambda: jitter))
        patch.setattr(retries, "asyncio", SimpleNamespace(sleep=time.sleep))
        return asyncio.run(retries.retry_unavailable(attempt, patience_s))


def test_pauses_double_up_to_a_longest_and_end_with_the_patience():
    time = Time()
    with pytest.raises(StoreUnavailable, match=r"down \(tried 12 times in 30.0 s, patience 30 s\)"):
        run(time, [StoreUnavailable("down")], 30.0)
    assert time.pauses[:7] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, LONGEST_PAUSE_S])
    assert sum(time.pauses) == pytest.approx(30.0)


def test_a_pause_that_is_asked_for_is_kept_and_counts():
    time = Time()
    asked = [StoreUnavailable("slower", seconds) for seconds in (4.0, 3.0)]
    assert run(time, [*asked, "done"], 10.0) == "done"
    assert time.pauses == [4.0, 3.0]
    time = Time()
    with pytest.raises(StoreUnavailable, match="tried 3 times") as refused:
        run(time, [StoreUnavailable("slower", 4.0)], 10.0)
    assert time.pauses == [4.0, 4.0]
    assert refused.value.retry_after_s == 4.0


@pytest.mark.parametrize(
    ("error", "patience_s", "told"),
    [(StoreUnavailable("down"), 0.0, "tried once"), (StoreError("no"), 10.0, "no")],
    ids=["no patience", "another error"],
)
def test_what_is_tried_once(error, patience_s, told):
    time = Time()
    with pytest.raises(type(error), match=told):
        run(time, [error, "never seen"], patience_s)
    assert time.pauses == []


@given(
    st.lists(st.none() | st.floats(0, 100), min_size=1, max_size=30),
    st.floats(0, 60),
    st.floats(0, 1),
)
def test_waiting_never_outlasts_the_patience(asked, patience_s, jitter):
    time, outcomes = Time(), [*(StoreUnavailable("down", pause) for pause in asked), "done"]
    with contextlib.suppress(StoreUnavailable):
        assert run(time, outcomes, patience_s, jitter) == "done"
    assert sum(time.pauses) <= patience_s + 1e-9


@pytest.mark.parametrize("asked", [0.0, 0.05])
def test_a_pause_of_nothing_grows(asked):
    time = Time()
    assert run(time, [StoreUnavailable("busy", asked)] * 4 + ["done"], 10.0, 0.9) == "done"
    assert time.pauses == pytest.approx([0.1, 0.2, 0.4, 0.8])


@pytest.mark.parametrize(
    "text",
    ["0", "-5", "nan", "-inf", "Wed, 21 Oct 2015 07:28:00 GMT", "Wed, 21 Oct 0001 00:00:00 GMT"],
)
def test_a_retry_after_that_asks_for_nothing(text):
    assert retries.retry_after_s({"Retry-After": text}) == 0.0
