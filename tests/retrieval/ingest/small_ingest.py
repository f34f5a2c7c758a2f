"""An ingest over the small model and the fake backend: the real pipeline and stores, without
weights.

Also a process of its own, to be killed: python -m tests.retrieval.ingest.small_ingest SOURCE FOLDER
[TEXTS]; once it has embedded so many texts it stands still until a line comes in. It prints its
counts at the end.
"""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from conformance.small.fake_backend import FakeBackend
from hybridtei.config import EngineConfig
from hybridtei.encoder import Encoder
from hybridtei.retrieval.ingest import prepare as preparing
from hybridtei.retrieval.ingest.chunking import CHUNK, DOCUMENT_ID, Chunker, settings_for
from hybridtei.retrieval.ingest.files import Quarantine, source_files
from hybridtei.retrieval.ingest.ledger import Source, stored_documents
from hybridtei.retrieval.ingest.options import IngestOptions, IngestStats
from hybridtei.retrieval.ingest.pipeline import ingest
from hybridtei.retrieval.ingest.prepare import Preparation
from hybridtei.retrieval.ingest.run import VECTORS
from hybridtei.retrieval.ingest.write import Writer
from hybridtei.retrieval.store.collection import CollectionSchemas
from hybridtei.retrieval.store.embedded import EmbeddedStore
from hybridtei.retrieval.store.plan import schema_for
from tests.inference.engine import small

NAME = "small"


def written(folder):
    """The small model, and its tokenizer as a file in the folder that its facts name."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tokenizer.json"
    if not path.exists():
        path.write_text(small.tokenizer()._raw.to_str())
    return small.model(
        small.model_spec(folder=folder, prompts={"query": small.PROMPTS["query"]})
    ), path


def raw(path):
    return Tokenizer.from_file(str(path))


def plan(model):
    return schema_for(model.spec, "small", multivector_tokens=0, multivector_dtype="float")


def ids_of(records):
    return Counter((record.payload[DOCUMENT_ID], record.payload[CHUNK]) for record in records)


def reasons(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@dataclass
class Ingest:
    """What stays from run to run: a folder with the quarantine. `backend`: settings of the fake
    one."""

    folder: Path
    backend: Mapping[str, Any] = field(default_factory=dict)
    options: IngestOptions = field(
        default_factory=lambda: IngestOptions(source="", collection="", quiet=True)
    )
    chunk_tokens: int | None = None
    settings: str = ""
    earlier: Sequence[str] = ()
    stats: IngestStats = field(default_factory=IngestStats)

    @property
    def quarantine(self):
        return self.folder / "quarantine.jsonl"

    def embedder(self, model):
        return Encoder(model, FakeBackend(model.spec, **self.backend), 256, EngineConfig())

    async def run(self, source, store, embedder=None, name=NAME):
        """Once, as a command does it."""
        model, path = written(self.folder / "model")
        chunks = settings_for(model, self.chunk_tokens, None)
        existing = await store.describe(name)
        found = Source.of(source, existing)
        stored = {}
        if existing is not None:
            stored = await stored_documents(store, name, found)
        chunker = Chunker(model, raw(path), chunks)
        preparation = Preparation(
            files=list(source_files(source, found.label, known=found.known)),
            options=self.options,
            chunker=chunker,
            quarantine=Quarantine(self.quarantine),
            settings=self.settings or f"{chunks}",
            earlier=self.earlier,
            source=found,
            stored=stored,
        )
        self.stats = preparation.stats
        used = embedder or self.embedder(model)
        encode = partial(
            used.encode, outputs=model.spec.heads & frozenset(VECTORS), input_type="document"
        )
        try:
            schema, _ = await CollectionSchemas(store).collection(name, plan(model))
            if found.record:
                await store.annotate(name, found.record)
            await ingest(preparation, encode, Writer(store, name, schema, preparation, 0.0))
            self.stats.points = await store.count(name)
            return self.stats
        finally:
            self.stats.quarantined = len(preparation.quarantine)
            chunker.close()


async def points(store, name=NAME, **settings):
    """All records, page by page."""
    records, offset = [], None
    while True:
        page, offset = await store.scroll(name, limit=500, offset=offset, **settings)
        records += page
        if offset is None:
            return records


def write(path, texts, **more):
    """A JSON Lines file of these texts by id. `more`: of each record."""
    path.write_text(
        "".join(
            json.dumps({"id": name, "text": text, **more}) + "\n" for name, text in texts.items()
        )
    )
    return path


def standing_still(after):
    """A gate that holds the first pass after `after` texts until a line comes in: the moment for a
    signal."""
    embedded = 0

    def gate(batch):
        nonlocal embedded
        holds = embedded <= after
        embedded += len(batch.cu_seqlens) - 1
        if holds and embedded > after:
            print("standing still", flush=True)
            sys.stdin.readline()

    return gate


async def main(source, folder, texts):
    preparing.BATCH_CHUNKS = 64
    store = EmbeddedStore(str(folder / "qdrant"))
    try:
        backend = {} if texts is None else {"gate": standing_still(texts)}
        stats = await Ingest(folder, backend, chunk_tokens=24).run(source, store)
        print(json.dumps(asdict(stats)), flush=True)
    finally:
        await store.close()


if __name__ == "__main__":
    asyncio.run(
        main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None)
    )
