"""What tests of several folders read."""

import pytest

from tests.retrieval.search.small_search import encoder_of, spec_in


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """The small model that makes every kind of vector."""
    return encoder_of(spec_in(tmp_path_factory.mktemp("model")))
