"""Laws of a stream: order, how much is in the works, and that nothing runs on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.errors import AnswersUnsent
from hybridtei.rpc.services import DEFAULT_PARALLEL, InOrder, parallel_requests
from hybridtei.server.http.connection import SMALL_BYTES, Unsent

LIMIT = 1_000_000


class Scene:
    """What happens around one stream: who is in the works, and who has left."""

    def __init__(self) -> None:
        self.entered = self.left = self.inside = self.most_inside = self.read = 0
        self.sent: list[bytes] = []
        self.unsent = Unsent(LIMIT)

    async def requests(self, items: list[bytes]) -> AsyncIterator[bytes]:
        for item in items:
            await asyncio.sleep(0)
            self.read += 1
            yield item

    async def enter(self) -> Callable[[], None]:
        self.entered += 1
        return self.leave

    def leave(self) -> None:
        self.left += 1

    async def send(self, body: bytes) -> None:
        self.sent.append(body)

    async def answer(self, data: bytes) -> bytes:
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        try:
            for _ in range(data[0] % 7):
                await asyncio.sleep(0)
            if data == b"!":
                raise ValueError("bad")
            return data * 2
        finally:
            self.inside -= 1


@given(st.lists(st.integers(1, 32).map(lambda number: bytes([number]))), st.integers(1, 5))
def test_answers_keep_the_order_and_no_more_are_in_the_works(items, most):
    scene = Scene()
    asyncio.run(InOrder(scene.answer, scene.enter, scene.unsent, max_tasks=most).run(scene.requests(items), scene.send))
    assert scene.sent == [item * 2 for item in items]
    assert scene.most_inside <= most
    assert scene.entered == scene.left == len(items)
    assert scene.unsent.bytes == 0


@given(st.integers(0, 6), st.integers(0, 6))
def test_the_first_failure_by_place_ends_it_and_what_came_before_was_sent(before, after):
    scene = Scene()
    items = [b"\x06"] * before + [b"!"] + [b"\x06"] * after

    async def run() -> None:
        with pytest.raises(ValueError, match="bad"):
            await InOrder(scene.answer, scene.enter, scene.unsent, max_tasks=4).run(scene.requests(items), scene.send)
        await asyncio.sleep(0)

    asyncio.run(run())
    assert scene.sent == [b"\x06\x06"] * before
    assert scene.inside == 0
    assert scene.entered == scene.left
    assert scene.unsent.bytes == 0


def test_a_client_that_does_not_read_is_not_read():
    scene, stuck = Scene(), asyncio.Event()

    async def send(body: bytes) -> None:
        await stuck.wait()

    async def run() -> None:
        stream = InOrder(scene.answer, scene.enter, scene.unsent, max_tasks=1000, max_unsent_bytes=8)
        running = asyncio.ensure_future(stream.run(scene.requests([b"\x01"] * 1000), send))
        for _ in range(100):
            await asyncio.sleep(0)
        assert scene.read < 1000
        stopped_at = scene.read
        for _ in range(100):
            await asyncio.sleep(0)
        assert scene.read == stopped_at
        stuck.set()
        await running
        assert scene.read == 1000

    asyncio.run(run())


def test_when_it_is_cancelled_nothing_runs_on_and_everybody_leaves():
    scene = Scene()

    async def answer(data: bytes) -> bytes:
        await asyncio.Event().wait()
        return data

    async def run() -> None:
        running = asyncio.ensure_future(
            InOrder(answer, scene.enter, scene.unsent, max_tasks=8).run(scene.requests([b"a"] * 20), scene.send)
        )
        while scene.entered < 8:
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert scene.left == 8
        assert scene.unsent.bytes == 0
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_requests_that_break_off_break_it_off():
    scene = Scene()

    async def requests() -> AsyncIterator[bytes]:
        yield b"\x01"
        raise ConnectionError("gone")

    async def run() -> None:
        with pytest.raises(ConnectionError):
            await InOrder(scene.answer, scene.enter, scene.unsent, max_tasks=8).run(requests(), scene.send)

    asyncio.run(run())
    assert scene.sent == [b"\x01\x01"]


def test_at_the_bound_of_all_a_stream_waits_for_its_own_client_and_is_refused_if_it_holds_nothing():
    scene, reads = Scene(), asyncio.Event()
    scene.unsent = Unsent(8)

    async def send(body: bytes) -> None:
        await reads.wait()
        scene.sent.append(body)

    async def run() -> None:
        items = [b"\x01"] * 100
        running = asyncio.ensure_future(
            InOrder(scene.answer, scene.enter, scene.unsent, max_tasks=2).run(scene.requests(items), send)
        )
        for _ in range(100):
            await asyncio.sleep(0)
        assert 0 < scene.unsent.bytes <= 8
        scene.unsent.add(8)
        with pytest.raises(AnswersUnsent, match="max-unsent-bytes"):
            await InOrder(scene.answer, scene.enter, scene.unsent, max_tasks=2).run(scene.requests(items), send)
        scene.unsent.add(-8)
        reads.set()
        await running
        assert (len(scene.sent), scene.unsent.bytes) == (100, 0)

    asyncio.run(run())


def test_room_is_asked_for_before_a_message_whose_answer_may_be_large_is_begun():
    scene, size = Scene(), 2 * SMALL_BYTES
    scene.unsent = Unsent(4 * SMALL_BYTES)

    async def run() -> None:
        stream = InOrder(scene.answer, scene.enter, scene.unsent, max_tasks=9, estimate=lambda _: size)
        others = await scene.unsent.room(size)
        running = asyncio.ensure_future(stream.run(scene.requests([b"\x01"] * 9), scene.send))
        for _ in range(100):
            await asyncio.sleep(0)
        assert (scene.entered, scene.unsent.bytes) == (0, others)
        scene.unsent.add(-others)
        await running
        assert (scene.most_inside, len(scene.sent), scene.unsent.bytes) == (1, 9, 0)

    asyncio.run(run())


@pytest.mark.parametrize(("given", "most"), [("7", 7), ("0", 1), ("many", DEFAULT_PARALLEL), (None, DEFAULT_PARALLEL)])
def test_the_environment_says_how_many(monkeypatch, given, most):
    monkeypatch.delenv("GRPC_MAX_PARALLEL_STREAM_REQUESTS", raising=False)
    if given is not None:
        monkeypatch.setenv("GRPC_MAX_PARALLEL_STREAM_REQUESTS", given)
    assert parallel_requests() == most
