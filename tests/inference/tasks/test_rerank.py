"""One question in parts, a score that is no number, and what a task refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.batch import Head, pack
from hybridtei.errors import EmptyInput, NotANumber, UnsupportedHead
from hybridtei.inference.engine.admission import Bounds
from hybridtei.inference.tasks.embed import Embed, LookUp
from hybridtei.inference.tasks.label import Classify, Tag
from hybridtei.inference.tasks.rerank import MAX_CHUNK_CHARACTERS, MAX_CHUNK_DOCUMENTS, Rerank, Scored, rerank_task
from hybridtei.models.checkpoint.classifiers import ClassifierHead, LinearStep
from hybridtei.models.checkpoint.heads import SparseHead
from hybridtei.outputs import HeadOutputs
from tests.fake_backend import FakeBackend
from tests.inference.engine import small


def head(*labels: str) -> ClassifierHead:
    return ClassifierHead("cls", (LinearStep("classifier"),), "bert.", labels)


SPEC = small.model_spec(classifier=head("relevant"), sparse=None, multivector=None)
MODEL = small.model(SPEC)


def answer(task, model=MODEL):
    encodings = task.prepare(model)
    return task.finish(model, encodings, FakeBackend(model.spec).forward(pack(encodings, task.heads, model.spec.positions)))


@given(st.lists(st.integers(0, MAX_CHUNK_CHARACTERS // 3), max_size=700))
def test_parts_are_all_the_documents_in_order_and_bounded(lengths):
    documents = ["x" * length for length in lengths]
    parts = [part.inputs for part in Rerank("q", documents).split()]
    assert [document for part in parts for document in part] == documents
    for part in parts:
        assert len(part) <= MAX_CHUNK_DOCUMENTS
        assert len(part) == 1 or sum(map(len, part)) <= MAX_CHUNK_CHARACTERS


def test_parts_give_what_the_whole_gives():
    task = Rerank("one two", [" ".join(small.WORDS[i % 19 : i % 19 + 3]) or "a" for i in range(600)])
    joined = Scored.concat([answer(part) for part in task.split()])
    np.testing.assert_array_equal(joined.scores, answer(task).scores)


def test_no_number_fails_whose_it_is_and_nobody_else():
    scores = np.array([[0.5], [np.nan]], np.float32)
    task = Rerank("one", ["two"])
    encodings = task.prepare(MODEL)
    assert task.finish(MODEL, encodings, HeadOutputs(scores=scores[:1])).scores[0] > 0.5
    with pytest.raises(NotANumber):
        task.finish(MODEL, encodings, HeadOutputs(scores=scores[1:]))
    with pytest.raises(NotANumber):
        Classify(["one"], raw_scores=True).finish(MODEL, encodings, HeadOutputs(scores=scores[1:]))


@pytest.mark.parametrize("spec", [small.dense_only(), small.splade(), small.model_spec(classifier=head("a", "b"))])
def test_who_cannot_rank_says_so_in_teis_words(spec):
    with pytest.raises(UnsupportedHead, match=r"^model is not a re-ranker model$"):
        rerank_task(spec, "one", ["two"]).check(spec)


def test_who_cannot_classify_says_so_in_teis_words():
    for spec in (small.dense_only(), small.splade(), small.model_spec()):
        with pytest.raises(UnsupportedHead, match=r"^Model is not a classifier model$"):
            Classify(["one"]).check(spec)


def test_a_pair_is_empty_only_if_both_sides_are():
    assert len(answer(Rerank("", ["one"])).scores) == len(answer(Rerank("one", [""])).scores) == 1
    with pytest.raises(EmptyInput, match=r"^`inputs` cannot be empty$"):
        Rerank("", ["one", ""]).prepare(MODEL)


def test_texts_and_pairs_are_classified_side_by_side_best_label_first():
    spec = small.model_spec(classifier=head("a", "b", "c"))
    answered = answer(Classify(["one", ("one", "two")]), small.model(spec))
    assert answered.scores.shape == (2, 3)
    scores = [one.score for one in answered.best_first(1)]
    assert scores == sorted(scores, reverse=True)
    assert sum(scores) == pytest.approx(1)


async def test_the_service_answers_every_kind_of_task():
    tagger = small.model_spec(classifier=ClassifierHead("none", (LinearStep("classifier"),), "bert.", ("O", "B-X")))
    documents = [f"one {word}" for word in small.WORDS] * 30

    async def served(spec, task):
        service = small.service(spec, {"max_concurrent_requests": 2000, "embedding_cache_mb": 1})
        await service.start()
        try:
            return (await service.run(task, bounds=Bounds(task.size, 256, 2, min(task.size, 512)))).answer
        finally:
            await service.stop()

    for spec in (SPEC, small.model_spec()):
        task = rerank_task(spec, "one two", documents)
        scored = await served(spec, task)
        np.testing.assert_allclose(scored.scores, answer(task, small.model(spec)).scores, rtol=1e-6)  # sums in another order
    classified = await served(SPEC, Classify(documents))
    assert classified.scores.shape == (len(documents), 1)
    tagged = await served(tagger, Tag(documents))
    assert [one.text for one in tagged] == documents
    looked_up = small.model_spec(sparse=SparseHead("splade", queries=Path("table")), multivector=None, pooling=())
    task = Embed(["one two"], frozenset({Head.SPARSE}), input_type="query").for_model(looked_up)
    assert isinstance(task, LookUp)
    assert task.heads == frozenset()
