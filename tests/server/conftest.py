"""Servers that several modules ask; each is left as it was found."""

import pytest

from hybridtei.models.checkpoint.classifiers import ClassifierHead
from tests.inference.engine import small
from tests.server.live import serving


@pytest.fixture(scope="session")
def server():
    """A model with every output."""
    with serving() as running:
        yield running


@pytest.fixture(scope="session")
def dense_server():
    """A model with dense vectors only, and without prompts."""
    with serving(small.dense_only()) as running:
        yield running


@pytest.fixture(scope="session")
def splade_server():
    with serving(small.splade()) as running:
        yield running


LABELS = ("negative", "neutral", "positive")
TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")


def labelled(*labels, tags=False):
    """A reranker with one label, a classifier with several, or a tagger."""
    head = ClassifierHead("none" if tags else "cls", (), "bert.", labels)
    return small.model_spec(
        classifier=head, sparse=None, multivector=None, prompts=None, pooling=()
    )


@pytest.fixture(scope="session")
def reranker():
    with serving(labelled("LABEL_0")) as running:
        yield running


@pytest.fixture(scope="session")
def classifier():
    with serving(labelled(*LABELS)) as running:
        yield running


@pytest.fixture(scope="session")
def tagger():
    with serving(labelled(*TAGS, tags=True)) as running:
        yield running
