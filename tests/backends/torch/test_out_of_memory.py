"""A pass that is too large: computed in parts, and only what cannot fit fails."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.backends.fake import FakeBackend
from hybridtei.backends.torch.out_of_memory import TooLarge, split_on_oom
from hybridtei.batch import Encoding, Head, PackedBatch, pack
from hybridtei.errors import BackendError, PartlyFailed
from hybridtei.outputs import HeadOutputs
from tests.engine import small

SPEC = small.model_spec()
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=20)


def batch(lengths: list[int]) -> PackedBatch:
    draw = np.random.default_rng(0)
    return pack([Encoding(draw.integers(0, 50, n)) for n in lengths], SPEC.heads, SPEC.positions)


class Memory:
    """Room for so many tokens a pass; notes what it was asked for, and that room was made after each refusal."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.asked: list[int] = []
        self.refused = self.made_room = 0
        self._backend = FakeBackend(SPEC)

    def run(self, asked: PackedBatch) -> HeadOutputs:
        assert self.made_room == self.refused
        self.asked.append(len(asked.input_ids))
        if len(asked.input_ids) > self.tokens:
            self.refused += 1
            raise TooLarge("no room")
        return self._backend.forward(asked)

    def make_room(self) -> None:
        self.made_room += 1


@given(LENGTHS)
def test_in_parts_as_at_once(lengths: list[int]) -> None:
    whole, memory = batch(lengths), Memory(40)
    expected, found = FakeBackend(SPEC).forward(whole), split_on_oom(memory.run, whole, memory.make_room)
    np.testing.assert_array_equal(found.dense, expected.dense)
    assert found.tokens is not None
    assert expected.tokens is not None
    np.testing.assert_array_equal(found.tokens.values, expected.tokens.values)
    np.testing.assert_array_equal(found.tokens.offsets, expected.tokens.offsets)
    assert sum(asked for asked in memory.asked if asked <= 40) == sum(lengths)  # each token is computed once


@given(LENGTHS, st.integers(0, 39))
def test_only_what_does_not_fit_by_itself_fails(lengths: list[int], room: int) -> None:
    whole, memory = batch(lengths), Memory(room)
    fitting = [i for i, length in enumerate(lengths) if length <= room]
    if len(fitting) == len(lengths):
        assert len(split_on_oom(memory.run, whole, memory.make_room).dense) == len(lengths)
        return
    with pytest.raises(BackendError, match="does not fit into memory: no room") as caught:
        split_on_oom(memory.run, whole, memory.make_room)
    if not fitting:
        assert not isinstance(caught.value, PartlyFailed)
        return
    assert isinstance(caught.value, PartlyFailed)
    assert caught.value.rows == fitting
    np.testing.assert_array_equal(caught.value.outputs.dense, FakeBackend(SPEC).forward(whole).take(fitting).dense)


def test_what_fits_is_asked_for_once() -> None:
    memory = Memory(100)
    split_on_oom(memory.run, batch([30, 30]), memory.make_room)
    assert memory.asked == [60]
    assert memory.made_room == 0


def test_another_fault_is_not_tried_again() -> None:
    calls = 0

    def broken(_: PackedBatch) -> HeadOutputs:
        nonlocal calls
        calls += 1
        raise RuntimeError("a kernel failed")

    with pytest.raises(RuntimeError, match="a kernel failed"):
        split_on_oom(broken, batch([3, 4]), lambda: None)
    assert calls == 1


def test_the_heads_of_a_part_are_those_of_the_batch() -> None:
    seen: list[frozenset[Head]] = []
    backend = FakeBackend(SPEC)

    def run(asked: PackedBatch) -> HeadOutputs:
        seen.append(asked.heads)
        if len(asked) > 1:
            raise TooLarge("no room")
        return backend.forward(asked)

    split_on_oom(run, batch([3, 4]), lambda: None)
    assert set(seen) == {SPEC.heads}
