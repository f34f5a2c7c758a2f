"""What ingest costs beside its encoder: `hybridtei ingest` against `Encoder.encode` on the same chunks, alternating.

    python conformance/load/ingest_rate.py [--rounds 3] [--documents 300] [--dtype bfloat16] [--backend ort]

Documents of mixed lengths (70 % of 5–30 tokens, 30 % of 100–250) go from a jsonl file into a fresh embedded collection; the
encoder alone gets the very chunks that the ingest makes of them, all at once. Both start with the model loaded; ingest's clock
runs from the first byte read to the last acknowledgement. Prints medians of tokens/s and the ratio (target 0.90); and of
seconds of CPU, the embedded engine's process included, which say the same on a machine that others use too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from http_load import MIXED, Texts
from tokenizers import Tokenizer

from hybridtei.config import EngineConfig, ModelConfig
from hybridtei.encoder import Encoder
from hybridtei.ingest.chunking import Chunker, settings_for
from hybridtei.ingest.embedders import vector_heads
from hybridtei.ingest.files import documents_of, source_files
from hybridtei.ingest.ledger import Ledger, Quarantine
from hybridtei.ingest.options import IngestStats
from hybridtei.ingest.pipeline import ingest
from hybridtei.ingest.prepare import Preparation
from hybridtei.ingest.records import ReadOptions
from hybridtei.load import find_model, text_model
from hybridtei.store.embedded import EmbeddedStore
from hybridtei.store.plan import schema_for


def ingest_rate(encoder: Encoder, chunker: Chunker, source: Path, folder: Path, model_id: str) -> float:
    """Tokens a second into a new collection."""
    preparation = Preparation(
        files=list(source_files(source)),
        options=ReadOptions(),
        chunker=chunker,
        ledger=Ledger(folder / "ledger.jsonl"),
        quarantine=Quarantine(folder / "quarantine.jsonl"),
        settings=b"rate",
        stats=IngestStats(),
    )

    async def run() -> None:
        store = EmbeddedStore(str(folder / "qdrant"))
        try:
            outcome = await ingest(preparation, encoder, store, "rate", schema_for(encoder.spec, model_id))
            assert outcome.points == outcome.expected == preparation.stats.chunks, outcome
        finally:
            await store.close()

    asyncio.run(run())
    preparation.ledger.close()
    return preparation.stats.tokens_per_s


def encoder_rate(encoder: Encoder, texts: list[str], tokens: int) -> float:
    """Tokens a second of the same chunks, and nothing else."""
    heads = vector_heads(encoder.spec.heads, None)
    began = time.perf_counter()
    encoder.encode(texts, outputs=heads, input_type="document")
    return tokens / (time.perf_counter() - began)


def cpu_seconds() -> float:
    """Of this process and of those it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--documents", type=int, default=300)
    parser.add_argument("--source", type=Path, help="a file or folder instead of random words")
    parser.add_argument("--dtype")
    parser.add_argument("--backend", default="auto")
    options = parser.parse_args()
    config = ModelConfig(dtype=options.dtype, backend=options.backend)
    encoder, spec = Encoder.load(config=config), find_model(config)
    model = text_model(spec, EngineConfig())
    raw = Tokenizer.from_file(str(spec.folder / "tokenizer.json"))
    chunker = Chunker(model, raw, settings_for(model, None, None))
    found: dict[str, list[float]] = {"encoder": [], "ingest": []}
    spent: dict[str, list[float]] = {"encoder": [], "ingest": []}
    with tempfile.TemporaryDirectory() as place:
        source = options.source or Path(place) / "texts.jsonl"
        if options.source is None:
            draw = Texts()
            source.write_text("".join(json.dumps({"text": draw.draw(MIXED)[0]}) + "\n" for _ in range(options.documents)))
        documents = [found for file in source_files(source) for found, _ in documents_of(file, ReadOptions())]
        texts = [document.indexed_text for document in documents if hasattr(document, "indexed_text")]
        chunks = [chunk for per_text in chunker.chunks_of(texts) for chunk in per_text]
        tokens = sum(chunk.tokens for chunk in chunks)
        for turn in range(options.rounds):
            folder = Path(place) / str(turn)
            folder.mkdir()
            began = cpu_seconds()
            found["encoder"].append(encoder_rate(encoder, [chunk.text for chunk in chunks], tokens))
            spent["encoder"].append(cpu_seconds() - began)
            began = cpu_seconds()
            found["ingest"].append(ingest_rate(encoder, chunker, source, folder, config.model_id))
            spent["ingest"].append(cpu_seconds() - began)
    chunker.close()
    medians = {name: statistics.median(rates) for name, rates in found.items()}
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"{len(texts)} documents, {len(chunks)} chunks, {encoder.backend_name} {encoder.dtype}")
    for name, rates in found.items():
        print(f"{name:10}{medians[name]:10.0f} tokens/s   ({', '.join(f'{rate:.0f}' for rate in rates)})")
    cpu = {name: statistics.median(seconds) for name, seconds in spent.items()}
    print(f"CPU {cpu['encoder']:.1f} s encoder, {cpu['ingest']:.1f} s ingest: ratio {cpu['encoder'] / cpu['ingest']:.2f}")
    print(f"ingest / encoder {medians['ingest'] / medians['encoder']:.2f}")
    print(json.dumps({name: round(value, 1) for name, value in medians.items()}))


if __name__ == "__main__":
    main()
