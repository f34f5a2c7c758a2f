"""A precision of an engine that this machine lacks is one skip, in place of each test that was left
out."""

import pytest

from hybridtei.inference.backends.select import DTYPES
from tests.precisions import runs_here

REASONS = {
    "float16": "needs a CUDA device",
    "bfloat16": "this processor has no bfloat16",
}


@pytest.mark.parametrize(
    ("engine", "dtype"),
    [(engine, dtype) for engine, dtypes in DTYPES.items() for dtype in dtypes if dtype in REASONS],
)
def test_this_machine_has_the_precision(engine, dtype):
    if not runs_here(engine, dtype):
        pytest.skip(REASONS[dtype])
