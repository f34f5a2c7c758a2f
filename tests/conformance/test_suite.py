"""The suite's runner: what it records, and that a second run goes on where the first one stopped."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from conformance import suite

WELL = "def test_it(): open('ran', 'a').write('well ')\n"
ILL = """
import pytest
def test_it(): open("ran", "a").write("ill ")
def test_no(): assert False
def test_later(): pytest.skip("no")
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take longer than these tests
    (tmp_path / "tests").mkdir()
    for name, text in {"a": WELL, "b": ILL, "c": "def broken(:\n"}.items():
        (tmp_path / "tests" / f"test_{name}.py").write_text(text)
    (tmp_path / ".gitignore").write_text("ran\nsuite.jsonl\n__pycache__\n")
    for words in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -qm one"):
        subprocess.run(["git", *words.split()], cwd=tmp_path, check=True)
    return tmp_path


@pytest.mark.slow
def test_a_file_runs_once_a_commit_and_what_failed_is_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert suite.main(["tests/test_a.py"], root) == 0
    with (root / "suite.jsonl").open("a") as cut:
        cut.write('\n{"commit": "')  # killed while it wrote
    assert suite.main([], root) == 1
    assert (root / "ran").read_text() == "well ill "
    found = suite.recorded(root / "suite.jsonl", suite.commit_of(root))
    assert [(one["passed"], one["skipped"], len(one["failed"])) for one in found.values()] == [(1, 0, 0), (1, 1, 1), (0, 0, 1)]
    assert found["tests/test_b.py"]["failed"] == ["test_no"]
    assert suite.main([], root) == 1
    assert (root / "ran").read_text() == "well ill ", "nothing is left to run"
    (root / "tests" / "test_b.py").write_text(WELL)
    assert "2 of 3 files failed" in capsys.readouterr().out
    assert suite.main(["tests/test_a.py", "tests/test_b.py"], root) == 0, "another tree"
    assert (root / "ran").read_text() == "well ill well well "


def test_what_failed_is_run_again_where_asked_and_what_takes_too_long_has_failed(root: Path) -> None:
    assert suite.main(["tests/test_b.py"], root) == 1
    assert suite.main(["tests/test_b.py", "--again", "--timeout", "0.01"], root) == 1
    lines = [json.loads(line) for line in (root / "suite.jsonl").read_text().splitlines()]
    assert [line["file"] for line in lines] == ["tests/test_b.py"] * 2
    assert "not through after 0.01 s" in lines[1]["failed"][0]
