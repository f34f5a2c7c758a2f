"""Laws of `choose`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.engine.scheduler import (
    EXPRESS_BACKLOG_TOKENS,
    EXPRESS_TOKENS,
    LEAST_SHARE_TOKENS,
    PADDING_ALLOWED,
    PATIENCE_NS,
    choose,
    is_starving,
    lane_for,
    share,
)
from hybridtei.lanes import LaneKind

queues = st.lists(st.integers(1, 200), max_size=60)
budgets = st.integers(1, 400)
counts = st.none() | st.integers(1, 20)
both = pytest.mark.parametrize("padded", [False, True])


@both
@given(queues, budgets, counts)
def test_a_batch_keeps_its_budget_unless_one_sequence_alone_exceeds_it(padded, waiting, budget, most):
    chosen = choose(waiting, max_tokens=budget, max_sequences=most, padded=padded)
    lengths = [waiting[i] for i in chosen]
    cost = max(lengths, default=0) * len(lengths) if padded else sum(lengths)
    assert cost <= budget or len(chosen) == 1
    assert most is None or len(chosen) <= most


@both
@given(queues, budgets, counts)
def test_none_rides_twice_and_the_first_always_rides(padded, waiting, budget, most):
    chosen = choose(waiting, max_tokens=budget, max_sequences=most, padded=padded)
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= set(range(len(waiting)))
    assert chosen[:1] == ([0] if waiting else [])


@both
@given(queues, budgets, counts)
def test_pure(padded, waiting, budget, most):
    before = list(waiting)
    settings = {"max_tokens": budget, "max_sequences": most, "padded": padded}
    assert choose(waiting, **settings) == choose(tuple(waiting), **settings)
    assert waiting == before


@both
@given(queues, budgets, counts)
def test_the_queue_empties_and_none_is_lost(padded, waiting, budget, most):
    places = list(range(len(waiting)))
    rode = []
    while places:
        chosen = choose([waiting[i] for i in places], max_tokens=budget, max_sequences=most, padded=padded)
        rode += [places[i] for i in chosen]
        places = [place for i, place in enumerate(places) if i not in chosen]
    assert sorted(rode) == list(range(len(waiting)))


@given(queues, budgets)
def test_packed_leaves_none_waiting_that_would_fit(waiting, budget):
    chosen = choose(waiting, max_tokens=budget)
    spare = budget - sum(waiting[i] for i in chosen)
    assert all(waiting[i] > spare for i in range(len(waiting)) if i not in chosen)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=60), budgets)
def test_padded_wastes_a_bounded_share(waiting, budget):
    lengths = [waiting[i] for i in choose(waiting, max_tokens=budget, padded=True)]
    assert max(lengths) * len(lengths) <= PADDING_ALLOWED * sum(lengths)


def test_padded_puts_like_lengths_together():
    waiting = [5, 100, 6, 90, 5, 7, 110]
    assert choose(waiting, max_tokens=1000, padded=True) == [0, 2, 4, 5]
    assert choose(waiting[1:], max_tokens=1000, padded=True) == [0, 2, 5]


def test_packed_keeps_arrival_order_and_fills_gaps():
    assert choose([60, 50, 30, 20], max_tokens=100) == [0, 2]
    assert choose([60, 40, 1], max_tokens=100) == [0, 1]


def test_a_sequence_longer_than_the_budget_rides_alone():
    assert choose([500, 1], max_tokens=100) == [0]


def test_nobody_waits():
    assert choose([], max_tokens=1) == []


@given(st.integers(1, 10_000), st.integers(0, 20_000))
def test_express_is_what_is_short_and_not_behind_too_much(tokens, backlog):
    express = tokens <= EXPRESS_TOKENS and backlog + tokens <= EXPRESS_BACKLOG_TOKENS
    assert (lane_for(tokens, backlog) is LaneKind.EXPRESS) == express
    if lane_for(tokens, backlog) is LaneKind.EXPRESS:  # who asks for less, or comes earlier, is never worse off
        assert lane_for(max(tokens - 1, 1), max(backlog - 1, 0)) is LaneKind.EXPRESS


def test_starving_begins_after_the_last_service_or_the_arrival():
    assert not is_starving(10, 0, 10 + PATIENCE_NS)
    assert is_starving(10, 0, 11 + PATIENCE_NS)
    assert not is_starving(10, 50, 50 + PATIENCE_NS)
    assert is_starving(10, 50, 51 + PATIENCE_NS)


@given(st.integers(0, 100_000), st.integers(1, 64), st.integers(1, 20_000))
def test_a_share_is_no_more_than_the_budget_and_no_less_than_keeps_a_core_busy(waiting, lanes, budget):
    got = share(waiting, lanes, budget)
    assert got <= budget
    assert got >= min(budget, LEAST_SHARE_TOKENS)
    assert got * lanes >= min(waiting, budget * lanes)
