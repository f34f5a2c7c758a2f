"""`--shadow`: a share of the live requests for embeddings also goes to another server, whose vectors are compared with ours.

A request is copied when its answer is on its way, so it never waits for the other server and never sees its errors. Only what
was answered with 200 is copied: its key was checked. The key itself stays here. Copies wait in a queue bounded in requests and
bytes; beyond, they are dropped and counted. Each HTTP worker has a queue and connections of its own.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
import orjson

from hybridtei.config import ServerConfig
from hybridtei.evaluate.compare import Agreement, read_vectors
from hybridtei.evaluate.signs import Vectors
from hybridtei.observability.metrics import Registry
from hybridtei.server.http.body import header, unfold
from hybridtei.server.http.writers import JSON, MSGPACK
from hybridtei.server.routing import ALIAS, BELOW

PATHS = frozenset({"/embed", "/embeddings", "/v1/embeddings"})
CONNECTIONS = 2
MAX_WAITING = 64  # copies in the queue
MAX_HELD_BYTES = 16_000_000  # of all copies, from the first byte of a request on
MAX_COPY_BYTES = 2_000_000  # of a request and its answer together; of the other server's answer
TIMEOUT_S = 10.0  # of one call, with connecting to the server
STOP_S = 1.0  # for the connections to close
REPORT_S = 60.0
COSINES = (0.0, 0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999, 1.0)
MARK = b"x-hybridtei-shadow"  # a copy is not copied again, even by a server that shadows itself

log = logging.getLogger(__name__)


class Refused(Exception):
    """What the other server answered cannot be compared; its text is the `reason` of the metric."""


@dataclass(slots=True)
class _Copy:
    """A live request, and what it was answered."""

    path: str
    headers: dict[str, str]
    body: list[bytes] = field(default_factory=list)
    status: int = 0
    answer_headers: Iterable[tuple[bytes, bytes]] = ()
    answer: list[bytes] = field(default_factory=list)
    bytes: int = 0
    is_dropped: bool = False


class Shadow:
    """Sends copies of requests to the server of `--shadow`. For one event loop."""

    def __init__(self, server: ServerConfig, registry: Registry) -> None:
        assert server.shadow is not None
        self._url, self._rate = server.shadow.rstrip("/"), server.shadow_rate
        self._headers = {"accept": "application/json", "accept-encoding": "identity", MARK.decode(): "1"}
        if server.shadow_api_key is not None:
            self._headers["authorization"] = f"Bearer {server.shadow_api_key}"
        self._waiting: asyncio.Queue[_Copy] = asyncio.Queue(MAX_WAITING)
        self._held_bytes = 0
        self._agreement = Agreement()
        self._aside = ThreadPoolExecutor(1, "shadow")  # all that touches the agreement; reading JSON blocks
        self._client: httpx.AsyncClient | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._sent = registry.counter("hybridtei_shadow_sent_total")
        self._dropped = registry.counter("hybridtei_shadow_dropped_total")
        self._failed = registry.counter("hybridtei_shadow_failed_total")
        self._cosines = registry.histogram("hybridtei_shadow_cosine", COSINES)
        registry.observed("hybridtei_shadow_waiting", self._waiting.qsize)
        registry.observed("hybridtei_shadow_bytes", lambda: self._held_bytes)

    async def start(self) -> None:
        """Open the connections."""
        self._client = httpx.AsyncClient(headers=self._headers, timeout=None)  # `_ask` has one, for the whole call
        self._tasks = [asyncio.create_task(self._work(self._client)) for _ in range(CONNECTIONS)]
        self._tasks.append(asyncio.create_task(self._report()))
        log.info("shadow: %g of requests for embeddings go to %s, too", self._rate, self._url)

    async def stop(self) -> None:
        """Give up what waits and what is under way, and log the last verdict."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._aside.shutdown(wait=False, cancel_futures=True)
        if self._client is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await self._client.aclose()
        self._log()

    def over(self, app: Any) -> Any:
        """The ASGI application, with a share of its requests copied."""

        async def handle(scope: Any, receive: Any, send: Any) -> None:
            is_chosen = scope["type"] == "http" and scope["path"] in PATHS and random.random() < self._rate
            if not is_chosen or scope["method"] != "POST" or header(scope, MARK) is not None:
                await app(scope, receive, send)
            else:
                await self._copying(app, scope, receive, send)

        return handle

    async def _copying(self, app: Any, scope: Any, receive: Any, send: Any) -> None:
        alias = scope.get(ALIAS)
        passed_on = {name: header(scope, name.encode()) for name in ("content-type", "content-encoding")}
        path = scope["path"] if alias is None else f"{BELOW}{alias}{scope['path']}"
        copy = _Copy(path, {name: value for name, value in passed_on.items() if value is not None})
        is_waiting = False

        async def receive_copied() -> Any:
            event = await receive()
            self._hold(copy, copy.body, event.get("body", b""))
            return event

        async def send_copied(message: Any) -> None:
            nonlocal is_waiting
            await send(message)
            if message["type"] == "http.response.start":
                copy.status, copy.answer_headers = message["status"], message.get("headers", ())
                return
            self._hold(copy, copy.answer, message.get("body", b""))
            if not message.get("more_body", False) and copy.status == 200 and not copy.is_dropped:
                is_waiting = self._put(copy)

        try:
            await app(scope, receive_copied, send_copied)
        finally:
            if not is_waiting:
                self._release(copy)

    def _hold(self, copy: _Copy, parts: list[bytes], data: bytes) -> None:
        if copy.is_dropped or not data:
            return
        parts.append(data)
        copy.bytes += len(data)
        self._held_bytes += len(data)
        if copy.bytes > MAX_COPY_BYTES:
            self._drop(copy, "size")
        elif self._held_bytes > MAX_HELD_BYTES:
            self._drop(copy, "bytes")

    def _put(self, copy: _Copy) -> bool:
        try:
            self._waiting.put_nowait(copy)
        except asyncio.QueueFull:
            self._drop(copy, "queue")
            return False
        return True

    def _drop(self, copy: _Copy, reason: str) -> None:
        copy.is_dropped = True
        self._dropped.add(reason=reason)
        self._release(copy)

    def _release(self, copy: _Copy) -> None:
        self._held_bytes -= copy.bytes
        copy.bytes = 0
        copy.body, copy.answer = [], []

    async def _work(self, client: httpx.AsyncClient) -> None:
        """One connection: a copy at a time."""
        while True:
            copy = await self._waiting.get()
            try:
                await self._ask(client, copy)
            except TimeoutError:
                self._failed.add(reason="timeout")
            except Refused as error:
                self._failed.add(reason=str(error))
            except (httpx.HTTPError, httpx.InvalidURL):
                self._failed.add(reason="connection")
            except Exception:
                self._failed.add(reason="answer")
                log.exception("shadow: an answer could not be compared")
            finally:
                self._release(copy)

    async def _ask(self, client: httpx.AsyncClient, copy: _Copy) -> None:
        """Raises Refused, TimeoutError, httpx.HTTPError."""
        self._sent.add()
        async with asyncio.timeout(TIMEOUT_S):
            content = await self._answer(client, copy)
        loop = asyncio.get_running_loop()
        cosines = await loop.run_in_executor(self._aside, self._compare, copy, content)
        for cosine in cosines.tolist():
            self._cosines.observe(cosine)

    async def _answer(self, client: httpx.AsyncClient, copy: _Copy) -> bytes:
        content, url = b"".join(copy.body), self._url + copy.path
        async with client.stream("POST", url, content=content, headers=copy.headers) as response:
            if response.status_code != 200:
                raise Refused("status")
            if "content-encoding" in response.headers:  # unpacked, it may be of any size
                raise Refused("answer")
            parts, size = [], 0
            async for part in response.aiter_raw():
                parts.append(part)
                size += len(part)
                if size > MAX_COPY_BYTES:
                    raise Refused("size")
        return b"".join(parts)

    def _compare(self, copy: _Copy, content: bytes) -> Vectors:
        """The cosine of each text. Raises Refused."""
        ours, others = _vectors(_decode(copy)), _vectors(_json(content))
        if len(ours) != len(others):
            raise Refused("answer")
        if ours.shape != others.shape:
            self._agreement.of_other_widths()
            raise Refused("width")
        return 1 - self._agreement.add(ours, others)

    async def _report(self) -> None:
        """Log the verdict now and then, if there is more to tell."""
        logged = 0
        while True:
            await asyncio.sleep(REPORT_S)
            if self._agreement.texts > logged:
                logged = self._agreement.texts
                await asyncio.get_running_loop().run_in_executor(self._aside, self._log)

    def _log(self) -> None:
        if (line := self._agreement.in_a_line()) is not None:
            log.info("shadow %s: %s", self._url, line)


def _decode(copy: _Copy) -> Any:
    """Our own answer. Raises Refused."""
    headers = dict(copy.answer_headers)
    body, coding = b"".join(copy.answer), headers.get(b"content-encoding")
    if coding is not None:
        body = unfold(body, coding.decode(), MAX_COPY_BYTES)
    if headers.get(b"content-type") == MSGPACK:
        return msgspec.msgpack.decode(body)
    return _json(body) if headers.get(b"content-type") == JSON else None


def _json(content: bytes) -> Any:
    with suppress(ValueError):
        return orjson.loads(content)
    raise Refused("answer")


def _vectors(answer: Any) -> Vectors:
    try:
        return read_vectors(answer)
    except ValueError:
        raise Refused("answer") from None
