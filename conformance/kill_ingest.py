"""Kills an ingest again and again, and counts the stored documents: each exactly once, or status 1.

    python conformance/kill_ingest.py [--texts 20000] [--kills 10] [--seed 0] [--qdrant-url URL]

`hybridtei ingest` gets SIGKILL up to 3 s after the ledger has grown to a random length, is started again, and so on; then it
may finish. The collection is read from end to end and compared with the source: ids, texts, numbers of chunks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from hybridtei.config import StoreConfig
from hybridtei.ingest.chunking import CHUNK, DOCUMENT_ID, TEXT
from hybridtei.store import open_store

NAME = "killed"
WORDS = ["wing", "flow", "layer", "heat", "shock", "plate", "body", "mach", "pressure", "boundary", "speed", "cone", "jet"]


def write_source(path: Path, count: int, chance: random.Random) -> dict[str, str]:
    """{id: text}, each text different."""
    texts = {f"d{i}": f"{i} {' '.join(chance.choices(WORDS, k=chance.randint(3, 12)))}" for i in range(count)}
    path.write_text("".join(json.dumps({"id": name, "text": text}) + "\n" for name, text in texts.items()))
    return texts


def noted(folder: Path) -> int:
    """Lines of the ledger, wherever it is."""
    files = (*folder.glob("qdrant/.ingest/*.jsonl"), *folder.glob("cache/collections/*.jsonl"))
    return sum(file.read_bytes().count(b"\n") for file in files)


async def read_all(config: StoreConfig) -> list[dict]:
    """Payloads of all points."""
    store = open_store(config)
    assert store is not None
    payloads, offset = [], None
    try:
        while True:
            records, offset = await store.scroll(NAME, limit=1000, offset=offset)
            payloads += [record.payload for record in records]
            if offset is None:
                return payloads
    finally:
        await store.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=20_000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--qdrant-url")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        texts = write_source(folder / "texts.jsonl", options.texts, chance)
        where = ["--qdrant-url", options.qdrant_url] if options.qdrant_url else ["--qdrant-path", str(folder / "qdrant")]
        quarantine = ["--quarantine", str(folder / "quarantine.jsonl")]
        ingest = ["ingest", str(folder / "texts.jsonl"), "--collection", NAME, *where, *quarantine, "--quiet", "--json"]
        environment = {**os.environ, "HYBRIDTEI_CACHE": str(folder / "cache")} if options.qdrant_url else None
        command = [sys.executable, "-m", "hybridtei", *ingest]
        for kill, target in enumerate(sorted(chance.choices(range(options.texts), k=options.kills)), 1):
            with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment) as process:
                while noted(folder) < target and process.poll() is None:
                    time.sleep(0.05)
                time.sleep(chance.uniform(0.0, 3.0))
                ended = process.poll()
                process.kill()
            print(
                f"kill {kill:2}: {noted(folder):6} documents noted" + ("" if ended is None else f", had ended: {ended}"),
                flush=True,
            )
        began = time.monotonic()
        finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment)
        print(f"last run: status {finished.returncode}, {time.monotonic() - began:.0f} s: {finished.stdout.strip()}")
        path = None if options.qdrant_url else str(folder / "qdrant")
        payloads = asyncio.run(read_all(StoreConfig(qdrant_url=options.qdrant_url, qdrant_path=path)))
    counts = Counter((payload[DOCUMENT_ID], payload[CHUNK]) for payload in payloads)
    wrong = [payload[DOCUMENT_ID] for payload in payloads if texts.get(payload[DOCUMENT_ID]) != payload[TEXT]]
    missing = texts.keys() - {name for name, _ in counts}
    repeated = [name for name, count in counts.items() if count > 1]
    print(f"{len(payloads)} points, {len(missing)} missing, {len(repeated)} repeated, {len(wrong)} with another text")
    return 1 if missing or repeated or wrong or len(payloads) != len(texts) or finished.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
