"""Laws of the queue: everything comes back once and in order, to whom it belongs; nobody waits for ever."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.backends.fake import FakeBackend
from hybridtei.batch import Encoding, Head, Positions
from hybridtei.engine.core import LOOK_AHEAD, EngineCore
from hybridtei.errors import BackendError
from hybridtei.outputs import HeadOutputs
from tests.engine import small

DENSE, TOKENS = frozenset({Head.DENSE}), frozenset({Head.TOKENS})
SPEC = small.model_spec()
requests = st.lists(st.lists(st.integers(1, 30), max_size=12), max_size=12)


def core(max_tokens: int = 64, **settings) -> EngineCore:
    return EngineCore(max_tokens=max_tokens, positions=Positions(), **settings)


def encoding(length: int, first: int = 0) -> Encoding:
    return Encoding(np.arange(first, first + length, dtype=np.int64) % SPEC.vocab_size)


def drain(queue: EngineCore, backend: FakeBackend) -> list:
    done = []
    while (batch := queue.take()) is not None:
        done += queue.give(batch, backend.forward(batch.packed))
    return done


@pytest.mark.parametrize("padded", [False, True])
@given(requests, st.integers(1, 100), st.none() | st.integers(1, 6))
def test_every_sequence_comes_back_once_and_in_its_place(padded, lengths, budget, most):
    queue, backend = core(budget, max_sequences=most, padded=padded), FakeBackend(SPEC)
    encodings = [[encoding(n, 7 * i + j) for j, n in enumerate(request)] for i, request in enumerate(lengths)]
    tickets = [queue.add(request, DENSE | TOKENS) for request in encodings]
    done = drain(queue, backend)
    assert len(queue) == 0
    assert len(set(done)) == len(done)
    assert {ticket for ticket in tickets if ticket.encodings} == set(done)
    for ticket in tickets:
        if ticket.encodings:
            assert_alone_is_the_same(ticket.encodings, ticket.outputs())


def assert_alone_is_the_same(encodings, outputs: HeadOutputs) -> None:
    assert len(outputs.dense) == len(outputs.tokens) == len(encodings)
    for place, one in enumerate(encodings):
        queue = core()
        ticket = queue.add([one], DENSE | TOKENS)
        drain(queue, FakeBackend(SPEC))
        assert np.array_equal(outputs.dense[place], ticket.outputs().dense[0])
        assert np.array_equal(outputs.tokens.row(place), ticket.outputs().tokens.row(0))


@pytest.mark.parametrize("padded", [False, True])
def test_a_query_does_not_wait_for_a_thousand_texts_before_it(padded):
    queue = core(512, padded=padded)
    queue.add([encoding(50) for _ in range(1000)], DENSE)
    query = queue.add([encoding(5)], DENSE)
    batches = [queue.take(), queue.take()]
    assert any(ticket is query for batch in batches for ticket, _ in batch.riders)


def test_a_query_that_comes_while_bulk_runs_rides_next():
    queue = core(500)
    queue.add([encoding(50) for _ in range(1000)], DENSE)
    for _ in range(20):
        queue.take()
    query = queue.add([encoding(5)], DENSE)
    assert any(ticket is query for ticket, _ in queue.take().riders)


@pytest.mark.parametrize("padded", [False, True])
def test_bulk_is_not_starved_by_an_endless_stream_of_queries(padded):
    queue, backend = core(20, padded=padded), FakeBackend(SPEC)
    bulk = queue.add([encoding(20) for _ in range(10)], DENSE)
    fair = sum(4 * (texts + 1) for texts in range(11))  # each bulk text leaves four more queries waiting, and all share alike
    for _ in range(fair):
        for _ in range(4):  # the stream alone fills every pass
            queue.add([encoding(5)], DENSE)
        batch = queue.take()
        queue.give(batch, backend.forward(batch.packed))
    assert bulk.done


def test_two_bulk_requests_share():
    queue = core(100)
    one = queue.add([encoding(10) for _ in range(100)], DENSE)
    two = queue.add([encoding(10) for _ in range(100)], DENSE)
    riders = [ticket for _ in range(10) for ticket, _ in queue.take().riders]
    assert abs(riders.count(one) - riders.count(two)) <= 10


@given(st.lists(st.tuples(st.integers(1, 20), st.booleans()), max_size=40))
def test_the_cancelled_never_cost_a_pass(requests):
    queue, backend = core(40), FakeBackend(SPEC)
    tickets = [queue.add([encoding(length)] * 2, DENSE) for length, _ in requests]
    for ticket, (_, cancelled) in zip(tickets, requests, strict=True):
        ticket.cancelled = cancelled
    wanted = sum(2 * length for length, cancelled in requests if not cancelled)
    ran = 0
    while (batch := queue.take()) is not None:
        ran += len(batch.packed.input_ids)
        assert not any(ticket.cancelled for ticket, _ in batch.riders)
        queue.give(batch, backend.forward(batch.packed))
    assert ran == wanted
    assert len(queue) == 0


def test_more_cancelled_than_one_look_ahead():
    queue = core()
    queue.add([encoding(1)] * (2 * LOOK_AHEAD + 3), DENSE).cancelled = True
    last = queue.add([encoding(40)], DENSE)
    assert [ticket for ticket, _ in queue.take().riders] == [last]
    assert queue.take() is None
    assert len(queue) == 0


def test_a_failed_batch_fails_its_riders_only():
    queue, backend = core(10), FakeBackend(SPEC)
    failing = queue.add([encoding(5), encoding(5), encoding(5)], DENSE)
    other = queue.add([encoding(10)], DENSE)
    batch = queue.take()
    assert {ticket for ticket, _ in batch.riders} == {failing}
    assert queue.fail(batch, BackendError("no")) == [failing]
    assert drain(queue, backend) == [other]
    assert other.outputs().dense.shape == (1, small.HIDDEN)
    with pytest.raises(BackendError, match="no"):
        failing.outputs()


def test_a_failed_request_leaves_the_queue():
    queue = core(10)
    failing = queue.add([encoding(10) for _ in range(5)], DENSE)
    queue.fail(queue.take(), BackendError("no"))
    assert failing.done
    assert queue.take() is None
    assert len(queue) == 0


def test_fail_all_empties_the_queue():
    queue = core()
    tickets = [queue.add([encoding(3)] * 2, DENSE) for _ in range(3)]
    assert queue.fail_all(BackendError("no")) == tickets
    assert queue.take() is None
    assert all(ticket.done for ticket in tickets)


def test_the_heads_of_a_batch_are_the_union_of_its_riders():
    queue = core()
    for heads in (DENSE, frozenset({Head.SPARSE}), DENSE | {Head.MULTIVECTOR}):
        queue.add([encoding(3)], heads)
    batch = queue.take()
    assert batch.packed.heads == {Head.DENSE, Head.SPARSE, Head.MULTIVECTOR}
    assert queue.take() is None


def test_times_are_means_over_sequences():
    queue, backend = core(10), FakeBackend(SPEC)
    ticket = queue.add([encoding(10), encoding(10)], DENSE, now_ns=100)
    for taken, given_back in ((110, 115), (130, 145)):
        batch = queue.take(taken)
        queue.give(batch, backend.forward(batch.packed), given_back)
    assert (ticket.timings().queue_ns, ticket.timings().inference_ns) == (20, 10)
