"""The queue by itself: callers who leave while somebody looks, and the bound on what comes later.
See also `test_core`."""

import itertools
import random
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.batch import Encoding, Head, Padding, Positions
from hybridtei.inference.engine.core import EngineCore
from hybridtei.inference.engine.scheduler import OVERTAKEN, FairQueue
from hybridtei.outputs import HeadOutputs
from hybridtei.system.machine import LaneKind, both_lanes

LANES = [both_lanes(2), (LaneKind.BULK,)]


@dataclass(eq=False)
class Leaving:
    """A caller who leaves, from another thread, once it has been asked `looks` times whether it
    still waits."""

    looks: Iterator[int]
    heads: frozenset[Head] = frozenset({Head.DENSE})
    added_ns: int = 0
    done: bool = field(default=False)

    @property
    def cancelled(self):
        return next(self.looks, None) is None


def text(*ids):
    return Encoding(np.array(ids, dtype=np.int64))


@pytest.mark.parametrize("looks", range(6))
def test_who_leaves_while_the_queue_is_looked_through_is_in_it_or_out_of_it(looks):
    queue = FairQueue()
    encodings = [text(1, 2), text(3), text(4, 5, 6)]
    for place, caller in enumerate(
        [Leaving(iter(range(0))), Leaving(iter(range(looks))), Leaving(iter(range(100)))]
    ):
        queue.add(caller, [place], encodings)
    for _ in range(3):
        head = queue.head(10)
        assert len(head) == len(queue)
        assert queue.tokens == sum(map(len, head))
    queue.remove(head)
    assert (len(queue), queue.tokens) == (0, 0)
    assert queue.head(10) == []
    again = Leaving(iter(range(100)))
    # None of them waits there already
    queue.add(again, [0, 1, 2], encodings)
    assert (len(queue), queue.shared) == (3, 0)


@dataclass(eq=False)
class Staying:
    """A caller who waits as long as it takes."""

    heads: frozenset[Head] = frozenset({Head.DENSE})
    added_ns: int = 0
    cancelled: bool = False
    done: bool = False


def turns(queue):
    """First ids of all that waits, in the order in which they ride."""
    return [int(waiting.encoding.input_ids[0]) for waiting in queue.head(len(queue))]


def test_a_text_that_waits_for_another_takes_the_earlier_turn_of_the_two():
    queue, bulk, query = FairQueue(), Staying(), Staying()
    queue.add(bulk, range(30), [text(number, 0) for number in range(30)])
    queue.add(query, [0, 1], [text(29, 0), text(28, 0)])
    assert turns(queue) == [0, 29, 1, 28, *range(2, 28)]
    assert (len(queue), queue.tokens, queue.shared) == (30, 60, 2)
    first = queue.head(2)[1]
    assert [caller for caller, _ in first.callers] == [bulk, query]
    # Whose turn is early enough stays where it is
    queue.add(Staying(), [0], [text(0, 0)])
    assert turns(queue) == [0, 29, 1, 28, *range(2, 28)]
    queue.remove(queue.head(30))
    assert (len(queue), queue.tokens) == (0, 0)


@dataclass
class Witness:
    """What the bound says of one request, counted from what was seen alone: arrivals, batches and
    callers who left."""

    tokens: int
    left: int
    overtaken: int = 0


ARRIVAL = st.tuples(
    st.just("arrival"), st.lists(st.sampled_from([2, 5, 30, 60, 120]), min_size=1, max_size=3)
)
TAKE = st.tuples(st.just("take"), st.sampled_from([*LaneKind]))
LEAVE = st.tuples(st.just("leave"), st.integers(0, 40))


@given(
    st.lists(ARRIVAL | TAKE | LEAVE, max_size=60),
    st.sampled_from([*Padding]),
    st.integers(1, 300),
    st.sampled_from(LANES),
)
def test_what_comes_later_overtakes_a_request_by_twice_its_tokens_at_most(
    events, padding, budget, lanes
):
    core = EngineCore(max_tokens=budget, positions=Positions(), padding=padding, lanes=lanes)
    first = itertools.count()
    # In order of arrival
    open_requests = {}
    for event, value in [*events, *[("take", kind) for kind in lanes] * 400]:
        if event == "arrival":
            encodings = [text(next(first), *range(length - 1)) for length in value]
            open_requests[core.add(encodings, frozenset({Head.DENSE}))] = Witness(
                sum(value), len(value)
            )
        elif event == "leave" and open_requests:
            leaving = [*open_requests][value % len(open_requests)]
            leaving.cancelled = True
            del open_requests[leaving]
        elif event == "take" and value in lanes and (batch := core.take(kind=value)) is not None:
            taken = Counter(request for request, _ in batch.callers)
            tokens = Counter()
            for (request, _), length in zip(
                batch.callers, batch.packed.lengths.tolist(), strict=True
            ):
                tokens[request] += length
            for request, number in taken.items():
                open_requests[request].left -= number
            order = [*open_requests]
            for place, request in enumerate(order):
                witness = open_requests[request]
                witness.overtaken += sum(tokens[later] for later in order[place + 1 :])
                assert not witness.left or witness.overtaken <= OVERTAKEN * witness.tokens
            for request in [request for request in order if not open_requests[request].left]:
                del open_requests[request]
    # Lanes of both kinds that go on asking serve everybody
    assert not open_requests


def end(core, batch):
    core.give(batch, batch.split(HeadOutputs(dense=np.zeros((len(batch.packed), 1), np.float32))))


@pytest.mark.parametrize("padding", [Padding.NONE, Padding.ATTENTION])
def test_queries_that_have_waited_enough_share_a_pass(padding):
    core = EngineCore(max_tokens=128, positions=Positions(), padding=padding, lanes=both_lanes(2))
    first, sizes, requests = itertools.count(), [], 0
    # 32 callers, of whom each asks again once it is answered
    for _ in range(200):
        for _ in range(32 - requests):
            core.add(
                [text(next(first), *range(5 + 7 * (next(first) % 4)))], frozenset({Head.DENSE})
            )
        requests = 32
        batch = core.take(0, LaneKind.EXPRESS)
        requests -= len(batch.packed)
        end(core, batch)
        sizes.append(len(batch.packed.input_ids))
    assert np.mean(sizes) >= 64


@pytest.mark.parametrize("seed", range(2))
def test_a_query_beside_four_bulk_requests_waits_for_no_bulk_lane(seed):
    draw, first = random.Random(seed), itertools.count()
    core = EngineCore(
        max_tokens=1024, positions=Positions(), padding=Padding.ATTENTION, lanes=both_lanes(2)
    )

    def add(lengths):
        return core.add(
            [text(next(first), *[1] * (length - 1)) for length in lengths], frozenset({Head.DENSE})
        )

    def bulk():
        return add(
            [
                draw.randint(5, 30) if draw.random() < 0.7 else draw.randint(100, 250)
                for _ in range(32)
            ]
        )

    requests, running = [bulk() for _ in range(4)], deque()
    for query in range(400):
        # A bulk lane is done
        if query % 10 == 0:
            if len(running) == 2:
                end(core, running.popleft())
            requests = [bulk() if request.done else request for request in requests]
            while len(running) < 2 and (batch := core.take(0, LaneKind.BULK)) is not None:
                running.append(batch)
        add([draw.randint(5, 30)])
        batch = core.take(0, LaneKind.EXPRESS)
        # Bulk work did not take all that may overtake the bulk request that came first
        assert batch is not None
        end(core, batch)
