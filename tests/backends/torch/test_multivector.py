"""Which tokens keep a vector, and what it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.backends.torch.pooled import multivector
from hybridtei.batch import kept_tokens, offsets_of
from tests import tolerances

SPECIAL = np.array([0, 2])
SEQUENCES = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=12), min_size=1, max_size=8)


def flat(sequences: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([token for sequence in sequences for token in sequence]), offsets_of([len(s) for s in sequences])


@given(SEQUENCES)
def test_the_first_token_has_no_vector_the_closing_one_does(sequences: list[list[int]]) -> None:
    kept, offsets = kept_tokens("first", *flat(sequences), SPECIAL)
    assert kept.tolist() == [place > 0 for sequence in sequences for place in range(len(sequence))]
    assert np.diff(offsets).tolist() == [len(sequence) - 1 for sequence in sequences]


@given(SEQUENCES)
def test_special_tokens_have_no_vector_wherever_they_stand(sequences: list[list[int]]) -> None:
    kept, offsets = kept_tokens("specials", *flat(sequences), SPECIAL)
    assert kept.tolist() == [token not in (0, 2) for sequence in sequences for token in sequence]
    assert np.diff(offsets).tolist() == [sum(token not in (0, 2) for token in sequence) for sequence in sequences]


@given(SEQUENCES)
def test_nothing_is_dropped_where_nothing_should_be(sequences: list[list[int]]) -> None:
    kept, offsets = kept_tokens("none", *flat(sequences), SPECIAL)
    assert kept.all()
    assert offsets.tolist() == flat(sequences)[1].tolist()


def test_a_sequence_of_one_token_has_no_vectors() -> None:
    kept, offsets = kept_tokens("first", *flat([[5], [0, 7, 2], [6]]), SPECIAL)
    assert offsets.tolist() == [0, 0, 2, 2]
    rows = multivector(torch.ones(5, 3), torch.as_tensor(kept), torch.ones(4, 3), None)
    assert rows.shape == (2, 4)


def test_no_vector_at_all_is_an_empty_array_of_the_right_width() -> None:
    kept, offsets = kept_tokens("first", *flat([[5], [6]]), SPECIAL)
    assert offsets.tolist() == [0, 0, 0]
    assert multivector(torch.ones(2, 3), torch.as_tensor(kept), torch.ones(4, 3), None).shape == (0, 4)


@pytest.mark.parametrize("bias", [True, False])
def test_kept_tokens_go_through_one_layer(bias: bool) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(6, 4, bias=bias)
    hidden, kept = torch.randn(9, 6), torch.arange(9) % 3 > 0
    ours = multivector(hidden, kept, layer.weight, layer.bias)
    torch.testing.assert_close(ours, layer(hidden)[kept], atol=tolerances.WEIGHTS["float32"], rtol=0)
    assert ours.dtype == torch.float32
