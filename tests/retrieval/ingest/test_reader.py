"""The reader's process: what a file may take, and who ends it."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from hybridtei.retrieval.ingest.files import documents_of, source_files
from hybridtei.retrieval.ingest.options import ReadOptions
from hybridtei.retrieval.ingest.reader import Reader
from tests.retrieval.ingest.sources.pdfs import nested_forms

# The name X, which only PDFium finds again
ESCAPED = b"/#58"


@pytest.fixture
def folder(tmp_path):
    """A PDF of ten million words in two kilobytes, between two texts."""
    (tmp_path / "a.txt").write_text("The first text.")
    (tmp_path / "b.pdf").write_bytes(nested_forms(7, name=ESCAPED))
    (tmp_path / "c.txt").write_text("The last text.")
    return tmp_path


def found(folder, reader):
    return [
        getattr(part, "reason", None) or part.text
        for file in source_files(folder)
        for part, _ in documents_of(file, ReadOptions(), reader)
    ]


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"seconds": 1}, "reading it takes more than 1 s of processor time"),
        ({"memory_bytes": 50_000_000}, "takes more than 50 MB of memory to read"),
    ],
)
def test_a_file_that_takes_too_much_has_a_reason_and_the_next_one_is_read(folder, limits, reason):
    with Reader(**limits) as reader:
        first, second, third = found(folder, reader)
    assert (first, third) == ("The first text.", "The last text.")
    assert reason in second


def test_a_process_that_was_killed_is_started_again(folder):
    with Reader() as reader:
        os.kill(reader.start().pid, signal.SIGKILL)
        (folder / "b.pdf").unlink()
        assert found(folder, reader)[-1] == "The last text."


def test_another_thread_ends_a_reading_that_has_no_limit(folder):
    reader = Reader(seconds=1000, memory_bytes=1 << 60)
    texts = []
    thread = threading.Thread(target=lambda: texts.extend(found(folder, reader)))
    process = reader.start()
    thread.start()
    reader.stop()
    thread.join()
    assert process.poll() is not None
    assert "The last text." not in texts


def test_the_rows_before_the_end_of_a_process_stay(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("id,text\n" + "".join(f"{number},Row {number}.\n" for number in range(50_000)))
    with Reader() as reader:
        (file,) = source_files(path)
        parts = []
        for part, _ in documents_of(file, ReadOptions(), reader):
            parts.append(part)
            if len(parts) == 10:
                os.kill(reader.start().pid, signal.SIGKILL)
    assert [part.document_id for part in parts[:10]] == [str(number) for number in range(10)]
    assert parts[-1].location.startswith("after line ")
    assert "was ended" in parts[-1].reason


@pytest.mark.slow
def test_ctrl_c_ends_an_ingest_whatever_a_reader_does(folder):
    (folder / "b.pdf").write_bytes(nested_forms(9, name=ESCAPED))
    command = [sys.executable, "-m", "hybridtei", "ingest", ".", "--collection", "c", "--quiet"]
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if line.startswith("model"):
            break
    process.send_signal(signal.SIGINT)
    assert process.wait(15) == 130
    process.stderr.close()
