"""Laws of a stream: order, how much is in the works, and that nothing runs on."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.server.grpc.calls import in_order


class Scene:
    """The events of one stream: the numbers of requests read, begun and left, and the sent
    answers."""

    def __init__(self):
        self.read = self.left = self.inside = self.most_inside = 0
        self.sent = []
        # The client reads; the engine answers
        self.reads, self.answers = (
            asyncio.Event(),
            asyncio.Event(),
        )
        self.reads.set()
        self.answers.set()

    async def requests(self, items):
        for item in items:
            await asyncio.sleep(0)
            self.read += 1
            yield item

    async def begin(self, item):
        task = asyncio.ensure_future(self.answer(item))
        task.add_done_callback(self.leave)
        return task

    def leave(self, _):
        self.left += 1

    async def answer(self, item):
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        try:
            await self.answers.wait()
            for _ in range(item[0] % 7):
                await asyncio.sleep(0)
            if item == b"!":
                raise ValueError("bad")
            return item * 2
        finally:
            self.inside -= 1

    async def send(self, body):
        await self.reads.wait()
        self.sent.append(body)

    def run(self, items, most):
        return asyncio.ensure_future(
            in_order(self.requests(items), self.begin, self.send, lambda count: count >= most)
        )


async def turns():
    for _ in range(100):
        await asyncio.sleep(0)


@given(st.lists(st.integers(1, 32).map(lambda number: bytes([number]))), st.integers(1, 5))
def test_answers_keep_the_order_and_no_more_are_in_the_works(items, most):
    async def run():
        scene = Scene()
        await scene.run(items, most)
        assert scene.sent == [item * 2 for item in items]
        assert scene.most_inside <= most
        assert scene.left == len(items)

    asyncio.run(run())


@given(st.integers(0, 6), st.integers(0, 6))
def test_the_first_failure_by_place_ends_it_and_what_came_before_was_sent(before, after):
    async def run():
        scene = Scene()
        with pytest.raises(ValueError, match="bad"):
            await scene.run([b"\x06"] * before + [b"!"] + [b"\x06"] * after, 4)
        await asyncio.sleep(0)
        assert scene.sent == [b"\x06\x06"] * before
        assert scene.inside == 0

    asyncio.run(run())


async def test_a_client_that_does_not_read_is_not_read():
    scene = Scene()
    scene.reads.clear()
    running = scene.run([b"\x01"] * 1000, 8)
    await turns()
    assert (scene.left, scene.read) == (8, 9)
    scene.reads.set()
    await running
    assert len(scene.sent) == 1000


async def test_when_it_is_cancelled_nothing_runs_on_and_every_request_leaves():
    scene = Scene()
    scene.answers.clear()
    running = scene.run([b"a"] * 20, 8)
    await turns()
    assert scene.inside == 8
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (scene.inside, scene.left) == (0, 8)
    assert len(asyncio.all_tasks()) == 1


async def test_requests_that_break_off_break_it_off_behind_the_answers():
    async def requests():
        yield b"\x01"
        raise ConnectionError("gone")

    scene = Scene()
    with pytest.raises(ConnectionError):
        await in_order(requests(), scene.begin, scene.send, lambda count: count >= 8)
    assert scene.sent == [b"\x01\x01"]
