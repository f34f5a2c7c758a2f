"""A server that is away, busy, slow or another program ends in one clear error, and is asked again
where that may help."""

import asyncio
import socket
import threading
from contextlib import contextmanager

import orjson
import pytest

from hybridtei.errors import InvalidInput, NoAnswer
from tests.server.live import HANG
from tests.stand_in import answering

INFO = {"hybridtei": {"role": "embedding", "dimensions": {"dense": 2}}, "max_client_batch_size": 32}
GOOD = orjson.dumps([{"dense": [1.0, 0.0]}])


@contextmanager
def scripted(*answers):
    """A server of these answers to POST, in turn, the last one for ever; and the paths that it was
    asked."""
    asked = []

    def answer(method, path, _):
        if method == "GET":
            return 200, {}, orjson.dumps(INFO)
        asked.append(path)
        return answers[min(len(asked), len(answers)) - 1]

    with answering(answer) as url:
        yield url, asked


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_server_is_asked_again(ask, status):
    with scripted(
        (status, {"retry-after": "0"}, b"later"), (status, {}, b"later"), (200, {}, GOOD)
    ) as (url, asked):
        assert ask(url, "encode", "one").dense.tolist() == [[1.0, 0.0]]
    assert asked == ["/embed_hybrid"] * 3


def test_patience_ends_with_the_last_failure(ask):
    busy = (
        r"/embed_hybrid: no answer within 1 s \(patience_s\), 1 try; the last: status 429: busy now"
    )
    with (
        scripted((429, {"retry-after": "100"}, b"busy now")) as (url, asked),
        pytest.raises(NoAnswer, match=busy),
    ):
        ask(url, "encode", "one", patience_s=1)
    # What it asks to wait is longer than the patience
    assert len(asked) == 1
    down = r"no answer within 0.5 s \(patience_s\), \d tr(y|ies); the last: status 503: down"
    with scripted((503, {}, b"down")) as (url, asked), pytest.raises(ConnectionError, match=down):
        ask(url, "encode", "one", patience_s=0.5)
    assert 2 <= len(asked) <= 9


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((200, {}, b"<html>please\n log in"), "status 200: <html>please log in"),
        ((302, {"location": "/login"}, b"moved"), "status 302: to /login: moved"),
        ((413, {}, b"<html>Request Entity Too Large"), "Too Large"),
        ((422, {}, b'{"detail": "another program"}'), "another program"),
        ((200, {}, b"null"), "status 200: null"),
        ((200, {}, b'{"data": []}'), "should answer a list of 1"),
        ((200, {}, b'[{"sparse": {}}]'), "should answer 1 objects of dense"),
    ],
)
def test_another_program_is_not_taken_for_the_server(ask, answer, why):
    with scripted(answer) as (url, asked), pytest.raises(NoAnswer, match=why):
        ask(url, "encode", "one")
    assert len(asked) == 1
    with (
        answering(lambda *_: (200, {}, b'{"model_id": "of TEI"}')) as url,
        pytest.raises(InvalidInput, match="is not hybridtei"),
    ):
        ask(url, "info")


class Raw:
    """A server whose every connection `behave` answers, by its number; in a thread of its own."""

    def __init__(
        self,
        behave,
        port=0,
    ):
        self._behave, self._port, self.connections = behave, port, 0
        self._loop, self._ready = asyncio.new_event_loop(), threading.Event()
        self._thread = threading.Thread(
            target=self._loop.run_until_complete, args=[self._serve()], daemon=True
        )

    async def _serve(self):
        self._end = asyncio.Event()
        server = await asyncio.start_server(self._connected, "127.0.0.1", self._port)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._end.wait()
        server.close()

    async def _connected(self, reader, writer):
        self.connections += 1
        try:
            await self._behave(self.connections, reader, writer)
        except ConnectionError:
            pass
        finally:
            writer.close()

    def __enter__(self):
        self._thread.start()
        assert self._ready.wait(HANG)
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(HANG)
        assert not self._thread.is_alive()


WHOLE = orjson.dumps({"collections": ["notes"]})
HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
    % len(WHOLE)
)


@pytest.mark.parametrize(
    "sent",
    [b"", HEAD[:20], HEAD, HEAD + WHOLE[:-3]],
    ids=["nothing", "head", "no body", "half a body"],
)
def test_a_connection_that_is_cut_is_made_anew(ask, sent):
    async def behave(number, reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(sent if number < 3 else HEAD + WHOLE)
        await writer.drain()

    with Raw(behave) as server:
        assert ask(server.url, "collections") == ["notes"]
        assert server.connections == 3


@pytest.mark.parametrize("is_dripping", [False, True])
def test_a_slow_server_ends_in_an_error(ask, is_dripping):
    """One that says nothing, and one that never comes to an end of saying something."""

    async def behave(_, reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(
            HEAD.replace(b"content-length: %d" % len(WHOLE), b"content-length: 1000000")
            if is_dripping
            else b""
        )
        while not reader.at_eof():
            writer.write(b" " if is_dripping else b"")
            await writer.drain()
            await asyncio.wait([asyncio.ensure_future(reader.read(1))], timeout=0.02)

    with (
        Raw(behave) as server,
        pytest.raises(NoAnswer, match=r"no answer within 0.1 s \(patience_s\), \d tr"),
    ):
        ask(server.url, "collections", timeout_s=0.2, patience_s=0.1)


def test_a_server_that_is_restarted_is_found_again(ask):
    """The next one listens while the client already tries: at a port where nothing answers at
    first."""

    async def behave(_, reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD + WHOLE)
        await writer.drain()

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
    with pytest.raises(
        NoAnswer, match=f"{port}/collections: no answer within 0.2 s .*ConnectError"
    ):
        ask(url, "collections", patience_s=0.2)
    found = []
    asking = threading.Thread(target=lambda: found.append(ask(url, "collections", patience_s=HANG)))
    asking.start()
    with Raw(behave, port):
        asking.join(HANG)
    assert found == [["notes"]]
