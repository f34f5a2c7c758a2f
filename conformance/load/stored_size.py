"""What a collection takes after `hybridtei ingest`: disk by component, memory throughout, and how long rrf + MaxSim takes.

    python conformance/load/stored_size.py SOURCE [--folder FOLDER] [--queries FILE.jsonl] [-- flags of ingest]

Runs the command into the embedded engine in FOLDER [default: a fresh one], and samples the memory of the command and of the
engine's process together, mapped pages included. Disk is what the files' blocks take, beside the bytes of title and text. Then
searches in this process, by queries that are embedded before. A run that is stopped goes on with the same FOLDER.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

from hybridtei.config import StoreConfig
from hybridtei.encoder import Encoder
from hybridtei.ingest.files import documents_of, source_files
from hybridtei.ingest.records import ReadOptions
from hybridtei.search.local import query_model
from hybridtei.search.options import SearchOptions
from hybridtei.search.searcher import Searcher
from hybridtei.store import open_store

COLLECTION, SAMPLE_S, ONCE_BYTES = "sized", 0.2, 30_000_000
COMPONENTS = {  # a part of the path -> its name; the first that fits
    "/wal/": "write-ahead log",
    "payload_storage": "payload (text, metadata, multi-vectors of bits)",
    "vector_storage-dense": "dense vectors",
    "vector_index-dense": "graph of dense vectors",
    "vector_storage-sparse": "sparse vectors, by document",
    "vector_index-sparse": "sparse vectors, by term",
    "multivector": "multi-vectors",
    "id_tracker": "ids and versions",
    ".ingest": "ledger",
}


class Memory(threading.Thread):
    """Peak resident bytes of a process and its children, mapped pages included."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.peak, self.done = pid, 0, threading.Event()

    def run(self) -> None:
        while not self.done.wait(SAMPLE_S):
            self.peak = max(self.peak, sum(map(resident, [self.pid, *children(self.pid)])))


def children(pid: int) -> list[int]:
    try:
        found = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [*found, *(one for child in found for one in children(child))]


def resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def by_component(folder: Path) -> dict[str, int]:
    """Bytes of blocks on disk."""
    taken: dict[str, int] = defaultdict(int)
    for file in folder.rglob("*"):
        if file.is_file():
            name = next((name for part, name in COMPONENTS.items() if part in f"/{file.relative_to(folder)}"), "others")
            taken[name] += file.stat().st_blocks * 512
    return dict(sorted(taken.items(), key=lambda item: -item[1]))


async def times_ms(folder: Path, encoder: Encoder, queries: list[str]) -> list[float]:
    """Of rrf with `rescore`, without the query's embedding."""
    store = open_store(StoreConfig(qdrant_path=str(folder)))
    assert store is not None
    try:
        searcher, times = Searcher(store, query_model(encoder, "minilm-hybrid")), []
        embedded = await searcher.embed(COLLECTION, queries)
        for row, query in enumerate(queries):
            began = time.perf_counter()
            await searcher.find(COLLECTION, query, embedded, row, SearchOptions(mode="rrf", rescore=True))
            times.append((time.perf_counter() - began) * 1000)
        return times
    finally:
        await store.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--queries", type=Path, help="jsonl with `text` [default: titles of the source]")
    own, _, flags = " ".join(sys.argv[1:]).partition(" -- ")
    options = parser.parse_args(own.split())
    folder = options.folder or Path(tempfile.mkdtemp(prefix="sized-"))
    line = [sys.executable, "-m", "hybridtei", "ingest", str(options.source), "--collection", COLLECTION, "--json", "--quiet"]
    line += ["--quarantine", f"{folder}.quarantine.jsonl", "--qdrant-path", str(folder), *flags.split()]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command stops by itself, and says so
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    memory = Memory(process.pid)
    memory.start()
    summary = json.loads(process.communicate()[0])
    memory.done.set()
    print(f"{summary['documents']:,} documents, {summary['documents_per_s']:.1f}/s, {summary['tokens_per_s']:,.0f} tokens/s")
    print(f"peak memory of both processes {memory.peak / 1e6:,.0f} MB", flush=True)
    if summary["stopped"]:
        return 130
    documents = [one for file in source_files(options.source) for one, _ in documents_of(file, ReadOptions())]
    read = [one for one in documents if hasattr(one, "indexed_text")]
    text = sum(len(one.indexed_text.encode()) for one in read)
    taken = by_component(folder)
    for name, size in taken.items():
        print(f"  {name:48}{size / 1e6:10.2f} MB{size / len(read):10,.0f} bytes a document")
    total = sum(taken.values())
    beyond, less = (total - text) / len(read), (total - text - ONCE_BYTES) / len(read)
    print(f"  {'all':48}{total / 1e6:10.2f} MB; text {text / 1e6:.2f} MB")
    print(f"beyond the text {beyond:,.0f} bytes a document; without 30 MB once {less:,.0f}")
    if options.queries is not None:
        queries = [json.loads(row)["text"] for row in options.queries.read_text(encoding="utf-8").splitlines()][:200]
    else:
        queries = [one.indexed_text[:80] for one in read[:: max(len(read) // 200, 1)]][:200]
    times = asyncio.run(times_ms(folder, Encoder.load(), queries))
    p50, p95 = np.percentile(times, [50, 95])
    print(f"rrf + MaxSim p50 {p50:.1f} ms, p95 {p95:.1f} ms, {len(times)} queries")
    return 0


if __name__ == "__main__":
    sys.exit(main())
