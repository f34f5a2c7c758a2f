"""`hybridtei ingest --engine ray` on this machine: what a second worker gains, and whether a killed one costs a document.

    python conformance/load/ray_scaling.py [--documents 50000] [--rate-documents 6000] [--rounds 2] [--outputs dense,sparse]

First 1 and 2 workers, one thread each, alternating, over the same texts: documents/s from about the third batch of each worker
to one of the last, so neither the start of Ray nor the loading of models counts. On a machine that others use too, the seconds
of CPU say more: what is spent outside the workers bounds the gain on two processors, at best 2 / (1 + outside / workers). Then
all documents with two workers, one of which is killed when half is embedded: every document should be there once. Model and
store are the embedded ones, texts are random words: 20 to 60 where rates are measured, 4 to 9 where a worker is killed. Prints
a table and a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil

from hybridtei.config import EngineConfig, ModelConfig, StoreConfig
from hybridtei.ingest.options import IngestOptions, Summary
from hybridtei.ingest.run import run_ingest
from hybridtei.on_ray.cluster import join
from hybridtei.on_ray.ingest import RayPipeline

ACTORS = "MapWorker"
LOOK_EVERY = 4  # batches: looking at processes takes time of its own
SENTENCE = "flow of air over a swept wing at high speed and heat transfer through the boundary layer behind shock waves"


def actors() -> dict[int, psutil.Process]:
    """Ray's processes that hold an engine."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        try:
            if ACTORS in " ".join(process.cmdline()):
                found[process.pid] = process
        except psutil.Error:
            continue
    return found


def spent(process: psutil.Process) -> float:
    """Seconds of CPU so far."""
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


@dataclass
class Watch:
    """What passes by on its way to the writer. `kill_after`: chunks, after which a worker is killed."""

    workers: int
    kill_after: int | None = None
    chunks: int = 0
    killed: int | None = None
    began: float = 0.0
    chunks_then: int = 0
    cpu_then: tuple[float, float] = (0.0, 0.0)
    cpu: tuple[float, float] = (0.0, 0.0)
    ended: float = 0.0
    last: int = 0
    seen: set[int] = field(default_factory=set)
    _batches: int = 0
    _spent: dict[int, float] = field(default_factory=dict)

    def batch(self, pieces: int) -> None:
        """One more, before it is written."""
        self.chunks += pieces
        self._batches += 1
        if not self.began and self.chunks >= 256 * 3 * self.workers:
            self.began, self.chunks_then, self.cpu_then = time.perf_counter(), self.chunks, self._cpu(actors())
        elif self._batches % LOOK_EVERY == 0 and pieces:
            working = actors()
            self.ended, self.last, self.cpu = time.perf_counter(), self.chunks, self._cpu(working)
            if self.kill_after is not None and self.killed is None and self.chunks >= self.kill_after:
                self.killed = min(working)
                working[self.killed].kill()

    def _cpu(self, working: dict[int, psutil.Process]) -> tuple[float, float]:
        """(of the workers, of all else that belongs to the ingest), of processes that have ended too: Ray ends a worker that
        has nothing left to do."""
        self.seen |= set(working)
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
            self._spent[process.pid] = max(spent(process), self._spent.get(process.pid, 0.0))
        inside = sum(seconds for pid, seconds in self._spent.items() if pid in self.seen)
        return inside, sum(self._spent.values()) - inside

    @property
    def documents_per_s(self) -> float:
        return (self.last - self.chunks_then) / (self.ended - self.began)

    @property
    def cpu_ms(self) -> tuple[float, float]:
        """Milliseconds of CPU a document: (in the workers, outside)."""
        made = self.last - self.chunks_then
        return tuple(1e3 * (now - then) / made for now, then in zip(self.cpu, self.cpu_then, strict=True))  # type: ignore[return-value]


def ingested(source: Path, folder: Path, watch: Watch, outputs: str | None = None) -> Summary:
    """The command's own run, watched."""
    original = RayPipeline.embedded

    async def watched(self: RayPipeline, *given: Any) -> AsyncIterator[Any]:
        async for ready in original(self, *given):
            watch.batch(len(ready[0].pieces))
            yield ready

    RayPipeline.embedded = watched  # type: ignore[method-assign]
    request = IngestOptions(
        source=str(source),
        collection="ray",
        quarantine=str(folder / "bad.jsonl"),
        quiet=True,
        engine="ray",
        ray_workers=watch.workers,
    )
    request = msgspec.structs.replace(request, outputs=tuple(outputs.split(",")) if outputs else None)
    try:
        return run_ingest(request, ModelConfig(), EngineConfig(), StoreConfig(qdrant_path=str(folder / "qdrant")))
    finally:
        RayPipeline.embedded = original  # type: ignore[method-assign]


def written(path: Path, documents: int, words: tuple[int, int]) -> Path:
    draw, vocabulary = random.Random(1), SENTENCE.split()
    with path.open("w") as file:
        for number in range(documents):
            text = " ".join(draw.choices(vocabulary, k=draw.randint(*words)))
            file.write(json.dumps({"_id": f"d{number}", "text": text}) + "\n")
    return path


def rates(place: Path, options: argparse.Namespace) -> dict[str, Any]:
    source = written(place / "rate.jsonl", options.rate_documents, tuple(options.words))
    found: dict[int, list[Watch]] = {1: [], 2: []}
    for turn in range(options.rounds):
        for workers, watches in found.items():
            folder = place / f"{turn}-{workers}"
            folder.mkdir()
            watch = Watch(workers)
            summary = ingested(source, folder, watch, options.outputs)
            assert summary.outcome.points == options.rate_documents, summary
            watches.append(watch)
            inside, outside = watch.cpu_ms
            print(
                f"{workers} workers  {watch.documents_per_s:8.1f} documents/s   CPU a document {inside:.2f} ms in workers, "
                f"{outside:.2f} ms outside   load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
    one, two = (statistics.median(watch.documents_per_s for watch in found[workers]) for workers in (1, 2))
    inside, outside = (statistics.median(watch.cpu_ms[side] for watch in found[2]) for side in (0, 1))
    print(f"two / one: {two / one:.2f} (target 1.7); by CPU at best {2 / (1 + outside / inside):.2f}")
    return {"one": round(one, 1), "two": round(two, 1), "ratio": round(two / one, 2)}


def killed(place: Path, options: argparse.Namespace) -> dict[str, Any]:
    source, folder = written(place / "all.jsonl", options.documents, (4, 9)), place / "killed"
    folder.mkdir()
    watch = Watch(2, kill_after=options.documents // 2)
    summary = ingested(source, folder, watch)
    outcome, tally = summary.outcome, summary.tally
    print(
        f"{options.documents} documents, worker {watch.killed} killed midway, {len(watch.seen)} workers seen: "
        f"{tally.documents} stored, {outcome.points} points, {outcome.expected} expected, {outcome.lost} lost, "
        f"{tally.quarantined} quarantined, {tally.seconds:.0f} s"
    )
    assert watch.killed is not None
    assert (tally.documents, outcome.points, outcome.lost, tally.quarantined) == (options.documents, options.documents, 0, 0)
    return {"documents": tally.documents, "points": outcome.points, "lost": outcome.lost, "workers_seen": len(watch.seen)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=50_000, help="of the run with a killed worker; 0: leave it out")
    parser.add_argument("--rate-documents", type=int, default=6000, help="of each run that is timed; 0: leave them out")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--outputs", help="comma-separated, of texts timed [default: all]: multi-vectors cost the store a tenth"
    )
    parser.add_argument("--words", type=int, nargs=2, default=(20, 60), metavar=("LEAST", "MOST"), help="of texts timed")
    options = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    leave, found = join("local", 2), dict[str, Any]()
    try:
        with tempfile.TemporaryDirectory() as place:
            found |= rates(Path(place), options) if options.rate_documents else {}
            found |= killed(Path(place), options) if options.documents else {}
    finally:
        leave()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
