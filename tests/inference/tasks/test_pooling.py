"""Documents' multi-vectors, merged and quantised: laws, and sentence-transformers' pooling as the
oracle."""

import string

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling

from hybridtei.batch import Head, Ragged
from hybridtei.config import EngineConfig, ModelConfig
from hybridtei.errors import InvalidInput
from hybridtei.inference.load import find_model, text_model
from hybridtei.inference.tasks import pooling
from hybridtei.inference.tasks.embed import Embed
from hybridtei.inference.tasks.pooling import (
    MultivectorBudget,
    budgeted,
    clusters,
    merge,
    pooled,
    unpacked,
    without_marks,
)
from hybridtei.inference.tasks.rerank import maxsim
from hybridtei.models.checkpoint.late import TokenPooling
from hybridtei.options import EmbedOptions
from hybridtei.outputs import HeadOutputs, unit
from tests.near import near, same


def rows_of(count, seed=0, width=16):
    return np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32)


def document(rows):
    """The rows of one document."""
    return Ragged(rows, np.array([0, len(rows)]))


@pytest.fixture
def seen(monkeypatch):
    """How many rows were clustered together each time."""
    sizes = []

    def noting(rows, count):
        sizes.append(len(rows))
        return clusters(rows, count)

    monkeypatch.setattr(pooling, "clusters", noting)
    return sizes


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 60), st.integers(1, 70), st.integers(0, 9))
def test_no_more_rows_than_the_budget_and_nothing_is_lost(count, most, seed):
    rows = rows_of(count, seed)
    merged = merge(rows, most)
    assert len(merged) == min(count, most)
    near(merged.sum(axis=0), rows.sum(axis=0), 1e-3)


def test_long_documents_are_merged_in_blocks(seen, monkeypatch):
    monkeypatch.setattr(pooling, "MAX_MERGED_AT_ONCE", 16)
    for most in (4, 15, 40, 99):
        rows = rows_of(100)
        merged = merge(rows, most)
        assert 0 < len(merged) <= most
        near(merged.sum(axis=0), rows.sum(axis=0), 1e-3)
    assert max(seen) <= 16


def test_words_alone_are_merged_where_there_are_any():
    is_mark = np.array([1, 0, 0, 1, 0, 0, 1, 0, 1, 1, 1, 1], dtype=bool)
    rows = Ragged(rows_of(12), np.array([0, 5, 5, 7, 9, 12]))
    left = without_marks(rows, is_mark, 2)
    assert left.lengths.tolist() == [3, 0, 2, 2, 3], (
        "short rows stay whole, and those of marks alone"
    )
    same(left.values, rows.values[[1, 2, 4, 5, 6, 7, 8, 9, 10, 11]])
    same(without_marks(rows, is_mark, 5).values, rows.values)


def test_a_bit_for_each_sign():
    rows = unit(rows_of(7, width=12))
    bits = budgeted(document(rows), MultivectorBudget(dtype="binary"))
    assert bits.values.dtype == np.uint8
    assert bits.values.shape == (7, 2)
    signs = unpacked(bits.values, 12)
    same(np.sign(signs), np.where(rows > 0, 1, -1))
    near(np.linalg.norm(signs, axis=1), 1, 1e-6)
    assert maxsim(signs[:1], document(signs), mean=False) == pytest.approx(1)


def test_whole_numbers_keep_directions_and_zero_rows():
    rows = np.concatenate([rows_of(5), np.zeros((1, 16), np.float32)])
    whole = budgeted(document(rows), MultivectorBudget(dtype="int8")).values
    assert whole.dtype == np.int8
    near(unit(whole.astype(np.float32)), unit(rows), 0.01)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.floats(1, 6), st.integers(0, 4), st.booleans())
def test_declared_pooling_is_that_of_sentence_transformers(count, factor, protected, normalize):
    rows = unit(rows_of(count, count))
    theirs = HierarchicalTokenPooling(
        factor, num_protected_tokens=protected, normalize_embeddings=normalize
    )
    wanted = theirs.pool([torch.from_numpy(rows)])[0].numpy()
    found = pooled(document(rows), TokenPooling(factor, protected, normalize)).values
    near(found, wanted, 1e-6)


def test_declared_pooling_of_a_long_document_is_that_of_its_blocks(seen):
    rows, block = unit(rows_of(2_049)), TokenPooling(4.0, 0, normalize=True)
    found = pooled(document(rows), TokenPooling(4.0, 1, normalize=True)).values
    assert max(seen) <= pooling.MAX_MERGED_AT_ONCE
    blocks = [pooled(document(part), block).values for part in np.split(rows[1:], 4)]
    same(found, np.concatenate([unit(rows[:1]), *blocks]))


def test_a_budget_by_its_fields():
    fields = {"max_tokens": 3, "dtype": "binary"}
    assert EmbedOptions.given("encode()", {"multivector": fields}).multivector == MultivectorBudget(
        **fields
    )
    for wrong in ({"max_tokens": 0}, {"dtype": "float16"}, {"tokens": 1}):
        with pytest.raises(InvalidInput, match="multivector"):
            EmbedOptions.given("encode()", {"multivector": wrong})


@pytest.fixture(scope="module")
def model():
    return text_model(find_model(ModelConfig()), EngineConfig())


def merged_of(model, texts, rows, most):
    """`Embed`'s result for raw multi-vectors, with one row for each token except the first."""
    task = Embed(
        texts,
        frozenset({Head.MULTIVECTOR}),
        EmbedOptions(multivector=MultivectorBudget(max_tokens=most)),
    )
    return task.finish(model, task.prepare(model), HeadOutputs(multivector=rows)).multivector


def test_words_are_merged_and_what_is_between_them_is_left_out(model):
    texts = [
        "Wings, plates; flow (thin) and layers: heat, lift, drag!",
        "one, two.",
        "?!.,;:()[]{}",
    ]
    found = [model.reader.tokens(text, add_special_tokens=True, prompt_name=None) for text in texts]
    pieces = [[token.text for token in tokens][1:] for tokens in found]
    rows = Ragged.from_rows([rows_of(len(each), seed) for seed, each in enumerate(pieces)])
    found = merged_of(model, texts, rows, 5)
    words = [
        place
        for place, piece in enumerate(pieces[0])
        if piece not in string.punctuation and piece != "[SEP]"
    ]
    assert 5 < len(words) < len(pieces[0])
    same(found.row(0), unit(merge(rows.row(0)[words], 5)))
    # It has no more tokens than vectors that it may have
    same(found.row(1), unit(rows.row(1)))
    # Of nothing else
    same(found.row(2), unit(merge(rows.row(2), 5)))
