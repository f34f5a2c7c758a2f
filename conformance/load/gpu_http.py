"""Requests a second of a server on a GPU, by client processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

NEEDED = ("litestar", "msgspec", "orjson", "uvicorn", "uvloop", "httptools", "swagger_ui_bundle", "psutil")
QUERIES, PASSAGES = "queries, a text each", "passages, 32 texts each"
CLIENTS = {QUERIES: 256, PASSAGES: 32}


def lacking() -> list[str]:
    """Packages that the server or the clients need and that are not here."""
    return [name for name in NEEDED if find_spec(name) is None]


@dataclass(frozen=True)
class Asking:
    """What some clients of one process do: `number` of them, for so long, with texts of these words."""

    url: str
    kind: str
    number: int
    seconds: float
    words: list[str]
    seed: int


def asked(what: Asking) -> tuple[int, int, int, list[float]]:
    """What they got: (requests, tokens, failures, latencies in ms)."""
    import random

    import uvloop
    from http_load import PASSAGE, QUERY, Clients, Texts, load

    class Words(Texts):
        def __init__(self) -> None:
            self._words, self._random = what.words, random.Random(what.seed)

    group = Clients(what.number, 1, ((1.0, QUERY),)) if what.kind == QUERIES else Clients(what.number, 32, ((1.0, PASSAGE),))
    uvloop.run(load(what.url, [group], min(1.0, what.seconds), Words()))
    (tally,) = uvloop.run(load(what.url, [group], what.seconds, Words()))
    return tally.requests, tally.tokens, tally.failures, tally.latencies_ms


def measure(name: str, *, dtype: str, workers: int, seconds: float, few: bool = False) -> Iterator[dict[str, object]]:
    """A row a traffic. `few`: a few clients only, to see that it works. The server's stderr is this process's."""
    from gpu_models import SHAPES, write
    from http_load import percentile, started

    with tempfile.TemporaryDirectory() as folder:
        words = write(SHAPES[name], folder, dtype)
        command = (
            f"{sys.executable} -m hybridtei serve --model-id {folder} --pooling cls --backend torch --dtype {dtype} "
            f"--hostname 127.0.0.1 --port {{port}} --http-workers {workers} --max-concurrent-requests 8192 "
            "--torch-compile false"  # or it would compile while it is measured
        )
        processes = 1 if few else min(4, max(1, (os.cpu_count() or 1) // 4))
        with started(command, stderr=None) as (url, _), _pool(processes) as pool:
            for kind, clients in CLIENTS.items():
                share = 2 if few else clients // processes
                asking = [Asking(url, kind, share, seconds, words[:5000], seed) for seed in range(processes)]
                found = [*pool.map(asked, asking)]
                latencies = [value for one in found for value in one[3]]
                yield {
                    "tokens": kind,
                    "clients": share * processes,
                    "requests_per_s": sum(one[0] for one in found) / seconds,
                    "tokens_per_s": sum(one[1] for one in found) / seconds,
                    "failures": sum(one[2] for one in found),
                    "p50_ms": percentile(latencies, 0.5),
                    "p95_ms": percentile(latencies, 0.95),
                }


def _pool(processes: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))
