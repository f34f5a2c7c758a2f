"""Both protocols of a server."""

import pytest

from tests.retrieval.store.stores import STAND_INS


@pytest.fixture(params=STAND_INS)
def protocol(request):
    return request.param
