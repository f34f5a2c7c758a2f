"""Packages import downwards only: the contracts of pyproject.toml hold."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMAND = "from importlinter.cli import lint_imports; import sys; sys.exit(lint_imports(no_cache=True))"


@pytest.mark.skipif(find_spec("importlinter") is None, reason="import-linter is not installed")
def test_the_contracts_hold():
    done = subprocess.run([sys.executable, "-c", COMMAND], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
