"""An encoder that has every output."""

from pathlib import Path

import pytest

from hybridtei.encoder import Encoder


@pytest.fixture(scope="module")
def encoder(hybrid: Path) -> Encoder:
    return Encoder.load(str(hybrid))
