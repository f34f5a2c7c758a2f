"""Which sequences that share a prefix go together, and how they count."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.small.fake_backend import FakeBackend
from hybridtei.batch import Padding
from tests.inference.engine.test_core import (
    DENSE,
    SPEC,
    TOKENS,
    assert_alone_is_the_same,
    core,
    different,
    drain,
    encoding,
    requests,
)


def sharing_prefix(count, prefix, own, first=0):
    """`n` different encodings with the same first tokens."""
    begin = np.full(prefix, first, dtype=np.int64)
    return [
        replace(one, input_ids=np.concatenate([begin, one.input_ids]), shared=prefix)
        for one in different(count, own)
    ]


def test_what_shares_a_prefix_goes_together_and_counts_without_it():
    queue = core(50, shared_tokens=10_000)
    queue.add(sharing_prefix(8, 100, 5), DENSE)
    batch = queue.take()
    assert (len(batch.packed), batch.packed.prefix) == (8, 100)
    assert queue.take() is None


@pytest.mark.parametrize("padding", [*Padding])
def test_what_has_another_prefix_or_none_waits_for_its_turn(padding):
    queue = core(400, shared_tokens=10_000, padding=padding)
    requests = [
        queue.add(one, DENSE)
        for one in (sharing_prefix(3, 20, 5), sharing_prefix(3, 20, 5, first=1), different(3, 25))
    ]
    batches = [queue.take() for _ in requests]
    assert queue.take() is None
    for batch in batches:
        assert len(batch.packed) == 3
        assert len({request for request, _ in batch.callers}) == 1
        prefix = batch.packed.prefix
        assert prefix == (0 if batch.callers[0][0] is requests[2] else 20)
        starts = batch.packed.cu_seqlens[:-1]
        assert (
            len({batch.packed.input_ids[start : start + prefix].tobytes() for start in starts}) == 1
        )


def test_no_pass_is_left_for_less_than_the_prefix():
    queue = core(50, shared_tokens=10_000)
    queue.add(sharing_prefix(32, 100, 5), DENSE)
    assert [len(queue.take().packed) for _ in range(2)] == [10, 22]


def test_what_attention_reads_again_is_bounded():
    queue = core(50, shared_tokens=4 * 105)
    queue.add(sharing_prefix(8, 100, 5), DENSE)
    assert [len(queue.take().packed) for _ in range(2)] == [4, 4]


def test_a_backend_that_computes_no_prefix_once_gets_none():
    queue = core(50)
    queue.add(sharing_prefix(8, 100, 5), DENSE)
    batch = queue.take()
    assert (len(batch.packed), batch.packed.prefix) == (1, 0)


@given(requests, st.integers(1, 100))
def test_sequences_that_share_come_back_in_their_place(lengths, budget):
    queue, backend = core(budget, shared_tokens=64), FakeBackend(SPEC)
    encodings = [
        [replace(encoding(n + 3, i), shared=3) for n in request]
        for i, request in enumerate(lengths)
    ]
    tickets = [queue.add(request, DENSE | TOKENS) for request in encodings]
    drain(queue, backend)
    for ticket in tickets:
        if ticket.encodings:
            assert_alone_is_the_same(ticket.encodings, ticket.outputs())
