"""One cluster of two processors for all tests of a run: starting one takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hybridtei.on_ray.cluster import join


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    leave = join("local", 2)
    yield
    leave()
