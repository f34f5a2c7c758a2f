"""One question in parts, a score that is no number, and what a task refuses."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.batch import pack
from hybridtei.errors import NotANumber, UnsupportedHead
from hybridtei.inference.tasks.label import Classify
from hybridtei.inference.tasks.rerank import (
    MAX_CHUNK_CHARACTERS,
    MAX_CHUNK_DOCUMENTS,
    Rerank,
    RerankPairs,
    Scored,
    rerank_task,
)
from hybridtei.models.checkpoint.classifiers import ClassifierHead, LinearStep
from hybridtei.options import LabelOptions
from hybridtei.outputs import HeadOutputs
from tests.fake_backend import FakeBackend
from tests.inference.engine import small
from tests.near import same


def head(*labels):
    return ClassifierHead("cls", (LinearStep("classifier"),), "bert.", labels)


SPEC = small.model_spec(classifier=head("relevant"), sparse=None, multivector=None)
MODEL = small.model(SPEC)


def answer(task, model=MODEL):
    encodings = task.prepare(model)
    return task.finish(
        model,
        encodings,
        FakeBackend(model.spec).forward(pack(encodings, task.heads, model.spec.positions)),
    )


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
    assert scored.query is not None
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
