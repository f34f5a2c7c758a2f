"""Documents that cannot be stored end in quarantine, and harm no other."""

from collections import Counter

from hybridtei.errors import BackendError
from hybridtei.retrieval.store.embedded import EmbeddedStore
from hybridtei.retrieval.store.memory import MemoryStore
from tests.inference.engine import small
from tests.retrieval.ingest.small_ingest import Ingest, ids_of, points, reasons, write, written


async def test_poison_rows_end_in_quarantine_and_the_collection_stays_readable(tmp_path):
    rows = [
        b'{"id": "good", "text": "one two"}',
        b'{"id": "empty", "text": ""}',
        b'{"id": "long", "text": "' + b"x" * 1_000_000 + b'"}',
        b'{"id": "nan", "text": "one", "score": NaN}',
        b'{"id": "bytes", "text": "\xff"}',
        b'{"id": "good", "text": "another of the name"}',
        b'{"id": "poison", "text": "poison"}',
        b'{"id": "lengths", "text": "lengths seven"}',
        b'{"id": "not a number", "text": "nan seven"}',
        b'{"id": "nothing", "text": "\x01"}'.replace(b"\x01", b"\\u0001"),
        b'{"id": "huge", "text": "one", "number": 1e400}',
        b'{"id": "last", "text": "three"}',
    ]
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(rows) + b"\n")

    store = EmbeddedStore(str(tmp_path / "qdrant"))
    ingest = Ingest(tmp_path, {"fail_on": small.IDS["poison"]})
    model, _ = written(tmp_path / "model")
    encoder = ingest.embedder(model)
    encode = encoder.encode

    def poisoned(texts, **settings):
        """But for two texts: sparse lengths that differ, a vector that is not a number."""
        found = encode(texts, **settings)
        for row, text in enumerate(texts):
            if text.startswith("nan"):
                found.dense[row, 0] = float("nan")
            if text.startswith("lengths"):
                raise BackendError("2 indices and 1 values in a sparse vector")
        return found

    encoder.encode = poisoned
    outcome = await ingest.run(tmp_path / "in.jsonl", store, encoder)
    assert outcome.points == 4
    # Without the number that cannot be stored
    names = {one[0] for one in ids_of(await points(store))}
    assert names == {"good", "nan", "huge", "last"}
    again = await ingest.run(tmp_path / "in.jsonl", store, encoder)
    assert (again.points, ingest.stats.unchanged, ingest.stats.quarantined) == (4, 4, 8)
    await store.close()
    reopened = EmbeddedStore(str(tmp_path / "qdrant"))
    assert len(await points(reopened, with_vectors=True)) == 4
    await reopened.close()
    told = {entry["location"]: entry["reason"] for entry in reasons(tmp_path / "quarantine.jsonl")}
    assert len(told) == 8
    for location, words in {
        "line 2": "`text` is empty",
        "line 3": "allowed are 1000000",
        "line 5": "no token",
        "line 6": "'good' was there before",
        "line 7, chunk 0": "the batch holds",
        "line 8, chunk 0": "2 indices and 1 values",
        "line 9, chunk 0": "not finite",
        "line 10": "no token",
    }.items():
        assert words in told[location], (location, told)


async def test_a_document_with_bad_chunks_is_not_there_at_all_and_told_once(tmp_path):
    lines = [f"The engine finds text {i} by words and meaning." for i in range(40)]
    text = "\n".join(["poison", *lines, "poison"])
    store = MemoryStore()
    ingest = Ingest(tmp_path, {"fail_on": small.IDS["poison"]}, chunk_tokens=32)
    outcome = await ingest.run(write(tmp_path / "in.jsonl", {"bad": text, "good": "one"}), store)
    assert ids_of(await points(store)) == Counter([("good", 0)])
    assert (outcome.points, ingest.stats.documents) == (1, 1)
    (entry,) = reasons(tmp_path / "quarantine.jsonl")
    assert "poison" in entry["excerpt"]
