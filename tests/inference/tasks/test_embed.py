"""What one request asks of a pass that others share, and what it gets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.batch import EMBEDDINGS, Head, pack
from hybridtei.errors import InvalidInput, UnsupportedHead
from hybridtei.inference.tasks.embed import Embed
from hybridtei.inference.tasks.pooling import MultivectorBudget
from hybridtei.outputs import Embeddings, HeadOutputs
from tests.fake_backend import FakeBackend
from tests.inference.engine import small

MODEL = small.model()
EVERY = EMBEDDINGS
COLUMNS = ("dense", "sparse", "multivector", "tokens")
texts = st.lists(st.lists(st.sampled_from(small.WORDS), min_size=1, max_size=9).map(" ".join), min_size=1, max_size=4)
heads = st.frozensets(st.sampled_from(sorted(EVERY)), min_size=1)


def answer(task: Embed, *, computed: frozenset[Head] | None = None) -> Embeddings:
    encodings = task.prepare(MODEL)
    outputs: HeadOutputs = FakeBackend(MODEL.spec).forward(pack(encodings, computed or task.heads, MODEL.spec.positions))
    return task.finish(MODEL, encodings, outputs)


@given(texts, heads)
def test_it_gets_what_it_asked_for_whatever_else_was_computed(inputs, wanted):
    task = Embed(inputs, wanted)
    alone, shared = answer(task), answer(task, computed=EVERY)
    for column in COLUMNS:
        assert (getattr(shared, column) is not None) == (Head(column) in wanted) == (getattr(alone, column) is not None)
    assert len(shared) == len(inputs)
    if Head.DENSE in wanted:
        np.testing.assert_array_equal(alone.dense, shared.dense)


def test_merged_tokens_are_words():
    everything, budget = frozenset({Head.MULTIVECTOR}), MultivectorBudget(max_tokens=3)
    rows = answer(Embed(["one, two, three"], everything)).multivector
    assert rows.lengths.tolist() == [6]
    merged = answer(Embed(["one, two, three", "one,"], everything, multivector=budget)).multivector
    assert merged.lengths.tolist() == [3, 3], "what fits is kept whole"
    np.testing.assert_allclose(merged.row(0), rows.values[[0, 2, 4]], atol=1e-6)


@pytest.mark.parametrize(
    ("task", "error", "message"),
    [
        (Embed(["x"], frozenset({Head.DENSE}), dimensions=0), InvalidInput, "should be positive"),
        (Embed(["x"], frozenset({Head.DENSE}), dimensions=-1), InvalidInput, "should be positive"),
        (
            Embed(["x"], frozenset({Head.MULTIVECTOR, Head.DENSE})),
            UnsupportedHead,
            r"no `multivector` output\. It has: dense, tokens",
        ),
    ],
)
def test_what_is_refused_unread(task, error, message):
    with pytest.raises(error, match=message):
        task.check(small.dense_only())


@pytest.mark.parametrize(
    ("wanted", "width"),
    [({Head.DENSE}, small.HIDDEN), ({Head.MULTIVECTOR}, small.DIM), ({Head.DENSE, Head.MULTIVECTOR}, small.HIDDEN)],
)
def test_dimensions_end_at_the_widest_vector(wanted, width):
    assert len(Embed(["x"], frozenset(wanted), dimensions=width).prepare(MODEL)) == 1
    with pytest.raises(InvalidInput, match="smaller than the maximum embedding dimension"):
        Embed(["x"], frozenset(wanted), dimensions=width + 1).prepare(MODEL)
