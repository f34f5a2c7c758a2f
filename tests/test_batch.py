"""Packing, padding and position ids."""

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.roberta.modeling_roberta import RobertaEmbeddings

from hybridtei.batch import (
    Encoding,
    Head,
    LocatedEncoding,
    Positions,
    Ragged,
    offsets_of,
    pack,
    pad,
    part,
    runs,
    seen_mask,
)

SEQUENCES = st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=12), min_size=1, max_size=10)
HEADS = frozenset({Head.DENSE})
PADDING = 1


def encodings(sequences):
    return [Encoding(np.array(sequence)) for sequence in sequences]


@given(SEQUENCES)
def test_pack_then_split_is_identity(sequences):
    batch = pack(encodings(sequences), HEADS, Positions())
    assert [row.tolist() for row in Ragged(batch.input_ids, batch.cu_seqlens)] == sequences
    assert len(batch) == len(sequences)
    assert batch.lengths.tolist() == [len(sequence) for sequence in sequences]
    assert batch.max_seqlen == max(map(len, sequences))
    assert batch.heads == HEADS
    assert batch.token_type_ids is None


@given(SEQUENCES, st.integers(0, 3))
def test_positions_count_from_the_offset_in_each_sequence(sequences, offset):
    batch = pack(encodings(sequences), HEADS, Positions(offset))
    assert batch.position_ids.tolist() == [
        offset + place for sequence in sequences for place in range(len(sequence))
    ]


@given(SEQUENCES)
def test_positions_of_the_roberta_line_equal_transformers(sequences):
    batch = pack(encodings(sequences), HEADS, Positions(PADDING + 1, PADDING))
    count = RobertaEmbeddings.create_position_ids_from_input_ids
    expected = [
        place
        for sequence in sequences
        for place in count(torch.tensor([sequence]), PADDING)[0].tolist()
    ]
    assert batch.position_ids.tolist() == expected


def test_every_token_has_its_texts_adapter():
    texts = [
        Encoding(np.arange(2), adapter=3),
        Encoding(np.arange(3)),
        Encoding(np.arange(1), adapter=1),
    ]
    batch = pack(texts, HEADS, Positions())
    assert batch.adapter_ids.tolist() == [3, 3, 0, 0, 0, 1]
    assert pack(texts[1:2], HEADS, Positions()).adapter_ids is None


@given(SEQUENCES, st.integers(-1, 5))
def test_pad_then_mask_is_identity(sequences, fill):
    batch = pack(encodings(sequences), HEADS, Positions())
    padded, mask = pad(batch.input_ids, batch.cu_seqlens, fill)
    assert padded.shape == mask.shape == (len(sequences), batch.max_seqlen)
    assert padded[mask].tolist() == batch.input_ids.tolist()
    assert (padded[~mask] == fill).all()
    assert [row[: len(sequence)].all() for row, sequence in zip(mask, sequences, strict=True)] == [
        True
    ] * len(sequences)


def test_token_types_are_zero_for_those_without_where_one_has_them():
    batch = pack(
        [Encoding(np.array([1, 2])), Encoding(np.array([3, 4]), np.array([0, 1]))],
        HEADS,
        Positions(),
    )
    assert batch.token_type_ids.tolist() == [0, 0, 0, 1]


def test_the_longest_of_nothing_is_zero():
    batch = pack(encodings([[1]]), HEADS, Positions())
    assert batch.max_seqlen == 1
    assert (
        type(batch)(
            batch.input_ids[:0], batch.position_ids[:0], None, offsets_of([]), HEADS
        ).max_seqlen
        == 0
    )


def test_tokens_that_nobody_sees_lie_at_the_ends():
    texts = [
        Encoding(np.arange(5), unseen=2),
        Encoding(np.arange(3)),
        Encoding(np.arange(4), unseen=3),
    ]
    batch = pack(texts, HEADS, Positions())
    assert batch.unseen.tolist() == [2, 0, 3]
    _, mask = pad(batch.input_ids, batch.cu_seqlens, 0)
    assert seen_mask(mask, batch).sum(axis=1).tolist() == [3, 3, 1]
    plain = pack([Encoding(np.arange(5))], HEADS, Positions())
    assert plain.unseen is None
    _, mask = pad(plain.input_ids, plain.cu_seqlens, 0)
    assert seen_mask(mask, plain) is mask


def test_what_a_model_computes_alike_has_one_key_and_nothing_else_has_it():
    ids, zeros, ones = np.arange(4), np.zeros(4, dtype=np.int64), np.ones(4, dtype=np.int64)
    alike = {Encoding(ids).key, Encoding(ids, zeros).key}
    located = LocatedEncoding(
        ids, text="a", offsets=np.zeros((4, 2), dtype=np.int64), special=np.zeros(4, dtype=bool)
    )
    assert alike == {located.key}
    others = [
        Encoding(ids, ones),
        Encoding(ids, unseen=1),
        Encoding(ids, unseen=2),
        Encoding(ids, ones, unseen=1),
        *(
            replace(other, adapter=number)
            for number in (1, 2)
            for other in (Encoding(ids), Encoding(ids, ones, unseen=1))
        ),
        *(Encoding(ids, kind, unseen, 1) for kind, unseen in ((ones, 0), (None, 1))),
        Encoding(ids[:3]),
    ]
    assert len({*alike, *(other.key for other in others)}) == 1 + len(others)


ROWS = st.lists(st.lists(st.floats(width=32, allow_nan=False), max_size=6), min_size=1, max_size=8)


def ragged(rows):
    return Ragged.from_rows([np.array(row, dtype=np.float32) for row in rows])


def lists(value):
    return [row.tolist() for row in value]


@given(ROWS)
def test_rows_come_out_as_they_went_in(rows):
    value = ragged(rows)
    assert lists(value) == rows
    assert len(value) == len(rows)
    assert value.lengths.tolist() == [len(row) for row in rows]


@given(ROWS, st.data())
def test_take_picks_rows_in_the_order_asked_for(rows, data):
    picked = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=12))
    assert lists(ragged(rows).take(picked)) == [rows[i] for i in picked]


@given(ROWS, ROWS)
def test_concat_joins_rows(one, other):
    joined = Ragged.concat([ragged(one), ragged(other)])
    assert lists(joined) == one + other
    assert lists(joined.take(range(len(one), len(one) + len(other)))) == other


def test_rows_may_have_dimensions_of_their_own():
    rows = [np.arange(6.0).reshape(2, 3), np.zeros((0, 3)), np.ones((1, 3))]
    value = Ragged.from_rows(rows)
    assert value.values.shape == (3, 3)
    assert [row.shape for row in value.take([2, 1])] == [(1, 3), (0, 3)]


def test_a_row_is_a_view():
    value = ragged([[1.0, 2.0], [3.0]])
    assert np.shares_memory(value.row(1), value.values)
    assert not np.shares_memory(value.take([1]).values, value.values)


def test_offsets_begin_with_zero_and_are_one_more():
    assert offsets_of([]).tolist() == [0]
    assert offsets_of([3, 0, 2]).tolist() == [0, 3, 3, 5]


DENSE = frozenset({Head.DENSE})


def counted(lengths):
    ids = np.arange(10, 10 + sum(lengths), dtype=np.int64)
    pieces = np.split(ids, np.cumsum(lengths)[:-1])
    return [
        Encoding(piece, piece % 2, unseen=i % min(2, len(piece))) for i, piece in enumerate(pieces)
    ]


def same(one, other):
    none = np.zeros(len(one), dtype=np.int64)
    return (
        np.array_equal(one.input_ids, other.input_ids)
        and np.array_equal(one.position_ids, other.position_ids)
        and np.array_equal(one.token_type_ids, other.token_type_ids)
        and np.array_equal(one.cu_seqlens, other.cu_seqlens)
        and np.array_equal(
            none if one.unseen is None else one.unseen,
            none if other.unseen is None else other.unseen,
        )
        and one.heads == other.heads
    )


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.data())
def test_a_part_is_what_packing_its_sequences_gives(lengths, data):
    first = data.draw(st.integers(0, len(lengths) - 1))
    end = data.draw(st.integers(first + 1, len(lengths)))
    whole = pack(counted(lengths), DENSE, Positions())
    assert same(part(whole, first, end), pack(counted(lengths)[first:end], DENSE, Positions()))


@given(st.lists(st.integers(0, 9)), st.integers(1, 20), st.none() | st.integers(1, 4))
def test_runs_hold_all_items_in_order_and_none_takes_one_more(sizes, most, count):
    found = list(runs(sizes, most, count))
    assert [place for begin, end in found for place in range(begin, end)] == list(range(len(sizes)))
    for begin, end in found:
        assert end - begin == 1 or sum(sizes[begin:end]) <= most
        assert count is None or end - begin <= count
        if end < len(sizes) and end - begin != count:
            assert sum(sizes[begin : end + 1]) > most
