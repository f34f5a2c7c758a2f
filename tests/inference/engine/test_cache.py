"""Laws of the result cache: within its bound, the least recently used goes first, and an answer is
what was kept."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.batch import Encoding, Head, Ragged
from hybridtei.inference.engine.core import ENTRY_BYTES, ResultCache
from hybridtei.outputs import HeadOutputs, SparseVectors

DENSE = frozenset({Head.DENSE})


def encoding(number):
    return Encoding(np.array([number], dtype=np.int64))


def row(value, width=4):
    return HeadOutputs(dense=np.full((1, width), value, dtype=np.float32))


ENTRY = ENTRY_BYTES + 8 + 16


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60), st.integers(0, 6 * ENTRY)
)
def test_it_is_an_lru_within_its_bytes(steps, most):
    cache = ResultCache(most)
    order = []
    for is_look, number in steps:
        if is_look:
            found = cache.find(encoding(number), DENSE)
            assert (found is not None) == (number in order)
            if found is not None:
                assert found.dense[0, 0] == number
                order.remove(number)
                order.append(number)
        elif most >= ENTRY:
            cache.keep(encoding(number), DENSE, row(number))
            order = [*(kept for kept in order if kept != number), number][-(most // ENTRY) :]
        else:
            cache.keep(encoding(number), DENSE, row(number))
        assert len(cache) == len(order)
        assert cache.bytes == len(order) * ENTRY <= max(most, 0)


def test_what_is_wanted_besides_is_computed_again_and_then_kept():
    cache = ResultCache(100_000)
    cache.keep(encoding(1), DENSE, row(1))
    both = DENSE | {Head.TOKENS}
    assert cache.find(encoding(1), both) is None
    tokens = Ragged(np.ones((1, 4), dtype=np.float32), np.array([0, 1]))
    cache.keep(encoding(1), both, HeadOutputs(dense=row(1).dense, tokens=tokens))
    found = cache.find(encoding(1), both)
    assert found.dense is not None
    assert found.tokens is not None
    assert cache.find(encoding(1), DENSE).tokens is None
    sparse = SparseVectors(np.array([1]), np.ones(1, dtype=np.float32), np.array([0, 1]), 10)
    # Every array counts
    assert HeadOutputs(splade=sparse, tokens=tokens).nbytes == 8 + 4 + 16 + 16 + 16
    assert len(cache) == 1


def test_the_adapter_is_part_of_what_is_asked():
    cache = ResultCache(100_000)
    of = [replace(encoding(1), adapter=number) for number in range(3)]
    for number in (0, 1):
        cache.keep(of[number], DENSE, row(number))
    assert [
        None if found is None else found.dense[0, 0]
        for found in (cache.find(one, DENSE) for one in of)
    ] == [0, 1, None]
