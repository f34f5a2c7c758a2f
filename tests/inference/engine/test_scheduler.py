"""Laws of `choose`."""

from hypothesis import given
from hypothesis import strategies as st

from hybridtei.batch import Padding
from hybridtei.inference.engine.scheduler import (
    ALLOWED,
    EXPRESS_BACKLOG_TOKENS,
    EXPRESS_TOKENS,
    MIN_SHARE_TOKENS,
    choose,
    lane_for,
    price,
    share,
)
from hybridtei.system.machine import LaneKind

queues = st.lists(st.integers(1, 200), max_size=60)
budgets = st.integers(1, 400)
counts = st.none() | st.integers(1, 20)


@given(queues, budgets, counts, st.sampled_from([*Padding]))
def test_each_batch_keeps_its_budget_has_the_first_and_none_is_lost_or_rides_twice(
    waiting, budget, most, padding
):
    places, rode = list(range(len(waiting))), []
    while places:
        lengths = [waiting[i] for i in places]
        chosen = choose(lengths, max_tokens=budget, max_sequences=most, padding=padding)
        assert chosen == sorted(set(chosen))
        assert chosen[0] == 0
        riding = [lengths[i] for i in chosen]
        assert price(sum(riding), len(riding), max(riding), padding) <= budget or len(riding) == 1
        assert most is None or len(riding) <= most
        rode += [places[i] for i in chosen]
        places = [place for i, place in enumerate(places) if i not in chosen]
    assert sorted(rode) == list(range(len(waiting)))
    assert choose([], max_tokens=budget) == []


@given(queues, budgets)
def test_packed_leaves_none_waiting_that_would_fit(waiting, budget):
    chosen = choose(waiting, max_tokens=budget)
    spare = budget - sum(waiting[i] for i in chosen)
    assert all(waiting[i] > spare for i in range(len(waiting)) if i not in chosen)


@given(st.integers(1, 50), st.integers(1, 900))
def test_padding_costs_nothing_where_there_is_none_and_less_where_only_attention_pads(
    sequences, longest
):
    assert (
        len({price(sequences * longest, sequences, longest, padding) for padding in Padding}) == 1
    )
    useful = sequences - 1 + longest
    prices = [
        price(useful, sequences, longest, padding)
        for padding in (Padding.NONE, Padding.ATTENTION, Padding.ALL)
    ]
    assert prices[0] == useful
    assert prices == sorted(prices)
    assert prices[2] == sequences * longest


@given(st.sampled_from([*ALLOWED]), st.lists(st.integers(1, 200), min_size=1, max_size=60), budgets)
def test_a_bounded_share_is_wasted(padding, waiting, budget):
    lengths = [waiting[i] for i in choose(waiting, max_tokens=budget, padding=padding)]
    assert price(sum(lengths), len(lengths), max(lengths), padding) <= ALLOWED[padding] * sum(
        lengths
    )


def test_like_lengths_ride_together_in_a_rectangle():
    waiting = [5, 100, 6, 90, 5, 7, 110]
    assert choose(waiting, max_tokens=1000, padding=Padding.ALL) == [0, 2, 4, 5]
    assert choose(waiting[1:], max_tokens=1000, padding=Padding.ALL) == [0, 2, 5]


def test_queries_of_all_lengths_ride_together_where_only_attention_pads():
    queries = [5, 30, 12, 8, 27, 19]
    assert choose(queries, max_tokens=1000, padding=Padding.ATTENTION) == [*range(6)]
    assert choose(queries, max_tokens=1000, padding=Padding.ALL) == [0, 3]
    assert choose([12, 240, 8, 250], max_tokens=1000, padding=Padding.ATTENTION) == [0, 2]


def test_packed_keeps_arrival_order_and_fills_gaps():
    assert choose([60, 50, 30, 20], max_tokens=100) == [0, 2]
    assert choose([60, 40, 1], max_tokens=100) == [0, 1]


@given(st.integers(1, 10_000), st.integers(0, 20_000))
def test_express_is_what_is_short_and_not_behind_too_much(tokens, backlog):
    express = tokens <= EXPRESS_TOKENS and backlog + tokens <= EXPRESS_BACKLOG_TOKENS
    assert (lane_for(tokens, backlog) is LaneKind.EXPRESS) == express
    # Who asks for less, or comes earlier, is never worse off
    if lane_for(tokens, backlog) is LaneKind.EXPRESS:
        assert lane_for(max(tokens - 1, 1), max(backlog - 1, 0)) is LaneKind.EXPRESS


@given(
    st.lists(st.integers(1, 9000), min_size=1, max_size=20),
    st.integers(1, 16),
    st.integers(1, 20_000),
)
def test_an_idle_device_gives_one_pass_what_lanes_cannot_divide(lengths, lanes, budget):
    total = sum(lengths)
    got = share(lengths, total, lanes, budget, idle=True)
    one_is_most = max(lengths) * lanes > total
    assert got == (
        budget if total <= budget and one_is_most else share(lengths, total, lanes, budget)
    )


@given(st.integers(0, 100_000), st.integers(1, 64), st.integers(1, 20_000))
def test_a_share_is_no_more_than_the_budget_and_no_less_than_keeps_a_core_busy(
    waiting, lanes, budget
):
    got = share([], waiting, lanes, budget)
    assert got <= budget
    assert got >= min(budget, MIN_SHARE_TOKENS)
    assert got * lanes >= min(waiting, budget * lanes)
