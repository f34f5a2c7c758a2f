"""An encoder that has every output."""

import pytest

from hybridtei.encoder import Encoder


@pytest.fixture(scope="module")
def encoder(hybrid):
    return Encoder.load(str(hybrid))
