"""Servers that several modules ask; each is left as it was found."""

import pytest

from tests.inference.engine import small
from tests.server.conftest import LABELS, labelled
from tests.server.grpc.live import rpc_serving


@pytest.fixture(scope="session")
def rpc():
    """A model with every output."""
    with rpc_serving() as running:
        yield running


@pytest.fixture(scope="session")
def dense_rpc():
    with rpc_serving(small.dense_only()) as running:
        yield running


@pytest.fixture(scope="session")
def splade_rpc():
    with rpc_serving(small.splade()) as running:
        yield running


@pytest.fixture(scope="session")
def ranker_rpc():
    with rpc_serving(labelled("LABEL_0")) as running:
        yield running


@pytest.fixture(scope="session")
def classifier_rpc():
    with rpc_serving(labelled(*LABELS)) as running:
        yield running
