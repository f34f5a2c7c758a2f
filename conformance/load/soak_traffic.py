"""The traffic of a soak: clients of every route, some of which disconnect or are wrong; and models that come and go."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from http_load import MIXED, QUERY, Texts
from quiet import PLAIN
from raw_http import Address, ask, connect, request

PAUSE_SECONDS = 0.1  # at most, between two requests of a client
DROP_SECONDS = 0.05  # at most, until a client that drops is gone
REQUESTS_OF_A_CONNECTION = 50
GUEST_REQUESTS = 10
EMBEDDED = "minilm-hybrid"


@dataclass
class Visits:
    """What came of them. `plain`: (when, seconds) of the plain requests that are timed."""

    statuses: dict[str, Counter[int]] = field(default_factory=dict)
    plain: list[tuple[float, float]] = field(default_factory=list)
    lost: Counter[str] = field(default_factory=Counter)
    dropped: int = 0
    loaded: int = 0

    def count(self, what: str, status: int) -> None:
        self.statuses.setdefault(what, Counter())[status] += 1


class Menu:
    """Requests of every kind, drawn at random."""

    def __init__(self, seed: int) -> None:
        self._texts = Texts(seed)
        self._random = random.Random(seed)
        self._good: list[Callable[[], tuple[str, Any]]] = [
            lambda: ("/embed", {"inputs": self.text()}),
            lambda: ("/embed", {"inputs": self.some(8)}),
            lambda: ("/embed_hybrid", {"inputs": self.some(4), "sparse_format": "tokens"}),
            lambda: ("/embed_sparse", {"inputs": self.text()}),
            lambda: ("/embed_all", {"inputs": self.text()}),
            lambda: ("/embed_multivector", {"inputs": self.some(2)}),
            lambda: ("/similarity", {"inputs": {"source_sentence": self.query(), "sentences": self.some(4)}}),
            lambda: ("/rerank", {"query": self.query(), "texts": self.some(8)}),
            lambda: ("/v1/embeddings", {"input": self.some(4), "encoding_format": "base64"}),
            lambda: ("/tokenize", {"inputs": self.text()}),
            lambda: ("/metrics", None),
            lambda: ("/info", None),
        ]
        self._bad: list[tuple[str, Any]] = [
            ("/embed", {"inputs": ""}),
            ("/embed", {"inputs": [1.5]}),
            ("/embed", {"inputs": ["x"] * 33}),
            ("/embed", {"inputs": "x", "dimensions": 0}),
            ("/predict", {"inputs": "x"}),
            ("/embed", {"inputs": "x", "model": "nobody"}),
            ("/nowhere", None),
        ]

    def text(self) -> str:
        return self._texts.draw(MIXED)[0]

    def query(self) -> str:
        return self._texts.draw(((1.0, QUERY),))[0]

    def some(self, number: int) -> list[str]:
        return [self.text() for _ in range(number)]

    def good(self) -> tuple[str, Any]:
        """Return a valid request."""
        return self._random.choice(self._good)()

    def bad(self) -> tuple[str, Any]:
        """Return an invalid request."""
        return self._random.choice(self._bad)


async def patron(address: Address, menu: Menu, until: float, visits: Visits) -> None:
    """Keeps a connection for a while, and asks for one thing after the other; now and then for what should be refused."""
    while time.monotonic() < until:
        connection = await connect(address)
        try:
            for _ in range(REQUESTS_OF_A_CONNECTION):
                kind, (path, body) = ("good", menu.good()) if random.random() < 0.9 else ("bad", menu.bad())
                answer = await connection.ask(request(address, path, body))
                visits.count(kind, answer.status)
                if time.monotonic() > until:
                    break
                await asyncio.sleep(random.random() * PAUSE_SECONDS)
        except (OSError, asyncio.IncompleteReadError) as error:
            visits.lost[type(error).__name__] += 1
        finally:
            connection.drop()


async def dropper(address: Address, menu: Menu, until: float, visits: Visits) -> None:
    """Sends a request and disconnects, sometimes in the middle of it."""
    while time.monotonic() < until:
        connection = await connect(address)
        data = request(address, *menu.good())
        connection.send(data if random.random() < 0.7 else data[: len(data) // 2])
        await asyncio.sleep(random.random() * DROP_SECONDS)
        connection.drop(reset=random.random() < 0.5)
        visits.dropped += 1
        await asyncio.sleep(random.random() * PAUSE_SECONDS)


async def timed(address: Address, texts: Texts, until: float, visits: Visits) -> None:
    """Plain requests whose latency is plotted."""
    while time.monotonic() < until:
        answer = await ask(address, "/embed", {"inputs": texts.draw(PLAIN)[0]})
        visits.count("plain", answer.status)
        visits.plain.append((time.monotonic(), answer.seconds))
        await asyncio.sleep(PAUSE_SECONDS)


async def landlord(address: Address, menu: Menu, until: float, every: float, visits: Visits) -> None:
    """Loads a model under a new name, asks it, tries one that does not exist, and unloads the first again."""
    while time.monotonic() < until - every:
        alias = f"guest-{visits.loaded}"
        visits.count("load", (await ask(address, "/models/load", {"model_id": EMBEDDED, "alias": alias})).status)
        for _ in range(GUEST_REQUESTS):
            answer = await ask(address, "/embed", {"inputs": menu.some(4), "model": alias})
            visits.count("guest", answer.status)
        refused = await ask(address, "/models/load", {"model_id": "/nowhere", "alias": f"nowhere-{visits.loaded}"})
        visits.count("load of nothing", refused.status)
        visits.count("unload", (await ask(address, "/models/unload", {"model": alias})).status)
        visits.loaded += 1
        await asyncio.sleep(every)
