"""Tokens one by one: special ones where they are wanted, raw scores, places; what is asked once is
what is asked twice."""

import numpy as np
import pytest

from hybridtei.batch import Ragged, offsets_of
from hybridtei.errors import NotANumber, UnsupportedHead
from hybridtei.inference.tasks.label import Tag
from hybridtei.models.checkpoint.classifiers import ClassifierHead, LinearStep
from hybridtei.options import LabelOptions
from hybridtei.outputs import HeadOutputs
from tests.inference.engine import small

LABELS = ("O", "B-X", "I-X")
SPEC = small.model_spec(
    classifier=ClassifierHead("none", (LinearStep("classifier"),), "bert.", LABELS)
)
MODEL = small.model(SPEC, default_prompt="query: ")
TEXT = "Hybrid search, é by Meaning"


def answer(task):
    return small.answered(task, MODEL)[1]


def test_asking_twice_gives_the_same_and_neighbours_change_nothing():
    options = LabelOptions(aggregation_strategy="average")
    task = Tag([TEXT, "one two", TEXT], options)
    assert answer(task) == answer(task)
    assert answer(task)[1] == answer(Tag(["one two"], options))[0]


def test_a_text_that_is_only_special_tokens_has_no_span():
    task = Tag(["\u200b"], LabelOptions(aggregation_strategy="max"))
    _, (found,) = small.answered(task, small.model(SPEC))
    assert found.spans == []


def test_no_number_is_an_error():
    encodings = Tag([TEXT]).prepare(MODEL)
    values = np.full((len(encodings[0]), 3), np.nan, np.float32)
    with pytest.raises(NotANumber):
        Tag([TEXT]).finish(
            MODEL, encodings, HeadOutputs(tags=Ragged(values, offsets_of([len(values)])))
        )


def test_another_kind_of_model_says_so():
    with pytest.raises(UnsupportedHead, match=r"^Model is not a token classification model$"):
        Tag([TEXT]).check(small.model_spec())
