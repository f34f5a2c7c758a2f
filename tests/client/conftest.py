"""Each test asks by the blocking client and by the awaited one."""

import pytest

from tests.client.asking import awaited, blocking


@pytest.fixture(params=[blocking, awaited])
def ask(request):
    return request.param
