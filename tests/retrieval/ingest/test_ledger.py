"""The ledger: what the collection says of documents; and the cache of files, which says nothing wrong after any loss."""

from pathlib import Path

import pytest

from hybridtei.retrieval.ingest.files import SourceFile
from hybridtei.retrieval.ingest.ledger import FileCache, Ledger, is_below

SETTINGS, DOCUMENTS = "s" * 16, [("a", "digest"), ("b", "other")]


def file(size: int = 10, stamp: tuple[int, ...] = (5, 6, 7), label: str = "label") -> SourceFile:
    return SourceFile(Path("/x"), label, size, stamp)


def test_a_file_is_known_until_it_changes(tmp_path):
    path = tmp_path / "deep" / "files.sqlite"
    cache = FileCache(path)
    cache.put(file(), SETTINGS, DOCUMENTS)
    cache.close()
    cache = FileCache(path)
    assert cache.get(file(), SETTINGS) == DOCUMENTS
    for other in (
        file(11),
        file(stamp=(6, 6, 7)),
        file(stamp=(5, 7, 7)),
        file(stamp=(5, 6, 8)),
        file(label="named"),
    ):
        assert cache.get(other, SETTINGS) is None
    assert cache.get(file(), "t" * 16) is None
    cache.put(file(11), SETTINGS, DOCUMENTS[:1])
    assert (cache.get(file(11), SETTINGS), cache.get(file(), SETTINGS)) == (DOCUMENTS[:1], None)
    cache.close()


@pytest.mark.parametrize(
    "content", [b"", b"no database" * 1000, b"SQLite format 3\0" + b"x" * 5000]
)
def test_a_broken_cache_is_made_again(tmp_path, content):
    path = tmp_path / "files.sqlite"
    path.write_bytes(content)
    cache = FileCache(path)
    assert cache.get(file(), SETTINGS) is None
    cache.put(file(), SETTINGS, DOCUMENTS)
    assert cache.get(file(), SETTINGS) == DOCUMENTS
    cache.close()


async def test_nothing_is_asked_of_an_empty_collection():
    ledger = Ledger(None, "c", None)  # type: ignore[arg-type] - whatever it asked would raise
    assert await ledger.keys_below(["docs"]) == {}
    assert await ledger.documents([]) == {}


@pytest.mark.parametrize(
    ("label", "is_there"),
    [("docs", True), ("docs/a", True), ("docs/a/b.txt", True), ("docs2", False), ("x/docs", False)],
)
def test_labels_of_a_source(label, is_there):
    assert is_below(label, ["docs"]) == is_there
