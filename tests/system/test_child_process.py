"""Files in the working folder are documents: no process of ours runs them, whatever they are
called."""

import os
import sys

import pytest

from tests.ran import ran
from tests.server.live import ROOT

# Of all these, one is enough
HOSTILE = (
    "msgspec",
    "numpy",
    "logging",
    "select",
    "uvicorn",
    "qdrant_edge",
)


@pytest.fixture
def corpus(tmp_path):
    """A folder of documents, among them modules that tell if they are run, and one that only breaks
    others."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name in HOSTILE:
        (folder / f"{name}.py").write_text(
            f"open({str(tmp_path / 'was-run')!r}, 'a').write('{name} ')\n"
        )
    (folder / "types.py").write_text("KINDS = ['a harmless file of this name']\n")
    (folder / "note.txt").write_text("The display shows E41 when the brake is worn.\n")
    return folder


def ingest(corpus, *command):
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "",
        "HF_HUB_OFFLINE": "1",
    }
    words = [*command, "ingest", "note.txt", "--collection", "notes", "--quiet"]
    return ran(words, cwd=corpus, env=environment)


SCRIPT = "import sys; from hybridtei.cli import main; sys.argv[0] = 'hybridtei'; sys.exit(main())"


def was_run(corpus):
    told = corpus.parent / "was-run"
    return told.read_text() if told.exists() else ""


@pytest.mark.parametrize(
    "words",
    [
        ["-P", "-c", SCRIPT],
        pytest.param(["-m", "hybridtei"], marks=pytest.mark.slow),
        # The command, which lies elsewhere
    ],
)
def test_an_ingest_runs_nothing_that_lies_in_its_folder(corpus, words):
    if "-m" in words:
        # `python -m` itself imports that one, before any code of ours
        (corpus / "types.py").unlink()
    done = ingest(corpus, sys.executable, *words)
    assert was_run(corpus) == ""
    assert done.returncode == 0, done.stderr
    assert ": 1 points\n" in done.stdout


def test_what_a_child_may_import(tmp_path, monkeypatch):
    from hybridtei.system import machine

    there = tmp_path / "there"
    there.mkdir()
    monkeypatch.chdir(there)
    monkeypatch.setattr(
        sys, "path", ["", str(there), ".", "relative", "/usr/lib/elsewhere", str(ROOT)]
    )
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert machine.search_path() == ["/usr/lib/elsewhere", str(ROOT)]
    monkeypatch.setenv("PYTHONPATH", f":.:{there}")
    assert machine.search_path() == [str(there), "/usr/lib/elsewhere", str(ROOT)]
    # Found by other means, as an editable installation is
    monkeypatch.setattr(sys, "path", ["/usr/lib/elsewhere"])
    assert machine.search_path() == ["/usr/lib/elsewhere", str(ROOT)]
    monkeypatch.setattr(sys, "path", [str(ROOT)])
    monkeypatch.chdir(ROOT)
    # A source tree is run in its own folder
    assert machine.search_path() == [str(ROOT)]
