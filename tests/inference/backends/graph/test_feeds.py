"""The inputs of graphs: every token has its place, and no query attends to a wrong key."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.batch import Encoding, Head, Padding, Positions, pack
from hybridtei.inference.backends.graph.host import (
    end_to_end,
    in_rectangle,
    padding_of,
)

INPUTS = frozenset({"input_ids", "position_ids", "rows", "places", "seen", "token_type_ids"})
lengths_of = st.lists(st.integers(1, 12), min_size=1, max_size=9)


def batch_of(lengths, unseen=0):
    starts = np.cumsum([0, *lengths])
    texts = [
        Encoding(np.arange(start, start + size), unseen=min(unseen, size - 1))
        for start, size in zip(starts, lengths, strict=False)
    ]
    return pack(texts, frozenset({Head.TOKENS}), Positions())


def larger(sizes):
    tokens, rows, columns = sizes
    return tokens + 3, rows + 2, columns + 1


def attended(feed):
    """The result of a graph with one layer of sums: for each token the sum of the ids that it
    attends to."""
    rectangle = feed["input_ids"][feed["rows"]].reshape(feed["seen"].shape)
    sums = np.where(feed["seen"] != 0, rectangle, 0).sum(1, keepdims=True) + 0 * rectangle
    return np.stack([feed["input_ids"], sums.reshape(-1)[feed["places"]]], axis=1).astype(
        np.float32
    )


@pytest.mark.parametrize("grown", [lambda sizes: sizes, larger], ids=["as it is", "larger"])
@given(lengths=lengths_of, unseen=st.integers(0, 4))
def test_a_token_sees_its_own_text_without_what_is_unseen(grown, lengths, unseen):
    batch = batch_of(lengths, unseen)
    found = end_to_end(batch, INPUTS, attended, grown)
    assert found[:, 0].tolist() == batch.input_ids.tolist()
    bounds = batch.cu_seqlens.tolist()
    hidden = [0] * len(lengths) if batch.unseen is None else batch.unseen.tolist()
    sums = [
        batch.input_ids[low : high - none].sum()
        for low, high, none in zip(bounds, bounds[1:], hidden, strict=False)
    ]
    assert found[:, 1].tolist() == np.repeat(sums, lengths).tolist()


@given(lengths=lengths_of)
def test_every_row_of_a_grown_rectangle_sees_something(lengths):
    feeds = []
    end_to_end(
        batch_of(lengths), INPUTS, lambda feed: (feeds.append(feed), attended(feed))[1], larger
    )
    (feed,) = feeds
    assert (feed["seen"].sum(1) > 0).all()
    assert len(feed["rows"]) == feed["seen"].size
    assert {
        len(feed[name]) for name in ("input_ids", "position_ids", "places", "token_type_ids")
    } == {sum(lengths) + 3}


@given(lengths=lengths_of)
def test_a_rectangle_gives_the_tokens_back_in_order(lengths):
    batch = batch_of(lengths)
    hidden = in_rectangle(
        batch,
        frozenset({"input_ids"}),
        0,
        lambda feed: feed["input_ids"][..., None].astype(np.float32),
    )
    assert hidden[:, 0].tolist() == batch.input_ids.tolist()


def test_the_inputs_tell_what_a_graph_takes():
    assert padding_of(INPUTS) is Padding.ATTENTION
    assert padding_of(frozenset({"input_ids", "attention_mask"})) is Padding.ALL
