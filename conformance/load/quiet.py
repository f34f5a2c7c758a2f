"""Before and after a storm: the time of a plain request, and whether the server is idle."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

from http_load import QUERY, Texts
from raw_http import Address, Answer, ask
from served import samples, total

LEVELS = ("te_queue_size", "hybridtei_queue_tokens", "hybridtei_running_batches")
ENDED = ("te_request_success", "te_request_failure")
PATIENCE_SECONDS = 120.0
PLAIN = ((1.0, QUERY),)


async def plain(address: Address, texts: Texts) -> Answer:
    """One short text that nobody sent before, on a connection of its own."""
    return await ask(address, "/embed", {"inputs": texts.draw(PLAIN)[0]})


async def idle(address: Address, texts: Texts, number: int) -> list[float]:
    """Seconds of so many plain requests, one after the other. Raises RuntimeError if one is not answered with 200."""
    answers = [await plain(address, texts) for _ in range(number)]
    refused = [answer.status for answer in answers if answer.status != 200]
    if refused:
        raise RuntimeError(f"an idle server answers {refused[0]}")
    return [answer.seconds for answer in answers]


async def counters(address: Address) -> dict[str, float]:
    """All metrics of the server now."""
    return samples((await ask(address, "/metrics")).body.decode())


def inside(values: Mapping[str, float]) -> float:
    """Requests that were begun and have not ended: neither answered, refused, nor given up."""
    return total(values, "te_request_count") - sum(total(values, name) for name in ENDED)


def departed(values: Mapping[str, float]) -> float:
    """Return the clients that disconnected before any work on their request."""
    return sum(total(values, f"hybridtei_departed_{what}_total") for what in ("requests", "connections"))


@dataclass(frozen=True)
class Settled:
    """`seconds` until nothing waited and nothing ran; None if that did not come about. `levels`: what was left then."""

    seconds: float | None
    values: Mapping[str, float]

    @property
    def levels(self) -> dict[str, float]:
        return {**{name: total(self.values, name) for name in LEVELS}, "inside": inside(self.values)}


async def settled(address: Address) -> Settled:
    """Wait until every gauge is at zero and every request that was begun has ended."""
    began = time.perf_counter()
    while True:
        values = await counters(address)
        passed = time.perf_counter() - began
        if inside(values) == 0 and not any(total(values, name) for name in LEVELS):
            return Settled(passed, values)
        if passed > PATIENCE_SECONDS:
            return Settled(None, values)
        await asyncio.sleep(0.01)
