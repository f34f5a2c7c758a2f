"""Servers that several modules ask; each is left as it was found."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine import small
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
