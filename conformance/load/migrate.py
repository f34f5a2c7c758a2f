"""Migrates an ingested collection under searches, writes and deletions, kills the command again and
again, and rolls back.

    python -m conformance.load migrate --old MODEL --new MODEL [--qdrant-url URL] [--points 50000]
    [--kills 10] [--seed 0]

MODEL: folders or hub ids of two models that do not both make the same vectors; `hybridtei serve`
has both loaded. Without a URL the store is an embedded one, in a temporary folder. Exits with 1 if
a search or write is not answered with 200, if an answer has scores of another model than it names,
if what answers differs from what was written, if a search more than three seconds after the switch
is answered by the old model, if an ingest of the same documents embeds one again, or if the answers
after the rollback are those before it.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from conformance.load.report import Report
from conformance.load.servers import HOST, Server, served, started
from conformance.load.traffic import WORDS
from hybridtei.config import StoreConfig
from hybridtei.retrieval.store import open_store
from hybridtei.retrieval.store.collection import CollectionSchemas
from hybridtei.system.own_loop import OwnLoop

MODEL = {"required": True, "metavar": "MODEL"}
COUNTS = {"--points": 50_000, "--kills": 10, "--seed": 0}
FLAGS = {"migrate": {"--old": MODEL, "--new": MODEL, "--qdrant-url": {}, **COUNTS}}
NAME, COPY = "migrated", "migrated.1"
QUERIES = [f"{one} {other}" for one, other in zip(WORDS, WORDS[3:], strict=False)]
# A second
RATES = {"search": 20, "write": 2, "delete": 1}
# Hits of the answers with which others are compared
TOP = 100
# Scores that a model gives a text in different batches
SAME = 1e-3


class Collection:
    """The server's store, as another client sees it."""

    def __init__(self, config: StoreConfig) -> None:
        store = open_store(config)
        self._store, self._schemas, self._loop = store, CollectionSchemas(store), OwnLoop()

    def count(self, name: str) -> int:
        """The number of points; 0 if there is no such collection."""

        async def counted() -> int:
            return 0 if await self._store.describe(name) is None else await self._store.count(name)

        return self._loop.run(counted())

    def texts(self) -> dict[Any, Any]:
        async def scrolled() -> dict[Any, Any]:
            found: dict[Any, Any] = {}
            offset = None
            while True:
                records, offset = await self._store.scroll(NAME, limit=1000, offset=offset)
                found |= {record.id: record.payload.get("text") for record in records}
                if offset is None:
                    return found

        return self._loop.run(scrolled())

    def delete(self, number: Any) -> None:
        """As our own writers do: again where a migration switches the name meanwhile."""

        async def deleted() -> None:
            is_current = False
            while not is_current:
                schema = await self._schemas.of(NAME, writing=True)
                await self._store.delete(str(schema.stored_as), [number])
                is_current = await self._schemas.is_current(NAME, schema)

        self._loop.run(deleted())

    def close(self) -> None:
        self._loop.run(self._store.close())
        self._loop.close()


class Traffic:
    """Searches, writes and deletions at their rates, and their outcomes. `texts`: the last written
    text by id; ingested documents do not change. `is_same`: nothing changes."""

    def __init__(self, server: Server, collection: Collection, chance: random.Random) -> None:
        self.server, self.collection, self.chance, self.is_same = server, collection, chance, False
        self.texts, self.written, self.writable = collection.texts(), 0, threading.Lock()
        self.changes = 0
        self.failed: list[str] = []
        # Begin, query, model, score by id
        self.answered: list[tuple[float, str, str, dict[Any, float]]] = []

    def ask(self, path: str, body: Any) -> Any:
        """The answer; an empty one if it failed, which is kept."""
        url, headers = (
            f"http://{HOST}:{self.server.port}{path}",
            {"content-type": "application/json"},
        )
        try:
            with urlopen(Request(url, json.dumps(body).encode(), headers), timeout=60) as answer:
                content = json.loads(answer.read())
        except OSError as error:
            # HTTPError is one
            content = {
                "failed": f"{error} {error.read()!r:.300}" if hasattr(error, "read") else str(error)
            }
        if content.get("failed"):
            self.failed.append(f"{path}: {content['failed']}")
        return {} if content.get("failed") else content

    def search(self, query: str = "", **options: Any) -> tuple[str, dict[Any, float]]:
        """Model and score by id."""
        began, query = time.time(), query or random.choice(QUERIES)
        found = self.ask("/search", {"collection": NAME, "query": query, **options})
        model, hits = (
            found.get("model", ""),
            {hit["id"]: hit["score"] for hit in found.get("hits", [])},
        )
        if found and not options:
            self.answered.append((began, query, model, hits))
        return model, hits

    def write(self) -> None:
        """A change, a new point, or the same text again; one after the other, so that the last text
        of an id is known."""
        with self.writable:
            number = self.chance.randrange(self.written + 1)
            if self.is_same and number not in self.texts:
                return
            text = self.texts[number] if self.is_same else f"{number} {sentence(self.chance)}"
            if self.ask(f"/collections/{NAME}/points", {"points": [{"id": number, "text": text}]}):
                self.texts[number] = text
                self.written, self.changes = (
                    max(self.written, number + 1),
                    self.changes + (not self.is_same),
                )

    def delete(self) -> None:
        with self.writable:
            number = self.chance.randrange(self.written + 1)
            if not self.is_same and number in self.texts:
                self.collection.delete(number)
                del self.texts[number]
                self.changes += 1

    @contextmanager
    def flowing(self) -> Iterator[None]:
        over = threading.Event()

        def beat(rate: float, call: Callable[[], Any]) -> None:
            while not over.wait(1 / rate):
                call()

        with ThreadPoolExecutor() as threads:
            beats = [
                threads.submit(beat, rate, getattr(self, name)) for name, rate in RATES.items()
            ]
            try:
                yield
            finally:
                over.set()
        for done in beats:
            done.result()

    def answers(self) -> dict[str, tuple[str, dict[Any, float]]]:
        """Model and score by id of the best of each query."""
        return {query: self.search(query, limit=TOP, exact=True) for query in QUERIES}


def sentence(chance: random.Random) -> str:
    return " ".join(chance.choices(WORDS, k=chance.randint(4, 12)))


def is_of(hits: Mapping[Any, float], best: Mapping[Any, float]) -> bool:
    """True if all hits are from the model that found the best hit. An index is approximate: half of
    them suffice."""
    common = hits.keys() & best.keys()
    return 2 * len(common) >= len(hits) and all(
        abs(hits[number] - best[number]) < SAME for number in common
    )


def compare(report: Report, tried: str, traffic: Traffic) -> None:
    """What answers against what was written; no write is under way meanwhile."""
    with traffic.writable:
        there = traffic.collection.texts()
        wrong = sum(there.get(number) != text for number, text in traffic.texts.items())
        doubled = len(there.keys() - traffic.texts.keys())
    result = f"{len(there):,} points; {wrong} lost or old, {doubled} that were deleted"
    report.add(tried, 1, result, there == traffic.texts)


def story(
    server: Server, collection: Collection, options: argparse.Namespace, run: Callable[..., Any]
) -> int:
    """The whole of it, as rows."""
    report, chance = Report(), random.Random(options.seed)
    traffic = Traffic(server, collection, random.Random(options.seed))
    switch = ("migrate", NAME, "--quiet", "--to", options.new, "--yes")
    with traffic.flowing():
        killed = 0
        for size in sorted(chance.randrange(options.points) for _ in range(options.kills)):
            with run(*switch, waits=False) as process:
                while process.poll() is None and collection.count(COPY) <= size:
                    time.sleep(0.05)
                process.kill()
            killed += process.returncode == -signal.SIGKILL
        report.add("kill -9 of the command", killed, "went on each time", killed == options.kills)
        report.add("points written, changed and deleted meanwhile", traffic.changes, "")
        traffic.is_same = True
        time.sleep(2)
        before = traffic.answers()
        began = time.time()
        run(*switch)
        switched = time.time()
        time.sleep(5)
        between, seen = traffic.answers(), [*traffic.answered]
        old_name = before[QUERIES[0]][0]
        late = max(
            (began - switched for began, _, model, _ in seen if model == old_name), default=0.0
        )
        report.add("the last run of the command, and its switch", 1, f"{switched - began:.1f} s")
        report.add(
            "last search that the old model answers",
            1,
            f"began {late:+.2f} s after the switch",
            late <= 3,
        )
        found = [
            (model, hits, (before if model == old_name else between)[query])
            for at, query, model, hits in seen
            if at > began
        ]
        mixed = sum(model != best[0] or not is_of(hits, best[1]) for model, hits, best in found)
        report.add(
            "answers meanwhile",
            len(found),
            f"{mixed} have scores of a model other than the named one",
            not mixed,
        )
        compare(report, "points after the switch", traffic)
        again = json.loads(
            run(
                "ingest",
                traffic_file(options),
                "--collection",
                NAME,
                "--model-id",
                options.new,
                "--json",
            )
        )
        report.add(
            "an ingest of the same documents",
            1,
            f"embeds {again['documents']}",
            again["documents"] == 0,
        )
        run("migrate", NAME, "--quiet", "--rollback")
        time.sleep(3)
        after = traffic.answers()
        back = sum(is_of(after[query][1], before[query][1]) for query in QUERIES)
        report.add("rollback", len(after), f"{back} answers are as before", back == len(after))
        compare(report, "points after the rollback", traffic)
    differ = sum(not is_of(between[query][1], before[query][1]) for query in QUERIES)
    report.add("answers of both models", len(QUERIES), f"{differ} differ", differ > 0)
    result = f"{len(traffic.failed)} searches and writes failed: {traffic.failed[:3]}"
    report.add("searches", len(traffic.answered), result, not traffic.failed)
    return report.finish()


def traffic_file(options: argparse.Namespace) -> str:
    return f"{options.folder}/documents.jsonl"


def migrate(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder:
        options.folder = folder
        models, chance = Path(folder, "models.toml"), random.Random(options.seed)
        models.write_text(
            "".join(
                f"[[model]]\nmodel_id = {json.dumps(model)}\n"
                for model in (options.old, options.new)
            )
        )
        rows = (
            {"_id": f"d{number}", "text": f"{number} {sentence(chance)}"}
            for number in range(options.points)
        )
        Path(traffic_file(options)).write_text("".join(json.dumps(row) + "\n" for row in rows))
        place = (
            {"qdrant_path": f"{folder}/qdrant"}
            if options.qdrant_url is None
            else {"qdrant_url": options.qdrant_url}
        )
        store = [
            word for name, value in place.items() for word in (f"--{name.replace('_', '-')}", value)
        ]

        def run(*words: str, waits: bool = True) -> Any:
            """The output of a command, or its running process."""
            command = [sys.executable, "-m", "hybridtei", *words, *store]
            if not waits:
                return subprocess.Popen(
                    command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
            return subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=folder).stdout

        run(
            "ingest",
            traffic_file(options),
            "--collection",
            NAME,
            "--model-id",
            options.old,
            "--quiet",
        )
        collection = Collection(StoreConfig(**place))
        try:
            with started(served("--models", str(models), *store)) as server:
                return story(server, collection, options, run)
        finally:
            collection.close()
