"""A large pass that fits: found with few tries, never beyond what is allowed, never a guess
untried. A pass that is too large: computed in parts, and only what cannot fit fails. What travels
between host and device arrives as it left."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.small.fake_backend import FakeBackend
from hybridtei.batch import pack
from hybridtei.errors import BackendError, LoadError, PartlyFailed
from hybridtei.inference.backends.torch.memory import (
    TooLarge,
    max_tokens,
    of_its_own,
    split_on_oom,
    start_copy,
    to_device,
    worst_batches,
)
from tests.inference.backends.outputs import on_gpu, random_encodings
from tests.inference.engine import small
from tests.near import same


class Card:
    """Passes cost `fixed + per_token * tokens` bytes; beyond `room` they fail."""

    def __init__(self, fixed, per_token, room):
        self.fixed, self.per_token, self.room = fixed, per_token, room
        self.tried = []

    def peak(self, tokens):
        self.tried.append(tokens)
        cost = self.fixed + self.per_token * tokens
        return cost if cost <= self.room else None


@given(
    st.integers(0, 10**6),
    st.integers(1, 10**5),
    st.integers(1, 8192),
    st.integers(1, 10**5),
    st.integers(1, 10**10),
)
def test_what_is_found_fits_and_was_tried(fixed, per_token, longest, limit, allowed):
    limit = max(limit, longest)
    card = Card(fixed, per_token, 2 * allowed)
    if fixed + per_token * longest > allowed:
        with pytest.raises(LoadError, match=f"an input of {longest} tokens does not fit"):
            max_tokens(card.peak, limit=limit, longest=longest, allowed=allowed)
        assert card.tried[-1] == longest
        return
    found = max_tokens(card.peak, limit=limit, longest=longest, allowed=allowed)
    assert longest <= found <= limit
    assert found == card.tried[-1]
    assert fixed + per_token * found <= allowed
    best = min(limit, (allowed - fixed) // per_token)
    assert found >= 0.7 * best - 1
    assert len(card.tried) <= 42


def test_where_everything_fits_one_pass_is_enough():
    card = Card(10**6, 10**4, 10**12)
    assert max_tokens(card.peak, limit=16384, longest=512, allowed=10**12) == 16384
    assert card.tried == [16384]


def test_the_worst_passes_hold_the_longest_and_the_most():
    spec = small.model_spec()
    long, many = worst_batches(spec, 100, 64)
    assert long.lengths.tolist() == [64, 36]
    assert many.lengths.tolist() == [8] * 12 + [4]
    assert long.heads == many.heads == spec.heads
    (only,) = worst_batches(spec, 8, 5000)
    assert only.lengths.tolist() == [8]


SPEC = small.model_spec()
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=20)


def batch(lengths):
    return pack(random_encodings(SPEC, lengths), SPEC.heads, SPEC.positions)


class Memory:
    """Room for so many tokens a pass; notes what it was asked for, and that room was made after
    each refusal."""

    def __init__(self, tokens):
        self.tokens = tokens
        self.asked = []
        self.refused = self.made_room = 0
        self._backend = FakeBackend(SPEC)

    def run(self, asked):
        assert self.made_room == self.refused
        self.asked.append(len(asked.input_ids))
        if len(asked.input_ids) > self.tokens:
            self.refused += 1
            raise TooLarge("no room")
        return self._backend.forward(asked)

    def make_room(self):
        self.made_room += 1


@given(LENGTHS)
def test_in_parts_as_at_once(lengths):
    whole, memory = batch(lengths), Memory(40)
    expected, found = (
        FakeBackend(SPEC).forward(whole),
        split_on_oom(memory.run, whole, memory.make_room),
    )
    same(found.dense, expected.dense)
    same(found.tokens.values, expected.tokens.values)
    same(found.tokens.offsets, expected.tokens.offsets)
    # Each token is computed once
    assert sum(asked for asked in memory.asked if asked <= 40) == sum(lengths)


@given(LENGTHS, st.integers(0, 39))
def test_only_what_does_not_fit_by_itself_fails(lengths, room):
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
    same(caught.value.outputs.dense, FakeBackend(SPEC).forward(whole).take(fitting).dense)


def test_another_fault_is_not_tried_again():
    calls = 0

    def broken(_):
        nonlocal calls
        calls += 1
        raise RuntimeError("a kernel failed")

    with pytest.raises(RuntimeError, match="a kernel failed"):
        split_on_oom(broken, batch([3, 4]), lambda: None)
    assert calls == 1


CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64])
def test_what_arrived_becomes_single_precision_without_a_change_and_of_its_own(
    dtype,
):
    arrived = (1000 * torch.randn(50, generator=torch.Generator().manual_seed(0))).to(dtype)
    found = of_its_own(arrived)
    assert found.dtype == (np.int64 if dtype == torch.int64 else np.float32)
    assert torch.equal(torch.as_tensor(found).to(dtype), arrived)
    arrived.zero_()
    assert found.any()


def test_on_a_cpu_nothing_is_copied():
    ids = np.arange(5)
    assert np.shares_memory(to_device({"ids": ids}, CPU)["ids"].numpy(), ids)
    states = torch.randn(4)
    assert np.shares_memory(start_copy({"states": states}, CPU)()["states"], states.numpy())


@on_gpu
def test_there_and_back_on_a_gpu():
    device = torch.device("cuda")
    arrays = {"ids": np.arange(7), "offsets": np.array([0, 3, 7])}
    there = to_device(arrays, device)
    half = {**there, "half": torch.full((2, 2), 0.5, dtype=torch.float16, device=device)}
    found = start_copy(half, device)()
    for name, array in arrays.items():
        same(found[name], array)
    same(found["half"], np.full((2, 2), 0.5, dtype=np.float32))
