"""`hybridtei ingest` of a source that lost documents: it says so, and deletes them only where that
is asked for and certain."""

import asyncio
import json
import os

import pytest

from hybridtei import cli
from hybridtei.encoder import Encoder
from hybridtei.retrieval.ingest import run as ingest_run
from hybridtei.retrieval.store.embedded import EmbeddedStore
from tests.retrieval.ingest.small_ingest import points


class Corpus:
    """A folder, the collection made of it, and what the command said last."""

    def __init__(self, folder, capsys):
        self.source, self._folder, self._capsys = folder / "corpus", folder, capsys
        self.source.mkdir()

    def in_words(self, *words, source="corpus"):
        """Its status, what it says, and what it says on the side."""
        self._capsys.readouterr()
        status = cli.main(
            [*f"ingest {source} --collection c --quiet --outputs dense".split(), *words]
        )
        return status, *self._capsys.readouterr()

    def ingest(self, *words, source="corpus"):
        status, told, _ = self.in_words("--json", *words, source=source)
        return status, json.loads(told) if told else {}

    def write(self, name, texts):
        lines = [json.dumps({"id": key, "text": text}) for key, text in texts.items()]
        (self.source / name).write_text("\n".join(lines) + "\n")

    def stored(self):
        async def read():
            store = EmbeddedStore(str(self._folder / "qdrant"))
            try:
                return {record.payload["document_id"] for record in await points(store, "c")}
            finally:
                await store.close()

        return asyncio.run(read())


@pytest.fixture(scope="module")
def embedder():
    """The model that the command would load for each ingest anew."""
    encoder = Encoder.load()
    yield encoder
    encoder.close()


@pytest.fixture
def corpus(tmp_path, monkeypatch, capsys, embedder):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(embedder, "close", lambda: None)
    monkeypatch.setattr(ingest_run, "_embedder", lambda *settings: embedder)
    found = Corpus(tmp_path, capsys)
    found.write("a.jsonl", {"a1": "one", "a2": "two", "a3": "three"})
    found.write("b.jsonl", {"b1": "four"})
    (found.source / "c.txt").write_text("five")
    status, told = found.ingest()
    assert (status, told["documents"]) == (0, 5)
    return found


ALL = {"a1", "a2", "a3", "b1", "corpus/c.txt"}


def test_documents_that_left_the_source_are_told_of_and_deleted_where_asked(corpus):
    corpus.write("a.jsonl", {"a1": "one", "a3": "three, changed"})
    (corpus.source / "b.jsonl").unlink()
    # The file is read in the first, and known to be unchanged in the second
    for _ in range(2):
        _, told, _ = corpus.in_words()
        assert (
            "2 documents left the source and stay searchable: --delete-missing deletes them" in told
        )
    assert corpus.stored() == ALL
    status, told, named = corpus.in_words("--delete-missing", "--json")
    told = json.loads(told)
    assert (status, told["documents_deleted"], told["points"]) == (0, 2, 3)
    assert "deletes   b1 of corpus/b.jsonl" in named.splitlines()
    assert corpus.stored() == {"a1", "a3", "corpus/c.txt"}
    status, told = corpus.ingest("--delete-missing")
    assert (status, told["unchanged"], told["documents_deleted"]) == (0, 3, 0)
    assert corpus.in_words()[1].endswith(": 3 points\n")


def test_a_dry_run_says_what_it_would_do_and_changes_nothing(corpus):
    corpus.write("a.jsonl", {"a1": "one", "a3": "three, changed", "a4": "new"})
    (corpus.source / "b.jsonl").unlink()
    _, told, named = corpus.in_words("--delete-missing", "--dry-run")
    assert "would delete b1 of corpus/b.jsonl" in named.splitlines()
    assert "nothing was changed: 2 documents would be stored, 2 are unchanged" in told
    assert "2 documents that left the source would be deleted" in told
    status, told = corpus.ingest("--dry-run", "--collection", "new")
    assert (status, told["documents"], told["points"], told["dry_run"]) == (0, 5 - 1, 0, True)
    assert corpus.stored() == ALL
    assert not (corpus.source.parent / "qdrant" / "new").exists()


def test_reread(corpus):
    assert corpus.ingest("--reread")[1]["unchanged"] == 5
    assert corpus.ingest("--reread", source="corpus/c.txt")[1]["unchanged"] == 1


@pytest.mark.slow
def test_a_source_that_yields_nothing_deletes_nothing(corpus):
    for file in sorted(corpus.source.iterdir()):
        file.write_text("")
    status, told = corpus.ingest("--delete-missing")
    assert (status, told["documents_deleted"]) == (1, 0)
    assert corpus.stored() == ALL
    for file in sorted(corpus.source.iterdir()):
        file.unlink()
    assert corpus.ingest("--delete-missing")[0] == 1
    assert corpus.stored() == ALL


@pytest.mark.slow
def test_what_could_not_be_read_is_not_missing(corpus):
    (corpus.source / "a.jsonl").write_text('{"id": "a1", "text": "one"}\n{"id": "a2", "tex\n')
    (corpus.source / "b.jsonl").write_text('{"id": "b1", "text": ""}\n')
    (corpus.source / "c.txt").write_bytes(b"\xff\xff")
    status, told = corpus.ingest("--delete-missing")
    assert (status, told["quarantined"], told["documents_deleted"]) == (0, 3, 0)
    assert told["documents_unclear"] == 2
    assert corpus.stored() == ALL


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_folder_that_may_not_be_entered_is_not_empty(corpus):
    (corpus.source / "deep").mkdir()
    corpus.write("deep/d.jsonl", {"d1": "six"})
    corpus.ingest()
    (corpus.source / "deep").chmod(0)
    try:
        status, told = corpus.ingest("--delete-missing")
    finally:
        (corpus.source / "deep").chmod(0o700)
    assert (status, told["quarantined"], told["documents_deleted"]) == (0, 1, 0)
    assert corpus.stored() == ALL | {"d1"}


def test_a_folder_of_the_same_name_is_another_source(corpus):
    other = corpus.source.parent / "elsewhere" / "corpus"
    other.mkdir(parents=True)
    (other / "d.jsonl").write_text(json.dumps({"id": "d1", "text": "six"}) + "\n")
    status, _ = corpus.ingest("--delete-missing", source="elsewhere/corpus")
    assert corpus.stored() >= ALL, "documents of the other folder are gone"
    assert status != 0
    status, told = corpus.ingest(
        "--delete-missing", "--source-name", "other", source="elsewhere/corpus"
    )
    assert (status, told["documents"], told["documents_deleted"]) == (0, 1, 0)
    assert corpus.stored() == ALL | {"d1"}
