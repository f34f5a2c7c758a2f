"""`ingest --watch`: a process that follows a folder, with watchfiles, without it, and when the
system refuses."""

import ctypes
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from hybridtei.errors import InvalidInput
from hybridtei.retrieval.ingest.options import INTERRUPTED, IngestStats, Summary
from hybridtei.retrieval.ingest.watch import watch

ROOT = Path(__file__).parents[2]
HANG = 120


@contextmanager
def watching(folder, *words, without=False):
    """The process, and a function that gives its next line of JSON."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": ""}
    if without:
        # A package of this name that cannot be found
        code = "import sys, importlib.util as u; f = u.find_spec; u.find_spec = lambda name, *a: None if name == 'watchfiles' else f(name, *a); "
        line = [sys.executable, "-c", f"{code}from hybridtei import cli; sys.exit(cli.main())"]
    else:
        line = [sys.executable, "-m", "hybridtei"]
    line += [*["ingest", "docs", "--collection", "docs", "--watch", "--json", "--quiet"], *words]
    with (folder / "errors.txt").open("w") as errors:
        process = subprocess.Popen(
            line, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    lines = queue.Queue()
    threading.Thread(
        target=lambda: [lines.put(line) for line in process.stdout], daemon=True
    ).start()
    try:
        yield process, lambda: json.loads(lines.get(timeout=HANG))
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()


@pytest.fixture
def docs(tmp_path):
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "a.md").write_text("# Keys\n\nKeys rotate monthly.\n")
    return folder


@pytest.mark.parametrize("without", [False, True])
def test_each_change_is_a_line_until_ctrl_c(tmp_path, docs, without):
    words = ["--delete-missing", "--watch-seconds", "0.3"]
    with watching(tmp_path, *words, without=without) as (process, line):
        if without:
            assert "pip install 'hybridtei[watch]'" in line()["error"]
        assert line()["documents"] == 1
        (docs / "b.md").write_text("A cake with cherries.\n")
        told = line()
        assert (told["documents"], told["unchanged"], told["points"]) == (1, 1, 2)
        (docs / "a.md").write_text("Keys rotate weekly now.\n")
        assert (line()["documents"], (docs / "b.md").unlink()) == (1, None)
        assert line()["documents_deleted"] == 1
        process.send_signal(signal.SIGINT)
        assert process.wait(HANG) == INTERRUPTED
    errors = (tmp_path / "errors.txt").read_text()
    assert "Traceback" not in errors


def test_a_folder_that_disappears_is_told_and_followed_when_it_is_back(tmp_path, docs):
    with watching(tmp_path, "--watch-seconds", "0.3") as (process, line):
        assert line()["documents"] == 1
        shutil.rmtree(docs)
        errors = [line()["error"]]
        while "no such file or folder" not in errors[-1]:
            errors.append(line()["error"])
        assert process.poll() is None
        docs.mkdir()
        (docs / "c.md").write_text("The folder is back.\n")
        told = line()
        while "error" in told:
            told = line()
        assert told["documents"] == 1
        (docs / "d.md").write_text("And is followed.\n")
        assert line()["documents"] == 1


def test_its_own_files_wake_it_not(tmp_path, docs):
    """The collection and the quarantine lie in the source."""
    (docs / "bad.parquet").write_bytes(b"PAR1 but broken")
    words = "--qdrant-path docs/store --quarantine docs/bad.jsonl --watch-seconds 0.3"
    with watching(tmp_path, *words.split()) as (process, line):
        told = line()
        assert (told["documents"], told["quarantined"]) == (1, 1)
        (docs / "b.md").write_text("A cake with cherries.\n")
        told = line()
        assert (told["documents"], told["points"]) == (1, 2)
        process.send_signal(signal.SIGTERM)
        process.wait(HANG)


def once(results):
    def ingest():
        result = next(results)
        if isinstance(result, Exception):
            raise result
        return Summary("c", "here", result, None)

    return ingest


def test_at_the_limit_of_inotify_it_looks_for_itself(docs):
    libc = ctypes.CDLL(None)
    taken = []
    while (descriptor := libc.inotify_init()) >= 0 and len(taken) < 10_000:
        taken.append(descriptor)
    complaints, shown = [], []
    results = iter([IngestStats(documents=1), IngestStats(), IngestStats(stopped=True)])
    try:
        status = watch(
            once(results), docs, [], seconds=0.01, show=shown.append, complain=complaints.append
        )
    finally:
        for descriptor in taken:
            os.close(descriptor)
    assert (status, len(shown)) == (INTERRUPTED, 1)
    (complaint,) = complaints
    assert "Too many open files" in complaint
    assert complaint.endswith("looking every 0.01 s instead")


def test_an_error_is_told_once_and_that_of_the_first_round_ends_it(docs):
    def told(*results):
        complaints = []
        gone = docs / "gone"
        watch(
            once(iter(results)),
            gone,
            [],
            seconds=0,
            show=complaints.append,
            complain=complaints.append,
        )
        return complaints[1:]

    failure = InvalidInput("no")
    stopped = IngestStats(stopped=True)
    first, *rest = told(IngestStats(), failure, failure, IngestStats(), failure, stopped)
    assert isinstance(first, Summary)
    assert rest == ["no", "no"]
    with pytest.raises(InvalidInput):
        told(failure)
