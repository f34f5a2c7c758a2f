"""Laws of the queue: every output comes back once and in order to its own request, and no request
waits for ever."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.small.fake_backend import FakeBackend
from hybridtei.batch import Encoding, Head, Padding, Positions
from hybridtei.errors import BackendError
from hybridtei.inference.engine.core import LOOK_AHEAD, EngineCore, ResultCache
from hybridtei.inference.engine.scheduler import OVERTAKEN
from hybridtei.system.machine import LaneKind
from tests.inference.engine import small
from tests.near import same

DENSE, TOKENS = frozenset({Head.DENSE}), frozenset({Head.TOKENS})
SPEC = small.model_spec()
PAIRS = itertools.cycle(itertools.product(range(SPEC.vocab_size), repeat=2))
requests = st.lists(st.lists(st.integers(1, 30), max_size=12), max_size=12)


def core(max_tokens=64, **settings):
    return EngineCore(max_tokens=max_tokens, positions=Positions(), **settings)


def encoding(length, first=0):
    return Encoding(np.arange(first, first + length, dtype=np.int64) % SPEC.vocab_size)


def different(count, length):
    """`n` different encodings of one length."""
    return [
        Encoding(np.array([*pair, *range(length - 2)], dtype=np.int64))
        for pair in itertools.islice(PAIRS, count)
    ]


def finish(queue, batch, backend, *now_ns):
    """Compute a batch; the requests that it completes."""
    return queue.give(batch, batch.split(backend.forward(batch.packed)), *now_ns)


def drain(queue, backend):
    done = []
    while (batch := queue.take()) is not None:
        done += finish(queue, batch, backend)
    return done


def ask(queue, *lengths):
    return queue.add([encoding(length) for length in lengths], DENSE)


def riders(batch):
    return [ticket for ticket, _ in batch.callers]


@given(st.sampled_from([*Padding]), requests, st.integers(1, 100), st.none() | st.integers(1, 6))
def test_every_sequence_comes_back_once_and_in_its_place(padding, lengths, budget, most):
    queue, backend = core(budget, max_sequences=most, padding=padding), FakeBackend(SPEC)
    encodings = [
        [encoding(n, 7 * i + j) for j, n in enumerate(request)] for i, request in enumerate(lengths)
    ]
    tickets = [queue.add(request, DENSE | TOKENS) for request in encodings]
    done = drain(queue, backend)
    assert len(queue) == 0
    assert len(set(done)) == len(done)
    assert {ticket for ticket in tickets if ticket.encodings} == set(done)
    for ticket in tickets:
        if ticket.encodings:
            assert ticket.outputs().tokens is not None
            assert_alone_is_the_same(ticket.encodings, ticket.outputs())


def assert_alone_is_the_same(encodings, outputs):
    assert len(outputs.dense) == len(encodings)
    for place, one in enumerate(encodings):
        queue = core()
        ticket = queue.add([one], DENSE | TOKENS)
        drain(queue, FakeBackend(SPEC))
        same(outputs.dense[place], ticket.outputs().dense[0])
        if outputs.tokens is not None:
            same(outputs.tokens.row(place), ticket.outputs().tokens.row(0))


@pytest.mark.parametrize("padding", [*Padding])
def test_a_query_does_not_wait_for_a_thousand_texts_before_it(padding):
    queue = core(512, padding=padding)
    queue.add(different(1000, 50), DENSE)
    query = ask(queue, 5)
    batches = [queue.take(), queue.take()]
    assert any(query in riders(batch) for batch in batches)


def test_two_bulk_requests_share():
    queue = core(100)
    one = queue.add(different(100, 10), DENSE)
    two = queue.add(different(100, 10), DENSE)
    callers = [ticket for _ in range(10) for ticket in riders(queue.take())]
    assert abs(callers.count(one) - callers.count(two)) <= 10


@given(st.lists(st.tuples(st.integers(2, 20), st.booleans()), max_size=40))
def test_the_cancelled_never_cost_a_pass(requests):
    queue, backend = core(40), FakeBackend(SPEC)
    tickets = [queue.add(different(2, length), DENSE) for length, _ in requests]
    for ticket, (_, cancelled) in zip(tickets, requests, strict=True):
        ticket.cancelled = cancelled
    wanted = sum(2 * length for length, cancelled in requests if not cancelled)
    ran = 0
    while (batch := queue.take()) is not None:
        ran += len(batch.packed.input_ids)
        assert not any(ticket.cancelled for ticket in riders(batch))
        finish(queue, batch, backend)
    assert ran == wanted
    assert len(queue) == 0


def test_more_cancelled_than_one_look_ahead():
    queue = core()
    queue.add(different(2 * LOOK_AHEAD + 3, 2), DENSE).cancelled = True
    last = ask(queue, 40)
    assert riders(queue.take()) == [last]
    assert queue.take() is None
    assert len(queue) == 0


def test_a_failed_batch_fails_its_riders_only():
    queue, backend = core(10), FakeBackend(SPEC)
    # Of whom the next pass would have more
    failing = queue.add(different(7, 5), DENSE)
    other = ask(queue, 10)
    batch = queue.take()
    assert set(riders(batch)) == {failing}
    assert queue.fail(batch, BackendError("no")) == [failing]
    assert drain(queue, backend) == [other]
    assert other.outputs().dense.shape == (1, small.HIDDEN)
    with pytest.raises(BackendError, match="no"):
        failing.outputs()


def test_the_heads_of_a_batch_are_the_union_of_its_riders():
    queue = core()
    for heads in (DENSE, frozenset({Head.SPARSE}), DENSE | {Head.MULTIVECTOR}):
        queue.add([encoding(3)], heads)
    batch = queue.take()
    assert batch.packed.heads == {Head.DENSE, Head.SPARSE, Head.MULTIVECTOR}
    assert queue.take() is None


def test_times_are_means_over_sequences():
    queue, backend = core(10), FakeBackend(SPEC)
    ticket = queue.add(different(2, 10), DENSE, now_ns=100)
    for taken, given_back in ((110, 115), (130, 145)):
        batch = queue.take(taken)
        finish(queue, batch, backend, given_back)
    assert (ticket.timings().queue_ns, ticket.timings().inference_ns) == (20, 10)


def test_what_waits_already_is_computed_once():
    queue, backend = core(), FakeBackend(SPEC)
    one = ask(queue, 5, 7, 5)
    other = queue.add([encoding(7)], TOKENS)
    batch = queue.take()
    assert batch.packed.lengths.tolist() == [5, 7]
    assert queue.shared == 2
    done = finish(queue, batch, backend)
    assert done == [one, other]
    assert_alone_is_the_same(one.encodings, one.outputs())
    assert other.outputs().dense is None
    assert other.outputs().tokens.lengths.tolist() == [7]
    assert len(queue) == 0


def test_what_runs_already_is_computed_again():
    queue = core()
    ask(queue, 5)
    running = queue.take()
    ask(queue, 5)
    assert queue.shared == 0
    assert len(queue.take().packed) == len(running.packed) == 1


def test_a_shared_text_runs_while_anybody_waits_for_it():
    queue = core()
    first = ask(queue, 5)
    second = ask(queue, 5)
    first.cancelled = True
    assert second in riders(queue.take())
    third, fourth = ask(queue, 6), ask(queue, 6)
    third.cancelled = fourth.cancelled = True
    assert queue.take() is None
    # Not one with those that were dropped
    fifth = ask(queue, 6)
    assert riders(queue.take()) == [fifth]


BOTH = (LaneKind.EXPRESS, LaneKind.EXPRESS, LaneKind.BULK, LaneKind.BULK)


def test_short_requests_go_to_express_lanes_and_the_rest_to_bulk():
    queue = core(lanes=BOTH)
    bulk = queue.add(different(30, 20), DENSE)
    query = ask(queue, 5)
    assert riders(queue.take(kind=LaneKind.EXPRESS)) == [query]
    assert queue.take(kind=LaneKind.EXPRESS) is None
    assert set(riders(queue.take(kind=LaneKind.BULK))) == {bulk}


@pytest.mark.parametrize("lengths", [[300], [300, 10], [20, 20, 20], [150, 90, 40]])
def test_a_request_that_is_alone_has_all_cores_unless_lanes_divide_it(lengths):
    queue = core(512, lanes=BOTH)
    queue.add([encoding(length, place) for place, length in enumerate(lengths)], DENSE)
    batch = queue.take(kind=LaneKind.BULK)
    assert batch.use_all_cores
    assert len(batch.packed) == len(lengths)


def test_a_request_that_lanes_divide_evenly_is_divided():
    queue = core(512, lanes=BOTH)
    queue.add(different(8, 40), DENSE)
    batches = [queue.take(kind=LaneKind.BULK) for _ in range(2)]
    assert [(len(batch.packed), batch.use_all_cores) for batch in batches] == [
        (4, False),
        (4, False),
    ]


def test_beside_work_of_another_model_a_pass_has_one_core():
    queue = core(512, lanes=BOTH)
    ask(queue, 300)
    assert not queue.take(kind=LaneKind.BULK, device_idle=False).use_all_cores


def test_a_text_that_is_alone_has_all_cores_until_another_comes():
    queue, backend = core(lanes=BOTH), FakeBackend(SPEC)
    ask(queue, 5)
    first = queue.take(kind=LaneKind.EXPRESS)
    ask(queue, 6)
    # While the first runs
    second = queue.take(kind=LaneKind.EXPRESS)
    assert (first.use_all_cores, second.use_all_cores) == (True, False)
    finish(queue, first, backend)
    queue.fail(second, BackendError("no"))
    ask(queue, 7)
    third = queue.take(kind=LaneKind.EXPRESS)
    assert third.use_all_cores
    finish(queue, third, backend)
    queue.add(different(3, 30), DENSE)
    queue.take(kind=LaneKind.BULK)
    ask(queue, 8)
    # Beside bulk work, one thread of higher priority does more
    assert not queue.take(kind=LaneKind.EXPRESS).use_all_cores


def test_two_lanes_share_what_waits():
    queue = core(512, lanes=BOTH, padding=Padding.ALL)
    for first, count in ((0, 40), (40, 30)):
        for encoding_ in different(first + count, 10)[first:]:
            queue.add([encoding_], DENSE)
        if not first:
            sizes = [len(queue.take(kind=LaneKind.EXPRESS).packed) for _ in range(2)]
            # A burst, in equal parts
            assert sizes == [20, 20]
    sizes = [len(queue.take(kind=LaneKind.EXPRESS).packed) for _ in range(2)]
    # Half of what waits each time, but no less than keeps a core busy
    assert sizes == [15, 12]


def test_endless_queries_wait_at_last_for_bulk_work_that_they_overtake():
    queue = core(64, lanes=BOTH)
    bulk = queue.add(different(20, 30), DENSE)
    overtaking = 0
    for query in different(1000, 5):
        queue.add([query], DENSE)
        batch = queue.take(kind=LaneKind.EXPRESS)
        if batch is None:
            break
        overtaking += batch.tokens
    assert 600 <= overtaking <= OVERTAKEN * 600
    taken = [queue.take(kind=LaneKind.BULK) for _ in range(10)]
    assert sum(len(batch.rows) for batch in taken) == 20
    assert {request for batch in taken for request, _ in batch.callers} == {bulk}
    assert queue.take(kind=LaneKind.EXPRESS).callers[0][0].encodings == [query]


def test_what_was_computed_is_remembered():
    cache = ResultCache(1_000_000)
    queue, backend = core(cache=cache), FakeBackend(SPEC)
    first = ask(queue, 5, 7)
    drain(queue, backend)
    again = ask(queue, 7, 9, 5)
    assert len(queue) == 1
    drain(queue, backend)
    same(again.outputs().dense[[2, 0]], first.outputs().dense)
    known = ask(queue, 9)
    assert known.done
    same(known.outputs().dense[0], again.outputs().dense[1])
    assert queue.add([encoding(9)], TOKENS).done is False
    assert (cache.hits, cache.misses) == (3, 4)


def test_bulk_work_that_may_not_overtake_a_query_goes_after_it():
    queue = core(lanes=(LaneKind.EXPRESS, LaneKind.BULK))
    short = queue.add(different(1, 5), DENSE)
    # More than may overtake the short one
    long = queue.add(different(2, 30), DENSE)
    assert queue.take(kind=LaneKind.BULK) is None
    assert riders(queue.take(kind=LaneKind.EXPRESS)) == [short]
    assert set(riders(queue.take(kind=LaneKind.BULK))) == {long}
