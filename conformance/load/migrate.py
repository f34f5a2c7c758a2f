"""Migrates a collection under searches and writes, kills the command again and again, flips, and rolls back.

    python conformance/load/migrate.py --old MODEL --new MODEL [--points 50000] [--kills 10] [--qdrant-url URL] [--seed 0]

MODEL: folders or hub ids of two models that do not both make the same vectors. `hybridtei serve` has both loaded; without
`--qdrant-url` its collections are in a process that speaks Qdrant's protocol over qdrant-client's local mode. Exits with 1 if a
search or write is not answered with 200, if the copies differ from each other or from what was written, if a search more than
a second after the flip's record is answered by the old model, or if the answers after the rollback are not those before.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from promises import Report, milliseconds
from raw_http import Address, ask
from served import Served, served

from hybridtei.config import StoreConfig
from hybridtei.store.base import Store
from hybridtei.store.server import ServerStore

NAME, TWIN = "migrated", "migrated.new"
WORDS = ["wing", "flow", "layer", "heat", "shock", "plate", "body", "mach", "pressure", "boundary", "speed", "cone", "jet"]
SEARCHES, WRITES = 20, 2  # a second
PORTION = 500
QUERIES = [f"{one} {other}" for one, other in zip(WORDS, WORDS[3:], strict=False)]


@dataclass
class Traffic:
    """Searches and writes at a constant rate, and what came of them. `is_same`: writes leave the texts as they are."""

    address: Address
    texts: dict[int, str]
    chance: random.Random
    is_same: bool = False
    failed: list[str] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    answered: list[tuple[float, float, str]] = field(default_factory=list)  # begin, end, model
    writable: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def ask(self, kind: str, path: str, body: Any) -> Any:
        try:
            answer = await ask(self.address, path, body)
        except (OSError, asyncio.IncompleteReadError) as error:
            self.failed.append(f"{kind}: {error!r}")
            return None
        self.statuses[f"{kind} {answer.status}"] += 1
        content = json.loads(answer.body)
        if answer.status != 200 or content.get("failed"):
            self.failed.append(f"{kind} {answer.status}: {answer.body[:300]!r}")
            return None
        return content

    async def search(self, query: str) -> Any:
        began = time.time()
        found = await self.ask("search", "/search", {"collection": NAME, "query": query})
        self.seconds.append(time.time() - began)
        if found is not None:
            self.answered.append((began, time.time(), found["model"]))
        return found

    async def write(self) -> None:
        """One after the other, so that the last text of an id is known: a change, a new point, or the same text again."""
        async with self.writable:
            identity = self.chance.randrange(len(self.texts) + (0 if self.is_same else len(self.texts) // 10))
            identity = identity if identity in self.texts else len(self.texts)
            text = self.texts[identity] if self.is_same else sentence(identity, self.chance)
            if await self.ask("write", f"/collections/{NAME}/points", {"points": [{"id": identity, "text": text}]}) is not None:
                self.texts[identity] = text

    @contextlib.asynccontextmanager
    async def flowing(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            beats = [
                group.create_task(self._beat(group, SEARCHES, lambda: self.search(self.chance.choice(QUERIES)))),
                group.create_task(self._beat(group, WRITES, self.write)),
            ]
            yield
            for beat in beats:
                beat.cancel()

    async def _beat(self, group: asyncio.TaskGroup, rate: float, begin: Any) -> None:
        due = time.monotonic()
        while True:
            group.create_task(begin())
            due = max(due + 1 / rate, time.monotonic())
            await asyncio.sleep(due - time.monotonic())


def sentence(identity: int, chance: random.Random) -> str:
    return f"{identity} {' '.join(chance.choices(WORDS, k=chance.randint(4, 12)))}"


async def payloads(store: Store, name: str) -> dict[Any, Any]:
    """Of all points."""
    found, offset = {}, None
    while True:
        records, offset = await store.scroll(name, limit=1000, offset=offset)
        found |= {record.id: record.payload for record in records}
        if offset is None:
            return found


class Command:
    """`hybridtei migrate` with the options of this run."""

    def __init__(self, url: str) -> None:
        self._command = [sys.executable, "-m", "hybridtei", "migrate", NAME, "--quiet", "--qdrant-url", url]

    async def begin(self, *flags: str) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(*self._command, *flags, stdout=pipe, stderr=asyncio.subprocess.STDOUT)

    async def run(self, *flags: str) -> str:
        """What it says. Exits this script where it fails."""
        process = await self.begin(*flags)
        said = (await process.communicate())[0].decode()
        if process.returncode:
            sys.exit(f"migrate {' '.join(flags)} fails:\n{said[-2000:]}")
        return said


async def killed(command: Command, store: Store, options: argparse.Namespace, chance: random.Random) -> tuple[int, int]:
    """Kills the command each time that the copy has grown to a random size. -> kills, runs that ended before."""
    done = ended = 0
    for size in sorted(chance.randrange(options.points) for _ in range(options.kills)):
        process = await command.begin("--to", options.new, "--no-flip", "--sample", "0")
        while process.returncode is None:
            if await store.describe(TWIN) is not None and await store.count(TWIN) >= size:
                await asyncio.sleep(chance.random())
                break
            await asyncio.sleep(0.1)
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
        status = (await process.communicate(), process.returncode)[1]
        done, ended = done + (status == -signal.SIGKILL), ended + (status != -signal.SIGKILL)
        print(f"killed at {await store.count(TWIN):,} points", file=sys.stderr, flush=True)
    return done, ended


async def flip(command: Command) -> tuple[float, str]:
    """When the command said that the record is written, and what it said."""
    process = await command.begin("--flip")
    assert process.stdout is not None
    async for line in process.stdout:
        if line.startswith(b"flipped"):
            said = time.time(), line.decode().strip()
            await process.communicate()
            return said
    sys.exit("the flip fails")


async def answers(traffic: Traffic) -> list[Any]:
    """Of all queries; a failed search counts as failed, and is repeated here."""
    found = []
    for query in QUERIES:
        while (one := await traffic.search(query)) is None:
            await asyncio.sleep(0.5)
        found.append(ranked([(hit["id"], round(hit["score"], 4)) for hit in one["hits"]]))
    return found


def ranked(hits: list[tuple[Any, float]]) -> list[tuple[Any, float]]:
    """Hits in an order that ties do not change: of equal scores by id, and without ids at the last score, where the number of
    hits decides which of several points are among them."""
    last = min((score for _, score in hits), default=0.0)
    kept = [(identity if score > last else None, score) for identity, score in hits]
    return sorted(kept, key=lambda hit: (-hit[1], str(hit[0])))


async def equal(traffic: Traffic, store: Store) -> tuple[bool, str]:
    """Both copies against each other, and against what was written; no write is under way meanwhile."""
    async with traffic.writable:
        old, new = await payloads(store, NAME), await payloads(store, TWIN)
        texts = {identity: payload["text"] for identity, payload in old.items()}
        differing = sum(old.get(identity) != new.get(identity) for identity in old.keys() | new.keys())
        lost = sum(texts.get(identity) != text for identity, text in traffic.texts.items())
        counts = await store.count(NAME), await store.count(TWIN)
        said = f"{counts[0]:,} and {counts[1]:,} of {len(traffic.texts):,}; {differing} payloads differ, {lost} writes lost"
        return counts == (len(traffic.texts),) * 2 and not differing and not lost, said


async def migrate(server: Served, store: Store, url: str, options: argparse.Namespace) -> Report:
    """The whole story, as rows."""
    report, chance = Report(), random.Random(options.seed)
    texts = {identity: sentence(identity, chance) for identity in range(options.points)}
    traffic, command = Traffic(Address(server.host, server.port), texts, chance), Command(url)
    await ingested(traffic, options.old)
    async with traffic.flowing():
        began = time.monotonic()
        kills, ended = await killed(command, store, options, chance)
        await command.run("--to", options.new, "--no-flip", "--sample", "0")
        whole_s = time.monotonic() - began
        report.add("kill -9 of the command", kills, f"{ended} runs had ended before; whole after {whole_s:.0f} s", not ended)
        is_equal, said = await equal(traffic, store)
        report.add("points of both copies", 1, said, is_equal)
        traffic.is_same = True
        async with traffic.writable:
            before = await answers(traffic)
        old_name = traffic.answered[-1][2]
        flipped, said = await flip(command)
        await asyncio.sleep(5)
        compared = await answers(traffic)
        late = [begin - flipped for begin, _, model in traffic.answered if model == old_name]
        is_flipped = any(model != old_name for _, _, model in traffic.answered)
        report.add("flip", 1, said, is_flipped)
        report.add("last search that the old model answers", 1, f"began {max(late):+.2f} s after the flip", max(late) <= 1)
        await command.run("--rollback")
        await asyncio.sleep(2)
        after = await answers(traffic)
        same = sum(one == other for one, other in zip(before, after, strict=True))
        changed = [pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]]
        print(f"{len(changed)} answers changed; the first: {changed[:1]}", file=sys.stderr)
        other = sum(one != other for one, other in zip(before, compared, strict=True))
        result = f"{same} of {len(before)} answers as before; {other} were others between"
        report.add("rollback", 1, result, after == before and bool(other))
        is_equal, said = await equal(traffic, store)
        report.add("points of both copies, at the end", 1, said, is_equal)
    result = f"{len(traffic.failed)} failed; {dict(traffic.statuses)}; {traffic.failed[:3]}"
    report.add("searches and writes", sum(traffic.statuses.values()), result, not traffic.failed)
    p50, p99 = milliseconds(traffic.seconds), milliseconds(traffic.seconds, 0.99)
    report.add("a search", len(traffic.seconds), f"p50 {p50:.0f} ms, p99 {p99:.0f} ms", None)
    return report


async def ingested(traffic: Traffic, model: str) -> None:
    rows = [{"id": identity, "text": text} for identity, text in traffic.texts.items()]
    for begin in range(0, len(rows), PORTION):
        body = {"points": rows[begin : begin + PORTION], "create": True, "model": model}
        if await traffic.ask("ingest", f"/collections/{NAME}/points", body) is None:
            sys.exit(f"the collection is not filled: {traffic.failed}")


def stand_in(ready: int) -> None:
    """A process that speaks Qdrant's protocol until it is killed; writes its port."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tests.store.speaking import speaking

    with speaking() as state:
        os.write(ready, f"{state.grpc_port}\n".encode())
        signal.pause()


@contextlib.contextmanager
def qdrant(url: str | None) -> Iterator[str]:
    """A server's address."""
    if url is not None:
        yield url
        return
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        stand_in(writing)
    try:
        with os.fdopen(reading) as ready:
            yield f"grpc://127.0.0.1:{ready.readline().strip()}"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def run(options: argparse.Namespace) -> Report:
    """All processes; a report. Exits where they do not start."""
    with tempfile.TemporaryDirectory() as folder, qdrant(options.qdrant_url) as url:
        models = Path(folder) / "models.toml"
        models.write_text("".join(f"[[model]]\nmodel_id = {json.dumps(model)}\n" for model in (options.old, options.new)))
        with served("--models", str(models), "--qdrant-url", url) as server:

            async def story() -> Report:
                store = ServerStore(StoreConfig(qdrant_url=url))
                try:
                    return await migrate(server, store, url, options)
                finally:
                    await store.close()

            return asyncio.run(story())


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", required=True, metavar="MODEL")
    parser.add_argument("--new", required=True, metavar="MODEL")
    parser.add_argument("--points", type=int, default=50_000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--qdrant-url")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(run(parsed()).finish())
