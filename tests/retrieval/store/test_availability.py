"""A caller learns at once that a server is away, and calls reach the server again when it is back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from hybridtei.errors import StoreAway, StoreError, StoreUnavailable
from hybridtei.retrieval.store import nodes as module
from hybridtei.retrieval.store.nodes import Nodes


class Server:
    """A server's answer, and the number of its calls."""

    def __init__(self) -> None:
        self.calls, self.checks = 0, 0
        self.failure: Exception | None = None
        self.held, self.deaf = asyncio.Event(), asyncio.Event()
        self.held.set()
        self.deaf.set()
        client: Any = self
        self.nodes = Nodes({"here": client}, lambda _: self.check(), 0.01, 0.01)

    async def answer(self, _: Any) -> str:
        self.calls += 1
        await self.held.wait()
        await self.deaf.wait()
        if self.failure is not None:
            raise self.failure
        return "found"

    async def check(self) -> None:
        self.checks += 1
        await self.deaf.wait()
        if isinstance(self.failure, OSError):
            raise self.failure

    async def close(self) -> None:
        """As a client is closed."""

    def ask(self) -> Awaitable[str]:
        return self.nodes.call(self.answer)


@asynccontextmanager
async def server_of(failure: Exception | None = None) -> AsyncIterator[Server]:
    server = Server()
    server.failure = failure
    yield server
    await server.nodes.close()
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1


async def away(server: Server) -> None:
    with pytest.raises(StoreAway, match="no such host"):
        await server.ask()


async def test_while_it_is_away_calls_are_told_at_once_and_it_is_found_when_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETURN_S", 0.01)
    async with server_of(ConnectionRefusedError("no such host")) as server:
        for _ in range(2):
            for _ in range(3):
                await away(server)
            assert server.calls == 1
            while server.checks < 4:  # it is looked for, and not found
                await asyncio.sleep(0.001)
            await away(server)
            server.failure = None
            while server.nodes._nodes[0].away is not None:
                await asyncio.sleep(0.001)
            assert [await server.ask() for _ in range(3)] == ["found"] * 3
            server.calls, server.checks, server.failure = 0, 0, ConnectionRefusedError("no such host")


async def test_calls_that_fail_together_share_one_check() -> None:
    async with server_of(ConnectionRefusedError("no such host")) as server:
        failed = await asyncio.gather(*(server.ask() for _ in range(20)), return_exceptions=True)
        assert {type(one) for one in failed} == {StoreAway}
        assert (server.calls, server.checks) == (20, 1)


@pytest.mark.parametrize("kind", [StoreError, StoreUnavailable])
async def test_a_server_that_refuses_is_there(kind: Callable[[str], StoreError]) -> None:
    async with server_of(kind("slow down")) as server:
        for calls in (1, 2):
            with pytest.raises(StoreError, match="slow down"):
                await server.ask()
            assert server.calls == calls


async def test_a_long_call_goes_on_while_the_server_answers_others() -> None:
    async with server_of() as server:
        server.held.clear()
        asking = [asyncio.ensure_future(server.ask()) for _ in range(3)]
        while server.checks < 3:
            await asyncio.sleep(0.001)
        server.held.set()
        assert await asyncio.gather(*asking) == ["found"] * 3


async def test_a_server_that_hangs_is_away_and_the_call_is_cancelled() -> None:
    async with server_of() as server:
        server.deaf.clear()
        asked = await asyncio.gather(*(server.ask() for _ in range(3)), return_exceptions=True)
        assert all(isinstance(one, StoreAway) and "answered nothing for 0.02 s" in str(one) for one in asked)
        with pytest.raises(StoreAway):
            await server.ask()
        assert server.calls == 3
