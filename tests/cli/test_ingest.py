"""`hybridtei ingest`: the command as a process, over the embedded model and the embedded engine."""

import json
import os
import sys
from pathlib import Path

import pytest

from hybridtei import cli
from hybridtei.retrieval.store import DEFAULT_PATH
from tests.ran import ran
from tests.server.live import serving

ROOT = Path(__file__).parents[2]


def command(folder, *words):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": ""}
    line = [sys.executable, "-m", "hybridtei", "ingest", *words]
    return ran(line, cwd=folder, env=environment)


def test_from_nothing_in_one_command_and_again(tmp_path, monkeypatch, capsys, said):
    source = tmp_path / "corpus"
    source.mkdir()
    rows = [
        {"_id": f"d{i}", "title": f"wing {i}", "text": "a boundary layer on a flat plate ."}
        for i in range(5)
    ]
    (source / "corpus.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [*rows, {"_id": "e", "text": ""}])
    )
    (source / "queries.jsonl").write_text('{"_id": "q", "text": "wing"}\n')
    first = command(tmp_path, str(source), "--collection", "wings", "--json", "--quiet")
    assert first.returncode == 0, first.stderr
    told = json.loads(first.stdout)
    assert (told["documents"], told["quarantined"], told["points"]) == (5, 1, 5)
    assert f"embedded Qdrant in {tmp_path / DEFAULT_PATH}" in first.stderr
    assert json.loads((tmp_path / "wings.quarantine.jsonl").read_text())["location"] == "line 6"
    monkeypatch.chdir(tmp_path)
    again = ["ingest", str(source), "--collection", "wings", "--quiet"]
    second = said(*again).out
    assert "0 documents in 0 chunks" in second
    assert "5 unchanged" in second
    assert ": 5 points\n" in second
    for flags, status, words in (
        (["--multivector-tokens", "32"], 1, "multivector_tokens: there 64, asked for 32"),
        (["--multivector-tokens", "64"], 0, "5 unchanged"),
        (["--outputs", "vectors"], 1, "the model has dense, multivector, sparse"),
    ):
        assert cli.main([*again, *flags]) == status
        assert words in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("nothing --collection c", "no such file"),
        ("in.jsonl --collection a/b", "may not hold"),
        ("in.jsonl --collection c --chunk-tokens 5000", "--chunk-tokens is 5000"),
        ("in.jsonl --collection c --max-record-bytes 0", "--max-record-bytes is 0"),
        ("in.jsonl --collection c --qdrant-url http://h --qdrant-path p", "both given"),
        (
            "in.jsonl --collection c --url http://127.0.0.1:1 --qdrant-patience 0",
            "no answer within 0 s",
        ),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_done(tmp_path, monkeypatch, words, why, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"text": "one"}\n')
    assert why in said("ingest", *words.split(), status=1).err
    assert not (tmp_path / DEFAULT_PATH / "c").exists()


def test_a_server_of_another_model_is_refused(tmp_path, monkeypatch, bert, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"text": "one"}\n')
    with serving() as server:
        words = ["ingest", "in.jsonl", "--collection", "c", "--url", server.url]
        for flags, why in (
            ([], "needed here too, for its tokenizer"),
            (["--model-id", str(bert)], "but the server gives dense, multivector, sparse"),
        ):
            assert why in said(*words, *flags, status=1).err
