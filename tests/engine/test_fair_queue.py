"""The queue by itself: callers who leave while somebody looks. What `EngineCore` makes of it is in `test_core`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from hybridtei.batch import Encoding, Head
from hybridtei.engine.fairness import FairQueue


@dataclass
class Leaving:
    """A caller who leaves, from another thread, once it has been asked `looks` times whether it still waits."""

    looks: Iterator[int]
    heads: frozenset[Head] = frozenset({Head.DENSE})
    added_ns: int = 0
    done: bool = field(default=False)

    @property
    def cancelled(self) -> bool:
        return next(self.looks, None) is None


def text(*ids: int) -> Encoding:
    return Encoding(np.array(ids, dtype=np.int64))


@pytest.mark.parametrize("looks", range(6))
def test_who_leaves_while_the_queue_is_looked_through_is_in_it_or_out_of_it(looks: int) -> None:
    queue = FairQueue()
    encodings = [text(1, 2), text(3), text(4, 5, 6)]
    for place, caller in enumerate([Leaving(iter(range(0))), Leaving(iter(range(looks))), Leaving(iter(range(100)))]):
        queue.add(caller, [place], encodings)
    for _ in range(3):
        head = queue.head(10)
        assert len(head) == len(queue)
        assert queue.tokens == sum(map(len, head))
    queue.remove(head, range(len(head)))
    assert (len(queue), queue.tokens) == (0, 0)
    assert queue.head(10) == []
    again = Leaving(iter(range(100)))
    queue.add(again, [0, 1, 2], encodings)  # none of them waits there already
    assert (len(queue), queue.shared) == (3, 0)


@dataclass(eq=False)
class Staying:
    """A caller who waits as long as it takes."""

    heads: frozenset[Head] = frozenset({Head.DENSE})
    added_ns: int = 0
    cancelled: bool = False
    done: bool = False


def turns(queue: FairQueue) -> list[int]:
    """First ids of all that waits, in the order in which they ride."""
    return [int(waiting.encoding.input_ids[0]) for waiting in queue.head(len(queue))]


def test_a_text_that_waits_for_another_takes_the_earlier_turn_of_the_two() -> None:
    queue, bulk, query = FairQueue(), Staying(), Staying()
    queue.add(bulk, range(30), [text(number, 0) for number in range(30)])
    queue.add(query, [0, 1], [text(29, 0), text(28, 0)])
    assert turns(queue) == [0, 29, 1, 28, *range(2, 28)]
    assert (len(queue), queue.tokens, queue.shared) == (30, 60, 2)
    first = queue.head(2)[1]
    assert [caller for caller, _ in first.callers] == [bulk, query]
    queue.add(Staying(), [0], [text(0, 0)])  # whose turn is early enough stays where it is
    assert turns(queue) == [0, 29, 1, 28, *range(2, 28)]
    queue.remove(queue.head(30), range(30))
    assert (len(queue), queue.tokens) == (0, 0)
