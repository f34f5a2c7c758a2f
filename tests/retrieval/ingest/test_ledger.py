"""The collection is the ledger: which files are read again, and what points are deleted."""

import os

import pytest

from hybridtei.retrieval.ingest.chunking import DOCUMENT_ID, FILE, SETTINGS, SOURCE
from hybridtei.retrieval.ingest.ledger import Source, StoredVersion, is_below, stored_documents
from hybridtei.retrieval.store.base import Stored
from hybridtei.retrieval.store.memory import MemoryStore
from tests.retrieval.ingest.small_ingest import NAME, Ingest, points


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "docs"
    folder.mkdir()
    for name in ("a", "b", "c"):
        (folder / f"{name}.txt").write_text(f"one {name}")
    return folder


def later(path):
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def same_size(path):
    path.write_text("two a")


def replaced(path):
    """By a file of the same size and time, as an archive restores it."""
    status, other = path.stat(), path.with_suffix(".new")
    other.write_text("six a")
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.rename(path)


@pytest.mark.parametrize(
    ("change", "documents"),
    [(later, 0), (same_size, 1), (replaced, 1)],
    ids=["touched", "changed", "replaced"],
)
async def test_a_file_is_read_until_its_size_and_times_are_stored(
    tmp_path, folder, change, documents
):
    store, ingest = MemoryStore(), Ingest(tmp_path)
    for files in (3, 0):
        assert (await ingest.run(folder, store)).files == files
    change(folder / "a.txt")
    stats = await ingest.run(folder, store)
    assert (stats.files, stats.documents, stats.unchanged) == (1, documents, 3 - documents)
    stats = await ingest.run(folder, store)
    assert (stats.files, stats.documents, stats.unchanged, stats.points) == (0, 0, 3, 3)
    texts = {point.payload["text"] for point in await points(store)}
    assert texts == {path.read_text() for path in folder.glob("*.txt")}


async def test_a_refreshed_point_keeps_its_vectors(tmp_path, folder):
    store, ingest = MemoryStore(), Ingest(tmp_path)
    await ingest.run(folder, store)
    before = {point.id: point for point in await points(store, with_vectors=True)}
    later(folder / "a.txt")
    await ingest.run(folder, store)
    after = {point.id: point for point in await points(store, with_vectors=True)}
    assert after.keys() == before.keys()
    changed = [name for name in after if after[name].payload != before[name].payload]
    assert len(changed) == 1
    assert after[changed[0]].payload | {FILE: None} == before[changed[0]].payload | {FILE: None}
    for name, point in after.items():
        assert point.vector["dense"] == pytest.approx(before[name].vector["dense"], abs=1e-6)
        assert point.vector["sparse"] == before[name].vector["sparse"]


async def test_other_versions_beside_a_complete_one_are_deleted(tmp_path, folder):
    store, ingest = MemoryStore(), Ingest(tmp_path)
    await ingest.run(folder, store)
    before = await points(store, with_vectors=True)
    left = [
        Stored(number, {**point.payload, SETTINGS: "others"}, point.vector)
        for number, point in enumerate(before)
    ]
    foreign = [
        Stored(90, {SOURCE: "docs/a.txt", DOCUMENT_ID: "docs/a.txt"}, before[0].vector),
        Stored(91, {**before[0].payload, SOURCE: "docs2"}, before[0].vector),
    ]
    await store.upsert(NAME, [*left, *foreign])
    stats = await ingest.run(folder, store)
    assert (stats.documents, stats.unchanged) == (0, 3)
    assert {point.id for point in await points(store)} == {90, 91, *(one.id for one in before)}


@pytest.mark.parametrize(
    ("chunks", "numbers", "is_complete"),
    [
        (2, [0, 1], True),
        (2, [0], False),
        (2, [0, 0], False),
        (2, [1, 2], False),
        (2, [0, 1, 2], False),
        (0, [], True),
        (True, [0], True),
        (300_000_000, [0], False),
        ("2", [0, 1], False),
        (1, [-1], False),
    ],
)
def test_a_version_is_complete_if_every_chunk_is_there_once(chunks, numbers, is_complete):
    version = StoredVersion("digest", "settings", chunks, None)
    version.numbers.update({f"id {place}": number for place, number in enumerate(numbers)})
    assert version.is_complete == is_complete


async def test_of_a_collection_a_file_alone_reads_only_its_own_points(tmp_path, folder):
    class Counting(MemoryStore):
        read = 0

        async def scroll(self, name, **page):
            records, offset = await super().scroll(name, **page)
            self.read += len(records)
            return records, offset

    store, ingest = Counting(), Ingest(tmp_path)
    await ingest.run(folder, store)
    for source, count in ((folder / "a.txt", 1), (folder, 3)):
        store.read = 0
        stats = await ingest.run(source, store)
        assert (store.read, stats.unchanged, stats.files, stats.points) == (count, count, 0, 3)


async def test_payloads_of_any_kind_are_read(tmp_path, folder):
    store, ingest = MemoryStore(), Ingest(tmp_path)
    await ingest.run(folder, store)
    before = await points(store, with_vectors=True)
    odd = [None, [5], {"a": 1}, 1.5, True, -7, 2**40, "x"]
    for field in ("digest", "settings", "chunks", "chunk", "file", "document_id"):
        changed = [
            Stored(place, {**before[0].payload, field: value}, before[0].vector)
            for place, value in enumerate(odd)
        ]
        await store.upsert(NAME, changed)
        assert await stored_documents(store, NAME, Source(folder, "docs"))
        await ingest.run(folder, store)
        await store.delete(NAME, list(range(len(odd))))
        stats = await ingest.run(folder, store)
        assert (stats.documents, stats.points) == (0, 3), field


@pytest.mark.parametrize(
    ("label", "is_there"),
    [("docs", True), ("docs/a", True), ("docs/a/b.txt", True), ("docs2", False), ("x/docs", False)],
)
def test_labels_of_a_source(label, is_there):
    assert is_below(label, ["docs"]) == is_there
