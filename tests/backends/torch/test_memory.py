"""The largest pass that fits, by arithmetic: found with few tries, never beyond what is allowed, never a guess untried."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.backends.torch.memory import FIRST_TOKENS, Peak, estimate, most_tokens, worst_batches
from hybridtei.errors import LoadError
from tests.engine import small


class Card:
    """Passes cost `fixed + per_token * tokens` bytes; beyond `room` they fail."""

    def __init__(self, fixed: int, per_token: int, room: int) -> None:
        self.fixed, self.per_token, self.room = fixed, per_token, room
        self.tried: list[int] = []

    def peak(self, tokens: int) -> int | None:
        self.tried.append(tokens)
        cost = self.fixed + self.per_token * tokens
        return cost if cost <= self.room else None


@given(st.integers(0, 10**6), st.integers(1, 10**5), st.integers(1, 8192), st.integers(1, 10**6), st.integers(1, 10**10))
def test_what_is_found_fits_and_was_tried(fixed: int, per_token: int, longest: int, limit: int, allowed: int) -> None:
    limit = max(limit, longest)
    card = Card(fixed, per_token, 2 * allowed)
    if fixed + per_token * longest > allowed:
        with pytest.raises(LoadError, match=f"an input of {longest} tokens does not fit"):
            most_tokens(card.peak, limit=limit, longest=longest, allowed=allowed)
        return
    found = most_tokens(card.peak, limit=limit, longest=longest, allowed=allowed)
    assert longest <= found <= limit
    assert found in card.tried
    assert fixed + per_token * found <= allowed
    best = min(limit, (allowed - fixed) // per_token)
    assert found >= 0.6 * best
    assert len(card.tried) < 40


def test_where_everything_fits_two_or_three_passes_are_enough() -> None:
    card = Card(10**6, 10**4, 10**12)
    assert most_tokens(card.peak, limit=16384, longest=512, allowed=10**12) == 16384
    assert card.tried == [512, FIRST_TOKENS, 16384]


def test_a_pass_that_fails_in_spite_of_the_estimate_halves_it() -> None:
    """Memory that grows with the square: the line promises too much."""

    def peak(tokens: int) -> int | None:
        return tokens**2 if tokens <= 10_000 else None

    found = most_tokens(peak, limit=100_000, longest=100, allowed=10**9)
    assert 2048 < found <= 10_000


def test_memory_that_does_not_grow_sets_no_bound() -> None:
    flat: Peak = lambda _: 5  # noqa: E731
    assert most_tokens(flat, limit=100_000, longest=10, allowed=10) == 100_000


def test_the_line_through_the_last_two() -> None:
    assert estimate([(100, 9), (1000, 1000), (2000, 2000)], 12_000) == 2000 + 9000


def test_the_worst_passes_hold_the_longest_and_the_most() -> None:
    spec = small.model_spec()
    long, many = worst_batches(spec, 100, 64)
    assert long.lengths.tolist() == [64, 36]
    assert many.lengths.tolist() == [8] * 12 + [4]
    assert long.heads == many.heads == spec.heads
    (only,) = worst_batches(spec, 8, 5000)
    assert only.lengths.tolist() == [8]
