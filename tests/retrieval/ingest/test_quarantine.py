"""The quarantine file: every reason, but not a million times the same."""

import json

import pytest

from hybridtei.errors import InvalidInput
from hybridtei.retrieval.ingest import files as module
from hybridtei.retrieval.ingest.document import Rejection
from hybridtei.retrieval.ingest.files import Quarantine


def test_it_is_written_anew_and_only_if_there_is_something(tmp_path):
    path = tmp_path / "deep" / "q.jsonl"
    quarantine = Quarantine(path)
    assert not path.exists()
    quarantine.add(Rejection("s", "line 1", "why", "ex\u2028cerpt"))
    assert json.loads(path.read_text()) == {
        "source": "s",
        "location": "line 1",
        "reason": "why",
        "excerpt": "ex\u2028cerpt",
    }
    assert len(quarantine) == 1
    assert len(Quarantine(path)) == 0
    assert not path.exists()


def test_a_file_of_nothing_else_does_not_fill_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_PER_SOURCE", 3)
    quarantine = Quarantine(tmp_path / "q.jsonl")
    for number in range(10):
        quarantine.add(Rejection("s", f"line {number}", "why"))
    quarantine.add(Rejection("t", "line 1", "why"))
    lines = [json.loads(line) for line in (tmp_path / "q.jsonl").read_text().splitlines()]
    assert len(quarantine) == 11
    assert [line["source"] for line in lines] == ["s"] * 4 + ["t"]
    assert "only 3" in lines[3]["reason"]


def test_a_file_of_something_else_is_not_overwritten(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"id": "a", "text": "one"}\n')
    with pytest.raises(InvalidInput, match="is not a quarantine file"):
        Quarantine(path)
    assert path.read_text() == '{"id": "a", "text": "one"}\n'
