"""What a reader sends is what one process would have made: the same batches, rejections and counts, after a trip as bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from hybridtei.config import EngineConfig, ModelConfig
from hybridtei.ingest.chunking import Chunker, ChunkSettings
from hybridtei.ingest.files import SourceFile, source_files
from hybridtei.ingest.ledger import Ledger, Quarantine
from hybridtei.ingest.options import IngestStats
from hybridtei.ingest.prepare import Preparation
from hybridtei.ingest.records import ReadOptions
from hybridtei.load import find_model, text_model
from hybridtei.on_ray.blocks import Receiver, decode_batch, decode_vectors, encode_batch, encode_vectors
from hybridtei.on_ray.ingest import LedgerSnapshot, ReaderConfig, blocks, split_files, stored_documents
from hybridtei.outputs import Embeddings
from tests.store.stores import embeddings

CHUNKS = ChunkSettings(tokens=24, overlap=4)
RECIPE = ReaderConfig(ModelConfig(), EngineConfig(), ReadOptions(), CHUNKS, b"settings")
LONG = "the flow over a swept wing at high speed . " * 3000  # more chunks than a batch holds


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    rows = [json.dumps({"_id": f"d{i}", "text": f"wing {i}", "year": 1900 + i, "of": [{"x": 0.1}]}) for i in range(300)]
    (folder / "a.jsonl").write_text("\n".join([*rows, '{"_id": "d1", "text": "again"}', "{broken", '{"text": ""}']))
    (folder / "b.csv").write_text("id,title,text\n1,one,first\n2,two\n3,three,third\n")
    (folder / "c.txt").write_text(LONG)
    (folder / "d.bin").write_bytes(b"\0")
    return folder


def in_this_process(source: Path, folder: Path) -> tuple[Preparation, list]:
    spec = find_model(ModelConfig())
    chunker = Chunker(text_model(spec, EngineConfig()), Tokenizer.from_file(str(spec.folder / "tokenizer.json")), CHUNKS)
    preparation = Preparation(
        files=list(source_files(source)),
        options=ReadOptions(),
        chunker=chunker,
        ledger=Ledger(folder / "ledger.jsonl"),
        quarantine=Quarantine(folder / "quarantine.jsonl"),
        settings=b"settings",
        stats=IngestStats(),
    )
    found = list(preparation.batches())
    chunker.close()
    return preparation, found


def rows(batch) -> list:
    document = [piece.pending for piece in batch.pieces]
    about = [(one.document.key, one.document.title, dict(one.document.metadata), one.digest, one.chunks) for one in document]
    return [(*what, piece.chunk) for what, piece in zip(about, batch.pieces, strict=True)]


def test_the_same_batches_rejections_and_counts(tmp_path, source):
    preparation, expected = in_this_process(source, tmp_path)
    files = list(preparation.files)
    receiver, rejected, begun = Receiver(files), [], 0
    arrived = [decode_batch(encode_batch(one)) for one in blocks(RECIPE, files, LedgerSnapshot({}, {}))]
    assert [one.is_last for one in arrived] == [False] * (len(arrived) - 1) + [True]
    batches = [receiver.batch(one) for one in arrived]
    assert [rows(batch) for batch in batches[:-1]] == [rows(batch) for batch in expected]
    assert [batch.files for batch in batches[:-1]] == [batch.files for batch in expected]
    assert [batch.done_bytes for batch in batches[:-1]] == [batch.done_bytes for batch in expected]
    for one in arrived:
        rejected += [(found.source, found.location, found.reason, found.excerpt) for found in one.rejected]
        begun += one.files_begun
    told = [json.loads(line) for line in preparation.quarantine.path.read_text().splitlines()]
    assert rejected == [tuple(line[name] for name in ("source", "location", "reason", "excerpt")) for line in told]
    assert len(rejected) == 5
    assert begun == preparation.stats.files == 4
    spanning = [
        {piece.pending for piece in batch.pieces if piece.pending.document.source.endswith("c.txt")} for batch in batches
    ]
    assert sum(map(bool, spanning)) > 1
    assert len(set().union(*spanning)) == 1, "a document that spans batches is one and the same to the writer"
    preparation.ledger.close()


def test_what_the_ledger_knows_is_left_out_and_counted(tmp_path, source):
    preparation, batches = in_this_process(source, tmp_path)
    ledger, files = preparation.ledger, list(preparation.files)
    done = {piece.pending for batch in batches for piece in batch.pieces if piece.pending.document.source.endswith("a.jsonl")}
    ledger.add([(one.document.key, one.digest, one.chunks) for one in done])
    ledger.finish([(files[2], 1)], b"settings")
    known = LedgerSnapshot(stored_documents(ledger), preparation.finished_files())
    found = list(blocks(RECIPE, files, known))
    assert {one.document.source for block in found for one in block.documents} == {"source/b.csv"}
    assert sum(block.skipped for block in found) == 301
    ledger.close()


FILES = st.lists(st.integers(0, 1000), max_size=30)


@given(FILES, st.integers(1, 12))
def test_shares_hold_every_file_once_in_order(sizes, readers):
    files = [SourceFile(Path(f"{i}"), f"{i}", size, 0) for i, size in enumerate(sizes)]
    found = split_files(files, readers)
    assert [file for share in found for file in share] == files
    assert len(found) <= readers
    assert all(found)


def test_vectors_travel_bit_by_bit():
    vectors = embeddings(5)
    back, reasons = decode_vectors(encode_vectors((vectors, [None, "why", None, None, None, None])))
    assert reasons[1] == "why"
    assert (back.dense == vectors.dense).all()
    assert (back.sparse.indices == vectors.sparse.indices).all()
    assert (back.multivector.values == vectors.multivector.values).all()
    nothing, _ = decode_vectors(encode_vectors((Embeddings(), [])))
    assert nothing.dense is None
