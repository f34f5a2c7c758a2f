"""Folders: the same files in the same order, none from outside, none waited for."""

import os
from pathlib import Path

import pytest

from hybridtei.errors import InvalidInput
from hybridtei.retrieval.ingest.files import documents_of, source_files
from hybridtei.retrieval.ingest.options import ReadOptions


def labels(source, name=None):
    return [file.label for file in source_files(source, name) if file.left_out is None]


def test_a_folder_in_order_and_by_its_own_name(tmp_path):
    root = tmp_path / "docs"
    for name in ("b.txt", "a/z.md", "a/b/c.html", ".hidden/x.txt", ".secret.txt", "unknown.bin"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")
    assert labels(root) == ["docs/a/b/c.html", "docs/a/z.md", "docs/b.txt", "docs/unknown.bin"]
    assert labels(root / ".." / "docs", "named")[0] == "named/a/b/c.html"
    assert labels(root / "b.txt") == ["b.txt"]


def test_links_lead_nowhere_else_and_a_pipe_is_not_waited_for(tmp_path):
    root, outside = tmp_path / "docs", tmp_path / "outside"
    for folder in (root, outside):
        folder.mkdir()
        (folder / "a.txt").write_text("x")
    links = {"loop": root, "folder": outside, "out.txt": outside / "a.txt"}
    links |= {
        f"{name}.txt": root / f"{to}.txt"
        for name, to in (("in", "a"), ("gone", "x"), ("self", "self"))
    }
    for name, target in links.items():
        (root / name).symlink_to(target)
    os.mkfifo(root / "pipe.txt")
    assert {file.label: file.left_out for file in source_files(root)} == {
        "docs/a.txt": None,
        "docs/in.txt": None,
        "docs/loop": "links to folders",
        "docs/folder": "links to folders",
        "docs/out.txt": "links to files outside of the folder",
        "docs/gone.txt": "links that lead nowhere",
        "docs/self.txt": "links that lead nowhere",
        "docs/pipe.txt": "pipes, sockets and devices",
    }


def test_a_beir_folder_is_its_corpus(tmp_path):
    (tmp_path / "corpus.jsonl").write_text(
        '{"_id": "d1", "title": "T", "text": "x", "metadata": {}}\n'
    )
    (tmp_path / "queries.jsonl").write_text('{"_id": "q1", "text": "query"}\n')
    (tmp_path / "qrels").mkdir()
    (tmp_path / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n")
    file, *others = source_files(tmp_path, "beir")
    assert {other.left_out for other in others} == {"queries and judgements beside a BEIR corpus"}
    ((found, read_bytes),) = documents_of(file, ReadOptions())
    assert (file.label, found.document_id, found.title) == ("beir/corpus.jsonl", "d1", "T")
    assert 0 < read_bytes <= file.size


def test_a_file_without_a_reader_is_told(tmp_path):
    (tmp_path / "a.bin").write_bytes(bytes(1000))
    (file,) = source_files(tmp_path)
    ((found, _),) = documents_of(file, ReadOptions())
    assert "no reader for files ending in '.bin'" in found.reason


def test_a_file_that_is_gone_again(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    (file,) = source_files(tmp_path)
    file.path.unlink()
    ((found, _),) = documents_of(file, ReadOptions())
    assert "cannot be read" in found.reason


def test_no_source(tmp_path):
    with pytest.raises(InvalidInput, match="no such file"):
        list(source_files(tmp_path / "nothing"))


def test_what_ingests_write_is_no_source(tmp_path):
    stored = ("qdrant/.lock", "qdrant/notes/layout.json", "qdrant/notes/shard/wal/open-1")
    for name in ("a.txt", "notes.quarantine.jsonl", *stored):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    assert labels(tmp_path, "here") == ["here/a.txt"]


@pytest.mark.parametrize("looked_at", range(1, 6))
@pytest.mark.parametrize("name", ["b.txt", "b"])
def test_what_vanishes_during_the_walk_is_not_there(tmp_path, monkeypatch, looked_at, name):
    for file in ("a.txt", f"{name}/deep.txt" if name == "b" else name, "c.txt"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("x")
    seen, stat = [], Path.stat

    def vanishing(path, **settings):
        found = stat(path, **settings)
        if path.name == name:
            seen.append(1)
            if len(seen) == looked_at:
                path.rename(tmp_path.parent / f"{tmp_path.name}-{name}")
        return found

    monkeypatch.setattr(Path, "stat", vanishing)
    assert {"docs/a.txt", "docs/c.txt"} <= set(labels(tmp_path, "docs"))
