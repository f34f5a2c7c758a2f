"""A server that is away is told at once to who asks, and found again when it is back. The clock is the test's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from hybridtei.errors import StoreAway, StoreError, StoreUnavailable
from hybridtei.retrieval.store.failures import FIRST_ABSENCE_S, LONGEST_ABSENCE_S, Availability


class Server:
    """What it answers, and how often it was asked. `now_s`: the clock."""

    def __init__(self) -> None:
        self.now_s, self.calls, self.checks = 0.0, 0, 0
        self.failure: StoreError | None = None
        self.held, self.deaf = asyncio.Event(), asyncio.Event()
        self.held.set()
        self.deaf.set()
        self.availability = Availability(self.check, "here", clock=lambda: self.now_s, check_after_s=0.01, check_s=0.01)

    async def answer(self) -> str:
        self.calls += 1
        await self.held.wait()
        await self.deaf.wait()
        if self.failure is not None:
            raise self.failure
        return "found"

    async def check(self) -> None:
        self.checks += 1
        await self.deaf.wait()
        if isinstance(self.failure, StoreAway):
            raise self.failure

    def ask(self) -> Awaitable[str]:
        return self.availability.call(self.answer)


async def away(server: Server) -> None:
    with pytest.raises(StoreAway, match="no such host"):
        await server.ask()


async def test_while_it_is_away_one_call_a_pause_tries_and_the_others_are_told_at_once() -> None:
    server = Server()
    server.failure = StoreAway("no such host")
    pauses = []
    for tries in range(1, 7):
        await away(server)
        assert server.calls == tries
        await away(server)
        assert server.calls == tries  # not asked
        pauses.append(server.availability._resume_s - server.now_s)
        server.now_s = server.availability._resume_s
    assert pauses == [FIRST_ABSENCE_S, 0.5, 1, LONGEST_ABSENCE_S, LONGEST_ABSENCE_S, LONGEST_ABSENCE_S]
    server.failure = None
    assert [await server.ask() for _ in range(3)] == ["found"] * 3
    server.failure = StoreAway("no such host")
    await away(server)
    assert server.availability._resume_s - server.now_s == FIRST_ABSENCE_S


async def test_while_one_call_tries_again_the_others_are_told_at_once() -> None:
    server = Server()
    server.failure = StoreAway("no such host")
    await away(server)
    server.now_s, server.failure = 10.0, None
    server.held.clear()
    trying = asyncio.ensure_future(server.ask())
    await asyncio.sleep(0)
    await away(server)
    server.held.set()
    assert await trying == "found"
    assert await server.ask() == "found"


async def test_calls_that_fail_together_are_one_failure() -> None:
    server = Server()
    server.failure = StoreAway("no such host")
    failed = await asyncio.gather(*(server.ask() for _ in range(20)), return_exceptions=True)
    assert {type(one) for one in failed} == {StoreAway}
    assert server.availability._resume_s == FIRST_ABSENCE_S


@pytest.mark.parametrize("kind", [StoreError, StoreUnavailable])
async def test_a_server_that_refuses_is_there(kind: Callable[[str], StoreError]) -> None:
    server = Server()
    server.failure = kind("slow down")
    for calls in (1, 2):
        with pytest.raises(StoreError, match="slow down"):
            await server.ask()
        assert server.calls == calls


async def test_a_long_call_goes_on_while_the_server_answers_others() -> None:
    server = Server()
    server.held.clear()
    asking = [asyncio.ensure_future(server.ask()) for _ in range(3)]
    while server.checks < 3:
        await asyncio.sleep(0.001)
    server.held.set()
    assert await asyncio.gather(*asking) == ["found"] * 3


async def test_a_server_that_hangs_is_away_and_the_call_is_cancelled() -> None:
    server = Server()
    server.deaf.clear()
    asked = await asyncio.gather(*(server.ask() for _ in range(3)), return_exceptions=True)
    assert all(isinstance(one, StoreAway) and "answered nothing for 0.02 s" in str(one) for one in asked)
    with pytest.raises(StoreAway):
        await server.ask()
    assert server.calls == 3
    assert len(asyncio.all_tasks()) == 1
