"""One question in parts, a score that is no number, and what a task refuses."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.errors import NotANumber, UnsupportedHead
from hybridtei.inference.tasks import windows
from hybridtei.inference.tasks.label import Classify
from hybridtei.inference.tasks.rerank import (
    MAX_CHUNK_CHARACTERS,
    MAX_CHUNK_DOCUMENTS,
    Rerank,
    RerankPairs,
    Scored,
    rerank_task,
)
from hybridtei.inference.tasks.windows import WINDOWS_AT_ONCE
from hybridtei.models.checkpoint.classifiers import ClassifierHead, LinearStep
from hybridtei.models.text import reader
from hybridtei.models.text.reader import PORTION_CHARACTERS
from hybridtei.options import LabelOptions, RankOptions
from hybridtei.outputs import HeadOutputs
from tests.inference.engine import small
from tests.near import near, same


def head(*labels):
    return ClassifierHead("cls", (LinearStep("classifier"),), "bert.", labels)


SPEC = small.model_spec(classifier=head("relevant"), sparse=None, multivector=None)
MODEL = small.model(SPEC)


def answer(task, model=MODEL):
    return small.answered(task, model)[1]


@given(st.lists(st.integers(0, MAX_CHUNK_CHARACTERS // 3), max_size=700))
def test_parts_are_all_the_documents_in_order_and_bounded(lengths):
    documents = ["x" * length for length in lengths]
    parts = [part.inputs for part in Rerank("q", documents).split()]
    assert [document for part in parts for document in part] == documents
    for part in parts:
        assert len(part) <= MAX_CHUNK_DOCUMENTS
        assert len(part) == 1 or sum(map(len, part)) <= MAX_CHUNK_CHARACTERS


def test_parts_give_what_the_whole_gives():
    task = Rerank(
        "one two", [" ".join(small.WORDS[i % 19 : i % 19 + 3]) or "a" for i in range(600)]
    )
    joined = Scored.concat([answer(part) for part in task.split()])
    same(joined.scores, answer(task).scores)


def in_parts(task, model, read):
    """The answer of a chunk whose windows are read in several parts; `read` gets their
    encodings."""
    parts = []
    while task is not None:
        encodings, answer = small.answered(task, model)
        read.append(encodings)
        parts.append(answer)
        task = task.rest(encodings)
        if task is not None:
            task = task.knowing(answer)
    return Scored.concat(parts)


LONG = " ".join(small.WORDS[(place * 7 + place // 5) % len(small.WORDS)] for place in range(3000))


@pytest.mark.parametrize("model", [MODEL, small.model()], ids=["reranker", "vectors"])
@pytest.mark.parametrize("query", ["two", "two " * 35], ids=["short", "long"])
def test_windows_in_memory_are_bounded_and_the_best_of_all_counts(model, query, monkeypatch):
    """The oracle reads all windows at once."""
    documents = ["one two", LONG, "three", f"{LONG} four"]
    options = RankOptions(max_chunks_per_doc=1000, raw_scores=True)
    task = rerank_task(model.spec, query, documents, options)
    read = []
    answer = in_parts(task, model, read)
    assert len(read) > 1
    assert max(map(len, read)) <= WINDOWS_AT_ONCE + 1
    monkeypatch.setattr(windows, "WINDOWS_AT_ONCE", 10_000)
    whole = []
    expected = in_parts(task, model, whole)
    assert len(whole) == 1
    near(answer.scores, expected.scores, 1e-6)
    assert [*answer.windows] == [*expected.windows]
    assert [window is None for window in answer.windows] == [True, False, True, False]


class Counting:
    """A tokenizer that notes the characters of each call."""

    def __init__(self, inner):
        self.inner, self.calls = inner, []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def encode(self, texts, **options):
        self.calls.append(sum(map(len, texts)))
        return self.inner.encode(texts, **options)


def counted(model):
    counting = Counting(model.reader.tokenizer)
    return replace(model, reader=replace(model.reader, tokenizer=counting)), counting


def test_a_document_in_windows_is_tokenised_as_far_as_its_windows_reach():
    """Two megabytes of tokens of one character, of which a client wants ten windows."""
    model, counting = counted(MODEL)
    options = RankOptions(max_chunks_per_doc=10)
    (encoded,) = [Rerank("a", ["! " * 1_000_000], options).prepare(model)]
    assert len(encoded) == 10
    assert encoded[-1].extent[1] < 2_000
    assert sum(counting.calls) < 3 * PORTION_CHARACTERS


def test_a_query_is_tokenised_once_and_each_pair_with_no_more_than_the_model_reads():
    model, counting = counted(MODEL)
    for direction in ("left", "right"):
        counting.calls.clear()
        query = "one two " * 2_000
        options = RankOptions(truncation_direction=direction)
        found = Rerank(query, ["three", "four " * 50] * 30, options).prepare(model)
        pairs = [(query, "three"), (query, "four " * 50)] * 30
        expected = MODEL.reader.read_pairs(pairs, truncate=True, direction=direction)
        for encoding, other in zip(found, expected, strict=True):
            same(encoding.input_ids, other.input_ids)
        assert sum(counting.calls) < 2 * len(query)


@given(st.lists(st.sampled_from([*small.WORDS, " " * 90, "xyzxyz"]), max_size=120), st.booleans())
def test_windows_of_portions_are_full_overlap_and_reach_the_end(words, truncate):
    text = " ".join(words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "PORTION_CHARACTERS", 100)
        found = [*MODEL.reader.windows(text, 16, 1000, truncate=truncate)]
        few = [*MODEL.reader.windows(text, 16, 3, truncate=truncate)]
    assert (found[0][0], found[-1][1]) == (0, len(text))
    for (begin, end), (following, last) in pairwise(found):
        assert begin < following <= end <= last
    sizes = MODEL.reader.tokenizer.encode([text[begin:end] for begin, end in found])
    assert all(len(size) - 2 <= 16 + 2 for size in sizes)
    if truncate:
        assert few == found[:3]
    else:
        assert (few[:2], few[-1][1]) == (found[:2], len(text))


def test_no_number_fails_whose_it_is_and_nobody_else():
    scores = np.array([[0.5], [np.nan]], np.float32)
    task = Rerank("one", ["two"])
    encodings = task.prepare(MODEL)
    assert task.finish(MODEL, encodings, HeadOutputs(scores=scores[:1])).scores[0] > 0.5
    with pytest.raises(NotANumber):
        task.finish(MODEL, encodings, HeadOutputs(scores=scores[1:]))
    with pytest.raises(NotANumber):
        Classify(["one"], LabelOptions(raw_scores=True)).finish(
            MODEL, encodings, HeadOutputs(scores=scores[1:])
        )


@pytest.mark.parametrize(
    "spec", [small.dense_only(), small.splade(), small.model_spec(classifier=head("a", "b"))]
)
def test_who_cannot_rank_says_so_in_teis_words(spec):
    with pytest.raises(UnsupportedHead, match=r"^model is not a re-ranker model$"):
        rerank_task(spec, "one", ["two"]).check(spec)


def test_who_cannot_classify_says_so_in_teis_words():
    for spec in (small.dense_only(), small.splade(), small.model_spec()):
        with pytest.raises(UnsupportedHead, match=r"^Model is not a classifier model$"):
            Classify(["one"]).check(spec)


def held_bytes(scored):
    """The memory that an answer keeps, with arrays that its own are views of."""
    arrays = [scored.query.dense, scored.query.multivector.values, scored.query.sparse.values]
    return sum((array if array.base is None else array.base).nbytes for array in arrays)


def test_an_answer_keeps_no_vectors_of_documents():
    """A stream of 512 long texts, each with a query, held 160 MB of them."""
    model = small.model()
    few, many = (
        answer(rerank_task(model.spec, "one", ["two three " * 20] * count), model)
        for count in (1, 100)
    )
    assert held_bytes(many) == held_bytes(few)
    task = RerankPairs([rerank_task(model.spec, "one", ["two"] * 3)] * 2)
    for chunk in task.split(2):
        assert answer(chunk, model).query is None
    first, second, *_ = rerank_task(model.spec, "one", ["two"] * 3).split(1)
    assert answer(second.knowing(answer(first, model)), model).query is None
