"""Ingests that are killed, each followed by a whole one: python -m tests.retrieval.ingest.killed
FOLDER KILLS SEED

Before each kill some documents of the source change. After the whole ingest the collection must
equal a fresh one. Only kills that hit a running ingest count.
"""

import asyncio
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np

from hybridtei.retrieval.ingest import prepare as preparing
from hybridtei.retrieval.ingest.chunking import FILE
from hybridtei.retrieval.ingest.options import IngestOptions
from hybridtei.retrieval.store.embedded import EmbeddedStore
from hybridtei.retrieval.store.memory import MemoryStore
from tests.retrieval.ingest.small_ingest import Ingest, points, write

TABLE_DOCUMENTS, FILES, LONGEST = 24, 6, 12
MOST_CHANGES, LONGEST_CHANGE_S = 6, 0.02
OPTIONS = IngestOptions(source="", collection="", quiet=True, delete_missing=True)


class Source:
    """A folder of a table and text files, whose documents have one to many chunks."""

    def __init__(self, folder, draw):
        self.folder, self.draw = folder / "docs", draw
        self.folder.mkdir(parents=True)
        self.rows = {f"d{number}": self._text() for number in range(TABLE_DOCUMENTS)}
        self.files = {f"f{number}": self._text() for number in range(FILES)}
        self._write()

    def change(self):
        """Change a third of the documents, delete some, and add some."""
        for texts, count in ((self.rows, TABLE_DOCUMENTS), (self.files, FILES)):
            for number in self.draw.sample(range(count), count // 3):
                name = f"{'d' if texts is self.rows else 'f'}{number}"
                if self.draw.random() < 0.2:
                    texts.pop(name, None)
                else:
                    texts[name] = self._text()
        self._write()

    def _text(self):
        lines = range(self.draw.randint(1, LONGEST))
        return "\n".join(f"text {self.draw.randint(0, 9)} by words {line}" for line in lines)

    def _write(self):
        write(self.folder / "rows.jsonl", self.rows)
        for number in range(FILES):
            path = self.folder / f"f{number}.txt"
            if path.stem in self.files:
                path.write_text(self.files[path.stem])
            else:
                path.unlink(missing_ok=True)


def forked(work):
    """Start a process that runs the work, and return its id. Threads start only there."""
    process = os.fork()
    if process:
        work.close()
        return process
    status = 1
    try:
        asyncio.run(work)
        status = 0
    finally:
        sys.stderr.flush()
        os._exit(status)


class Telling(EmbeddedStore):
    """Writes a byte to a pipe before each change of the collection."""

    def __init__(self, path, pipe):
        super().__init__(path)
        self._pipe = pipe

    async def upsert(self, *arguments):
        os.write(self._pipe, b"u")
        await super().upsert(*arguments)

    async def delete(self, *arguments):
        os.write(self._pipe, b"d")
        await super().delete(*arguments)


async def ingest(source, folder, pipe):
    store = Telling(str(folder / "qdrant"), pipe)
    await Ingest(folder, options=OPTIONS, chunk_tokens=24).run(source, store)
    await store.close()


async def check(source, folder):
    """Ingest the source, also into a new collection, and compare both."""
    store, other = EmbeddedStore(str(folder / "qdrant")), MemoryStore()
    for target in (store, other):
        await Ingest(folder, options=OPTIONS, chunk_tokens=24).run(source, target)
    resumed, fresh = [
        {point.id: point for point in await points(target, with_vectors=True)}
        for target in (store, other)
    ]
    assert resumed.keys() == fresh.keys(), (len(resumed), len(fresh))
    for identity, point in resumed.items():
        assert point.payload == fresh[identity].payload
        assert point.payload["source"].endswith(".jsonl") or FILE in point.payload
        assert np.allclose(point.vector["dense"], fresh[identity].vector["dense"], atol=1e-6)
    await store.close()


def main(folder, kills, seed):
    preparing.BATCH_CHUNKS = 8
    draw = random.Random(seed)
    source, hits = Source(folder, draw), 0
    while hits < kills:
        reading, writing = os.pipe()
        process = forked(ingest(source.folder, folder, writing))
        os.close(writing)
        for _ in range(draw.randint(1, MOST_CHANGES)):
            os.read(reading, 1)
        time.sleep(draw.uniform(0, LONGEST_CHANGE_S))
        os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
        hits += os.WIFSIGNALED(status)
        os.close(reading)
        _, status = os.waitpid(forked(check(source.folder, folder)), 0)
        assert status == 0
        source.change()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
