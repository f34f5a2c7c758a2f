"""Chunks know the headings above them and the header of their table."""

from contextlib import closing

import numpy as np
import pytest

import hybridtei
from hybridtei import Encoder
from hybridtei.config import EngineConfig, ModelConfig, StoreConfig
from hybridtei.inference.load import find_model, text_model
from hybridtei.models.checkpoint.tokenizer.vocabularies import read_raw
from hybridtei.retrieval.ingest.chunking import Chunker, settings_for
from hybridtei.retrieval.ingest.document import Document
from hybridtei.retrieval.store import opened
from tests.retrieval.ingest.sources.reading import one_of, text_of

SENTENCES = " ".join(f"Sentence {number} says what the machine does next." for number in range(12))
MANUAL = f"""# Install

Before all, read this.

## Docker

{SENTENCES}

### Ports

{SENTENCES}

Windows
-------

{SENTENCES}
"""


def chunker(tokens, *, headings=True):
    spec = find_model(ModelConfig())
    model = text_model(spec, EngineConfig())
    settings = settings_for(model, tokens, 0, headings=headings)
    return Chunker(model, read_raw(spec.folder), settings)


def chunks_of(path, data, tokens=96, **settings):
    document = one_of(path, data)
    assert isinstance(document, Document), document
    (chunks,) = chunker(tokens, **settings).chunks_of([document])
    text = document.indexed_text
    assert all(text[chunk.start :].startswith(chunk.text) for chunk in chunks)
    assert all(chunk.tokens <= tokens for chunk in chunks)
    return chunks


def test_a_chunk_has_the_path_of_its_headings(tmp_path):
    chunks = chunks_of(tmp_path / "a.md", MANUAL)
    assert chunks[0].context == ""
    contexts = list(dict.fromkeys(chunk.context for chunk in chunks[1:]))
    assert contexts == ["Install > Docker", "Install > Docker > Ports", "Install > Windows"]
    spec = find_model(ModelConfig())
    model = text_model(spec, EngineConfig())
    for chunk in chunks:
        text = f"{chunk.context}\n{chunk.text}".strip()
        assert chunk.tokens == len(model.reader.tokenizer.encode([text])[0])


def test_without_headings_chunks_have_no_context(tmp_path):
    chunks = chunks_of(tmp_path / "a.md", MANUAL, headings=False)
    assert {chunk.context for chunk in chunks} == {""}


@pytest.mark.parametrize("tokens", [40, 64, 96, 128, 200])
def test_no_chunk_ends_with_a_heading(tmp_path, tokens):
    for chunk in chunks_of(tmp_path / "a.md", MANUAL, tokens):
        assert not chunk.text.rstrip("-\n ").endswith(("Docker", "Ports", "Windows", "Install"))
    page = "".join(f"<h2>Part {number}</h2><p>{SENTENCES}</p>" for number in range(5))
    for chunk in chunks_of(tmp_path / "a.html", f"<body>{page}</body>", tokens):
        assert "Part" not in chunk.text[-8:]


def test_rows_have_the_header_of_their_table(tmp_path):
    rows = "".join(f"<tr><td>P-{n}</td><td>{n * 7}</td></tr>" for n in range(1000, 1080))
    table = f"<table><tr><th>Part</th><th>Stock</th></tr>{rows}</table>"
    page = f"<body><h1>Parts</h1>{table}<p>{SENTENCES}</p></body>"
    first, second, *_, last = chunks_of(tmp_path / "a.html", page)
    assert first.text.startswith("Parts\nPart | Stock\nP-1000 | 7000")
    assert second.context == "Parts\nPart | Stock"
    assert last.context == "Parts"


def test_a_fence_that_fits_is_not_cut(tmp_path):
    code = "\n".join(f"value_{number} = {number}" for number in range(7))
    fence = f"```python\n{code}\n```"
    text = "\n\n".join(f"## Part {number}\n\n{SENTENCES}\n\n{fence}" for number in range(4))
    chunks = chunks_of(tmp_path / "a.md", text, 128)
    assert sum(chunk.text.count(fence) for chunk in chunks) == 4
    assert sum(chunk.text.count("```") for chunk in chunks) == 8
    for path, kind in ((tmp_path / "b.md", "# no heading\nx = 1"), (tmp_path / "c.md", "a\n---")):
        document = one_of(path, f"```\n{kind}\n```\n\ntext")
        assert document.outline.places == []


def test_dotted_lines_of_contents_and_of_prices_stay(tmp_path):
    entries = "\n".join(f"{n}. Chapter {'. ' * 12}{n * 7}" for n in range(1, 8))
    text = f"Contents\n\n{entries}\n\n{SENTENCES}"
    assert text_of(tmp_path / "a.txt", text) == text.strip()


async def test_only_dense_vectors_read_the_context(tmp_path):
    source = tmp_path / "docs"
    source.mkdir()
    (source / "a.md").write_text(MANUAL)
    folder = tmp_path / "store"
    with closing(Encoder.load()) as encoder:
        choices = {"chunk_tokens": 96, "headings": True, "quiet": True}
        choices["quarantine"] = str(tmp_path / "rejected")
        hybridtei.ingest(source, "docs", encoder, folder, **choices)
        async with opened(StoreConfig(qdrant_path=str(folder))) as store:
            records, _ = await store.scroll("docs", limit=100, with_vectors=True)
        outputs = ("dense", "sparse")
        assert any("context" in record.payload for record in records)
        for record in records:
            context, text = record.payload.get("context", ""), record.payload["text"]
            plain = encoder.encode([text], outputs)
            whole = encoder.encode([f"{context}\n{text}".strip()], outputs)
            assert np.allclose(record.vector["dense"], whole.dense[0], atol=1e-3)
            indices = sorted(record.vector["sparse"]["indices"])
            assert indices == plain.sparse.row(0)[0].tolist()
        summary = hybridtei.ingest(source, "docs", encoder, folder, **choices)
        assert summary.stats.unchanged == 1
