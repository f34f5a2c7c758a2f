"""A skip that `tests/skips.py` does not list fails CI, and only CI."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import skips

ROOT = Path(__file__).parents[1]

LISTED = """
import pytest

@pytest.mark.skip(reason="needs a CUDA device")
def test_listed():
    pass
"""
UNLISTED = """
import pytest

def test_unlisted():
    pytest.skip("no browser on the PATH")
"""
WHOLE_FILE = """
import pytest

pytest.importorskip("a_package_that_does_not_exist")
"""


def run(folder: Path, text: str, ci: str, more: Sequence[str] = ()) -> tuple[int, str]:
    """The exit status and output of a run of one file, under this conftest."""
    (folder / "test_it.py").write_text(text)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "0",
        "-c",
        os.devnull,
        "-p",
        "no:cacheprovider",
        *more,
    ]
    ended = subprocess.run(
        [*command, "-p", "tests.conftest", str(folder)],
        cwd=ROOT,
        env={**os.environ, "CI": ci, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    return ended.returncode, ended.stdout


def test_an_unlisted_skip_fails_ci(tmp_path):
    (tmp_path / "test_whole.py").write_text(WHOLE_FILE)
    status, output = run(tmp_path, UNLISTED, ci="true", more=["--continue-on-collection-errors"])
    assert status != pytest.ExitCode.OK
    assert output.count("skipped, and tests/skips.py does not list the reason") >= 2
    assert "a_package_that_does_not_exist" in output
    assert "no browser on the PATH" in output


def test_elsewhere_it_passes(tmp_path):
    status, output = run(tmp_path, UNLISTED, ci="")
    assert status == pytest.ExitCode.OK
    assert "1 skipped" in output


def test_more_skips_than_a_row_allows(monkeypatch):
    monkeypatch.setattr(skips, "ALLOWED", {"needs a .*": 1})
    assert skips.excess(["needs a GPU"]) == []
    assert len(skips.excess(["needs a GPU", "needs a browser"])) == 1


def test_a_run_with_too_many_skips_fails(tmp_path):
    limit = skips.ALLOWED["needs a CUDA device"]
    text = LISTED.replace("@pytest", f"@pytest.mark.parametrize('i', range({limit + 1}))\n@pytest")
    status, output = run(tmp_path, text.replace("listed()", "listed(i)"), ci="true")
    assert status == pytest.ExitCode.TESTS_FAILED
    assert f"allows {limit}" in output
