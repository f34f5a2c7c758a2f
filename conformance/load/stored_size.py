"""What a collection takes after `hybridtei ingest`: disk by component, beside the bytes of title
and text; peak memory.

    python -m conformance.load stored_size SOURCE [--folder FOLDER] [--flags='--outputs dense']

Runs the command into the embedded engine in FOLDER [default: a fresh one], and samples the memory
of the command and of the engine's process together, mapped pages included. Repeat a stopped run
with the same FOLDER to continue it.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil

from hybridtei.retrieval.ingest.files import documents_of, source_files
from hybridtei.retrieval.ingest.options import ReadOptions

MORE = {"type": str.split, "default": [], "help": "more flags of ingest"}
FLAGS = {"stored_size": {"source": {"type": Path}, "--folder": {"type": Path}, "--flags": MORE}}
COLLECTION, SAMPLE_SECONDS, ONCE_BYTES = "sized", 0.2, 30_000_000
# A part of the path -> its name; the first that fits
COMPONENTS = {
    "/wal/": "write-ahead log",
    "payload_storage": "payload (text, metadata, multi-vectors of bits)",
    "vector_storage-dense": "dense vectors",
    "vector_index-dense": "graph of dense vectors",
    "vector_storage-sparse": "sparse vectors, by document",
    "vector_index-sparse": "sparse vectors, by term",
    "multivector": "multi-vectors",
    "id_tracker": "ids and versions",
}


def ingest(source: Path, folder: Path, flags: list[str]) -> tuple[dict[str, float], float]:
    """(the command's summary, the most megabytes that it and its children held)."""
    line = [
        sys.executable,
        "-m",
        "hybridtei",
        "ingest",
        str(source),
        "--collection",
        COLLECTION,
        "--json",
        "--quiet",
    ]
    line += ["--quarantine", f"{folder}.quarantine.jsonl", "--qdrant-path", str(folder), *flags]
    process, peak = subprocess.Popen(line, stdout=subprocess.PIPE, text=True), 0
    watched = psutil.Process(process.pid)
    while process.poll() is None:
        with suppress(psutil.Error):
            peak = max(
                peak,
                sum(one.memory_info().rss for one in [watched, *watched.children(recursive=True)]),
            )
        time.sleep(SAMPLE_SECONDS)
    return json.loads(process.communicate()[0]), peak / 1e6


def stored_size(options: argparse.Namespace) -> int:
    folder = options.folder or Path(tempfile.mkdtemp(prefix="sized-"))
    summary, peak = ingest(options.source, folder, options.flags)
    print(
        f"{summary['documents']:,} documents, {summary['documents_per_s']:.1f}/s, "
        f"{summary['tokens_per_s']:,.0f} tokens/s"
    )
    print(f"peak memory of both processes {peak:,.0f} MB; collection in {folder}", flush=True)
    documents = [
        one for file in source_files(options.source) for one, _ in documents_of(file, ReadOptions())
    ]
    texts = [one.indexed_text for one in documents if hasattr(one, "indexed_text")]
    taken = Counter[str]()
    for file in folder.rglob("*"):
        if file.is_file():
            name = next(
                (
                    name
                    for part, name in COMPONENTS.items()
                    if part in f"/{file.relative_to(folder)}"
                ),
                "others",
            )
            taken[name] += file.stat().st_blocks * 512
    for name, size in [*taken.most_common(), ("all", taken.total())]:
        print(f"  {name:48}{size / 1e6:10.2f} MB{size / len(texts):10,.0f} bytes a document")
    text = sum(len(one.encode()) for one in texts)
    beyond, less = ((taken.total() - text - once) / len(texts) for once in (0, ONCE_BYTES))
    print(
        f"text {text / 1e6:.2f} MB; beyond it {beyond:,.0f} bytes a document, without 30 MB once "
        f"{less:,.0f}"
    )
    return 130 if summary["stopped"] else 0
