"""Each test asks by the blocking client and by the awaited one."""

import pytest

from tests.client.asking import Ask, awaited, blocking


@pytest.fixture(params=[blocking, awaited])
def ask(request: pytest.FixtureRequest) -> Ask:
    return request.param  # type: ignore[no-any-return]
