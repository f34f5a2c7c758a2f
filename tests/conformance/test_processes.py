"""`conformance/processes.py`: a process that ends at its start says why."""

import sys

import pytest

from conformance.processes import free_port, started


def test_one_that_ends_is_told_with_its_last_words(tmp_path):
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with (
        pytest.raises(RuntimeError, match="ended with 1:\nno such model"),
        started(command, free_port(), tmp_path / "log"),
    ):
        pass
