"""Migrates a collection under searches and writes, kills the command again and again, and rolls back.

    python -m conformance.load migrate --old MODEL --new MODEL --qdrant-url URL [--points 50000] [--kills 10] [--seed 0]

MODEL: folders or hub ids of two models that do not both make the same vectors; `hybridtei serve` has both loaded. Exits with 1
if a search or write is not answered with 200, if what answers differs from what was written, if a search more than three
seconds after the switch is answered by the old model, or if the answers after the rollback are not those before.
"""

import argparse
import asyncio
import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from urllib.request import Request, urlopen

from conformance.load.report import Report
from conformance.load.servers import HOST, Server, served, started
from conformance.load.traffic import WORDS
from hybridtei.config import StoreConfig
from hybridtei.retrieval.store.server import ServerStore

MODEL = {"required": True, "metavar": "MODEL"}
COUNTS = {"--points": 50_000, "--kills": 10, "--seed": 0}
FLAGS = {"migrate": {"--old": MODEL, "--new": MODEL, "--qdrant-url": {"required": True}, **COUNTS}}
NAME, COPY = "migrated", "migrated.1"
QUERIES = [f"{one} {other}" for one, other in zip(WORDS, WORDS[3:], strict=False)]
SEARCHES, WRITES = 20, 2  # a second
PORTION = 500


class Traffic:
    """Searches and writes at a rate, and what came of them. `texts`: by id, as written last; `is_same`: writes keep them."""

    def __init__(self, server: Server, points: int, chance: random.Random) -> None:
        self.server, self.chance, self.is_same, self.writable = server, chance, False, threading.Lock()
        self.texts = {number: self.sentence(number) for number in range(points)}
        self.failed: list[str] = []
        self.answered: list[tuple[float, str]] = []  # begin, model

    def sentence(self, number: int) -> str:
        return f"{number} {' '.join(self.chance.choices(WORDS, k=self.chance.randint(4, 12)))}"

    def ask(self, path: str, body: Any) -> Any:
        """The answer; an empty one if it failed, which is kept."""
        url, headers = f"http://{HOST}:{self.server.port}{path}", {"content-type": "application/json"}
        try:
            with urlopen(Request(url, json.dumps(body).encode(), headers), timeout=60) as answer:
                content = json.loads(answer.read())
        except OSError as error:  # HTTPError is one
            content = {"failed": str(error)}
        if content.get("failed"):
            self.failed.append(f"{path}: {content['failed']}")
        return {} if content.get("failed") else content

    def search(self, query: str = "") -> Any:
        began = time.time()
        found = self.ask("/search", {"collection": NAME, "query": query or random.choice(QUERIES)})
        if found:
            self.answered.append((began, found["model"]))
        return found

    def write(self) -> None:
        """A change, a new point, or the same text again; one after the other, so that the last text of an id is known."""
        with self.writable:
            number = self.chance.randrange(len(self.texts) + (not self.is_same))
            text = self.texts[number] if self.is_same else self.sentence(number)
            if self.ask(f"/collections/{NAME}/points", {"points": [{"id": number, "text": text}]}):
                self.texts[number] = text

    @contextmanager
    def flowing(self) -> Iterator[None]:
        over = threading.Event()

        def beat(rate: float, call: Callable[[], Any]) -> None:
            while not over.wait(1 / rate):
                call()

        with ThreadPoolExecutor() as threads:
            beats = [threads.submit(beat, SEARCHES, self.search), threads.submit(beat, WRITES, self.write)]
            try:
                yield
            finally:
                over.set()
        for done in beats:
            done.result()

    def answers(self) -> list[Any]:
        """(score, id) of all queries; hits of the last score without ids: which of several points is among them is chance."""
        found = [[(round(hit["score"], 4), hit["id"]) for hit in self.search(query).get("hits", [])] for query in QUERIES]
        return [sorted((score, number if score > min(hits)[0] else -1) for score, number in hits) for hits in found]


def points(url: str, name: str) -> dict[Any, Any]:
    """Payload by id; none if there is no such collection."""

    async def scrolled() -> dict[Any, Any]:
        store, found, offset = ServerStore(StoreConfig(qdrant_url=url)), {}, None
        try:
            while await store.describe(name) is not None:
                records, offset = await store.scroll(name, limit=1000, offset=offset)
                found |= {record.id: record.payload for record in records}
                if offset is None:
                    break
            return found
        finally:
            await store.close()

    return asyncio.run(scrolled())


def compare(report: Report, tried: str, traffic: Traffic, url: str) -> None:
    """What answers against what was written; no write is under way meanwhile."""
    with traffic.writable:
        there = {number: payload.get("text") for number, payload in points(url, NAME).items()}
        lost = sum(there.get(number) != text for number, text in traffic.texts.items())
    report.add(tried, 1, f"{len(there):,} of {len(traffic.texts):,}; {lost} writes lost", there == traffic.texts)


def story(server: Server, options: argparse.Namespace) -> int:
    """The whole of it, as rows."""
    report, chance, url = Report(), random.Random(options.seed), options.qdrant_url
    traffic = Traffic(server, options.points, random.Random(options.seed))
    command = [sys.executable, "-m", "hybridtei", "migrate", NAME, "--quiet", "--qdrant-url", url]
    switch = [*command, "--to", options.new, "--yes"]
    rows = [{"id": number, "text": text} for number, text in traffic.texts.items()]
    for begin in range(0, len(rows), PORTION):
        body = {"points": rows[begin : begin + PORTION], "create": True, "model": options.old}
        if not traffic.ask(f"/collections/{NAME}/points", body):
            sys.exit(f"the collection is not filled: {traffic.failed}")
    with traffic.flowing():
        killed = 0
        for size in sorted(chance.randrange(options.points) for _ in range(options.kills)):
            with subprocess.Popen(switch, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
                while process.poll() is None and len(points(url, COPY)) <= size:
                    time.sleep(0.1)
                process.kill()
            killed += process.returncode == -signal.SIGKILL
        report.add("kill -9 of the command", killed, "went on each time", killed == options.kills)
        before, old_name = traffic.answers(), traffic.answered[-1][1]
        traffic.is_same = True
        subprocess.run(switch, check=True, stdout=subprocess.DEVNULL)
        switched = time.time()
        time.sleep(5)
        between = traffic.answers()
        late = max((began - switched for began, model in traffic.answered if model == old_name), default=0.0)
        report.add("last search that the old model answers", 1, f"began {late:+.2f} s after the switch", late <= 3)
        compare(report, "points after the switch", traffic, url)
        subprocess.run([*command, "--rollback"], check=True, stdout=subprocess.DEVNULL)
        time.sleep(3)
        after = traffic.answers()
        report.add(
            "rollback", 1, f"{sum(map(list.__eq__, between, after))} of {len(after)} answers as before it", after != between
        )
        compare(report, "points after the rollback", traffic, url)
    report.add("answers of both models", 1, "differ" if before != between else "are the same", before != between)
    result = f"{len(traffic.failed)} searches and writes failed: {traffic.failed[:3]}"
    report.add("searches", len(traffic.answered), result, not traffic.failed)
    return report.finish()


def migrate(options: argparse.Namespace) -> int:
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as models:
        models.write("".join(f"[[model]]\nmodel_id = {json.dumps(model)}\n" for model in (options.old, options.new)))
        models.flush()
        with started(served("--models", models.name, "--qdrant-url", options.qdrant_url)) as server:
            return story(server, options)
