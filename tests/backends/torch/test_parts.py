"""A batch taken apart: nothing lost, nothing twice, positions as they were."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.backends.torch.parts import each, part
from hybridtei.batch import Encoding, Head, PackedBatch, Positions, pack

DENSE = frozenset({Head.DENSE})


def encodings(lengths: list[int]) -> list[Encoding]:
    ids = np.arange(10, 10 + sum(lengths), dtype=np.int64)
    pieces = np.split(ids, np.cumsum(lengths)[:-1])
    return [Encoding(piece, piece % 2, unseen=i % min(2, len(piece))) for i, piece in enumerate(pieces)]


def same(one: PackedBatch, other: PackedBatch) -> bool:
    none = np.zeros(len(one), dtype=np.int64)
    return (
        np.array_equal(one.input_ids, other.input_ids)
        and np.array_equal(one.position_ids, other.position_ids)
        and np.array_equal(one.token_type_ids, other.token_type_ids)
        and np.array_equal(one.cu_seqlens, other.cu_seqlens)
        and np.array_equal(none if one.unseen is None else one.unseen, none if other.unseen is None else other.unseen)
        and one.heads == other.heads
    )


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.data())
def test_a_part_is_what_packing_its_sequences_gives(lengths: list[int], data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(lengths) - 1))
    end = data.draw(st.integers(first + 1, len(lengths)))
    whole = pack(encodings(lengths), DENSE, Positions())
    assert same(part(whole, first, end), pack(encodings(lengths)[first:end], DENSE, Positions()))


def test_each_sequence_comes_once_and_in_order() -> None:
    whole = pack(encodings([3, 1, 5]), DENSE, Positions())
    assert [len(one.input_ids) for one in each(whole)] == [3, 1, 5]
    assert np.array_equal(np.concatenate([one.input_ids for one in each(whole)]), whole.input_ids)
