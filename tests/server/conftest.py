"""Servers that several modules ask; each is left as it was found."""

from collections.abc import Iterator

import pytest

from hybridtei.models.checkpoint.classifiers import ClassifierHead
from hybridtei.models.checkpoint.spec import ModelSpec
from tests.inference.engine import small
from tests.server.live import Running, serving


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    """A model with every output."""
    with serving() as running:
        yield running


@pytest.fixture(scope="session")
def dense_server() -> Iterator[Running]:
    """A model with dense vectors only, and without prompts."""
    with serving(small.dense_only()) as running:
        yield running


@pytest.fixture(scope="session")
def splade_server() -> Iterator[Running]:
    with serving(small.splade()) as running:
        yield running


LABELS = ("negative", "neutral", "positive")
TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")


def labelled(*labels: str, tags: bool = False) -> ModelSpec:
    """A reranker with one label, a classifier with several, or a tagger."""
    head = ClassifierHead("none" if tags else "cls", (), "bert.", labels)
    return small.model_spec(
        classifier=head, sparse=None, multivector=None, prompts=None, pooling=()
    )


@pytest.fixture(scope="session")
def reranker() -> Iterator[Running]:
    with serving(labelled("LABEL_0")) as running:
        yield running


@pytest.fixture(scope="session")
def classifier() -> Iterator[Running]:
    with serving(labelled(*LABELS)) as running:
        yield running


@pytest.fixture(scope="session")
def tagger() -> Iterator[Running]:
    with serving(labelled(*TAGS, tags=True)) as running:
        yield running
