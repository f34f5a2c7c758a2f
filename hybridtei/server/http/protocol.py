"""Bytes on a connection -> requests: uvicorn's HTTP/1.1, with bounds, and with what hyper (TEI's) says to what is not HTTP.

A head beyond the bounds, too slow or malformed is answered here, and costs no more than the bytes read until then. The parser
collects an unfinished header or chunk extension without any event and without a bound, so bytes that are read without an event
are counted too.

A client that shuts down its sending side counts as disconnected, as in hyper: the same FIN ends a connection, and a client
that disconnected would be noticed only once its answer is written.
"""

from __future__ import annotations

import re
from asyncio import TimerHandle, Transport
from collections import deque
from collections.abc import Coroutine
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HEADER_VALUE_RE, STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from hybridtei.config import ServerConfig
from hybridtei.server.http.connection import (
    BROKEN_BODY,
    CROWD,
    DISCONNECT,
    SLOW_BODY,
    ConnectionLimits,
    Disconnect,
    GatheredTransport,
    is_disconnected,
)

HEADER_COUNT_LIMIT = 100  # hyper's
URL_LIMIT_BYTES = 65_534  # hyper's
PIPELINE_LIMIT = 16  # so many requests wait behind the one at work before reading pauses; a paused client's end goes unnoticed
LINGER_SECONDS = 1.0  # how long a refused client may go on sending; a close in its face would destroy the answer
UNSENT_CHECKS = 4  # at a client that reads nothing, until it is cut off
HEADER_OVERHEAD_BYTES = 4  # colon, space, line end
VERSIONS = ("1.0", "1.1")  # the parser would take 0.9 and 2.0 in the same clothes
AT_CAPACITY = b"too many connections (max-connections)"
SLOW_HEAD = b"the head of the request took too long (header-timeout)"


class _Refused(Exception):
    """Raised in a callback, to stop the parser."""


OTHER_NAME = re.compile(b"[^a-z0-9-]")  # of a header as this package and the framework write it


class _Cycle(RequestResponseCycle):
    """A request and its answer. Looks for bytes that no header may have once, in all of them; upstream looks twice at each."""

    def send(self, message: Any) -> Coroutine[Any, Any, None]:
        """See ASGI."""
        if message["type"] == "http.response.start" and not (self.response_started or self.disconnected or self.access_log):
            fields = [*self.default_headers, *message.get("headers", ())]
            names, values = [name for name, _ in fields], [value for _, value in fields]
            length = dict(fields).get(b"content-length", b"")
            is_plain = length and b"connection" not in names and b"transfer-encoding" not in names
            if is_plain and not (OTHER_NAME.search(b"".join(names)) or HEADER_VALUE_RE.search(b"".join(values))):
                return self._send_head(message["status"], fields, int(length))
        return super().send(message)

    async def _send_head(self, status: int, fields: list[tuple[bytes, bytes]], length: int) -> None:
        if self.flow.write_paused:
            await self.flow.drain()
            if self.disconnected:
                return
        self.response_started, self.waiting_for_100_continue = True, False
        self.chunked_encoding, self.expected_content_length = False, length
        if not self.keep_alive:
            fields.append((b"connection", b"close"))
        self.transport.write(b"%b%b\r\n" % (STATUS_LINE[status], b"".join([b"%b: %b\r\n" % field for field in fields])))


class BoundedHttpProtocol(HttpToolsProtocol):
    """The protocol of one connection."""

    def __init__(self, config: Config, *args: Any, limits: ConnectionLimits | None = None, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._limits = limits or ConnectionLimits.of(ServerConfig())
        self._open: deque[RequestResponseCycle] = deque()  # requests not yet answered, the oldest first
        self._in_body = False
        self._fields = 0
        self._field_bytes = 0
        self._eventless_bytes = 0
        self._has_event = False
        self._status = HTTPStatus.BAD_REQUEST
        self._final_answer: bytes | None = None  # once set, nothing more is parsed
        self._head_since: float | None = None  # when the head that has yet to come was first waited for
        self._body_since = self._body_last = 0.0
        self._body_bytes = 0
        self._head_begun = False  # a head, of which the end has yet to come
        self._watch: TimerHandle | None = None
        self._unread = 0
        self._unsent = self._unsent_first = 0  # bytes that the system has not taken: now, and when it took no more
        self._unsent_since = self._unsent_less = 0.0
        self._unsent_watch: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # The system is offered all at once, and reports what it does not take. A bound of 0 would never be left under TLS.
        transport.set_write_buffer_limits(high=1 if self.scheme == "https" else 0)
        if len(self.connections) <= self._limits.connections:
            self._head_since = self.loop.time()
            self._watch_deadline()
            return
        self._limits.refused("max_connections")
        if len(self.connections) > 2 * self._limits.connections:  # to tell each of so many would itself be too much
            transport.abort()
            return
        self._final_answer = self._bare(HTTPStatus.SERVICE_UNAVAILABLE, AT_CAPACITY)
        self._hang_up(self._final_answer)

    def data_received(self, data: bytes) -> None:
        if self._final_answer is not None:
            return
        if len(self.tasks) > CROWD and is_disconnected(self.transport):
            self._limits.disconnected()
            self._final_answer = b""
            self.transport.close()  # not at once: an earlier answer may still be on its way
            self._cut_off_unread()
            return
        self._unset_keepalive_if_required()
        if self._head_since is None and not self._in_body:
            self._head_since = self.loop.time()
        self._has_event = False
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._stop_parsing()
            return
        self._eventless_bytes = 0 if self._has_event else self._eventless_bytes + len(data)
        if self._eventless_bytes > self._limits.head_bytes:
            self._status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            self._limits.refused("header_limit")
            self._stop_parsing()
        elif self._in_body or self._head_since is not None:  # most requests come whole: no timer
            self._watch_deadline()

    def _deadline(self) -> float | None:
        """By when more has to come, as the loop counts; None: the client owes nothing now."""
        if self._in_body:
            if not self._limits.body_seconds:
                return None
            return self._limits.body_deadline(self._body_since, self._body_last, self._body_bytes)
        if self._head_since is None or not self._limits.head_seconds:
            return None
        return self._head_since + self._limits.head_seconds

    def _watch_deadline(self) -> None:
        """Look when more has to have come, if not earlier: a timer costs more than to look once too often."""
        deadline = self._deadline()
        if deadline is None or (self._watch is not None and self._watch.when() <= deadline):
            return
        if self._watch is not None:
            self._watch.cancel()
        self._watch = self.loop.call_at(deadline, self._check_deadline)

    def _check_deadline(self) -> None:
        self._watch = None
        if self._final_answer is not None or self.transport.is_closing():
            return
        deadline, now = self._deadline(), self.loop.time()
        if self.flow.read_paused:  # it is we who do not read
            self._head_since = None if self._head_since is None else now
            self._body_since, self._body_last, self._body_bytes = now, now, 0
            self._watch_deadline()
        elif deadline is None or now < deadline:
            self._watch_deadline()
        elif self._in_body:
            self._limits.refused("body_timeout")
            self.cycle.scope["extensions"][SLOW_BODY] = {}
            self._stop_parsing()
        elif not self._head_begun and self._open:
            self._head_since = now
            self._watch_deadline()
        elif not self._head_begun:  # a connection that was opened to be used later: no error
            self.transport.close()
        else:
            self._limits.refused("header_timeout")
            self._status = HTTPStatus.REQUEST_TIMEOUT
            self._stop_parsing()

    def _feed(self, data: bytes) -> None:
        """Offers to upgrade (the JDK's client makes one with every request) are declined by reading the head without them.

        The parser would take them, and the body for words of another protocol.
        """
        rest: bytes | memoryview = data
        while True:
            try:
                self.parser.feed_data(rest)
            except httptools.HttpParserUpgrade as offer:
                rest = memoryview(rest)[offer.args[0] :]
                version = self.parser.get_http_version().encode()
                fields = b"".join(b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade")
                head = b"%b %b HTTP/%b\r\n%b\r\n" % (self.parser.get_method(), self.url, version, fields)
                self.parser = httptools.HttpRequestParser(self)
                self.parser.feed_data(head)
            else:
                return

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {DISCONNECT: Disconnect(len(self.tasks), self.transport)}  # type: ignore[dict-item]
        self._fields = self._field_bytes = 0
        self._head_since, self._head_begun = self.loop.time(), True

    def on_url(self, url: bytes) -> None:
        self._has_event = True
        super().on_url(url)
        self._field_bytes += len(url)
        if len(self.url) > min(URL_LIMIT_BYTES, self._limits.head_bytes):
            self._limits.refused("header_limit")
            self._refuse(HTTPStatus.REQUEST_URI_TOO_LONG)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._has_event = True
        self._fields += 1
        self._field_bytes += len(name) + len(value) + HEADER_OVERHEAD_BYTES
        if self._fields > HEADER_COUNT_LIMIT or self._field_bytes > self._limits.head_bytes:
            self._limits.refused("header_limit")
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        if not self._in_body:  # trailers are no headers
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._has_event = True
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":  # asks for a tunnel; declined like an offer, it would be read for ever
                self._refuse(HTTPStatus.BAD_REQUEST)
            return
        if self.parser.get_http_version() not in VERSIONS:
            self._refuse(HTTPStatus.BAD_REQUEST)
        super().on_headers_complete()
        self._in_body = True
        self._head_since, self._head_begun = None, False
        self._body_since = self._body_last = self.loop.time()
        self._body_bytes = 0
        self._fields = self._field_bytes = 0  # trailers may come
        self.cycle.__class__ = _Cycle  # upstream makes it, and its task has not begun
        self.cycle.transport = GatheredTransport(self.transport, self._linger)  # type: ignore[assignment]
        self._open.append(self.cycle)
        if 0 < len(self.pipeline) < PIPELINE_LIMIT:
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._has_event = True
        self._body_last = self.loop.time()
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._has_event = True
        if self.parser.should_upgrade():
            return
        self._in_body = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._open:
            self._open.popleft().transport.flush()  # type: ignore[attr-defined]
        super().on_response_complete()
        if self.transport.is_closing():
            self._cut_off_unread()
        elif self._final_answer is not None and not self._open:
            self._hang_up(self._final_answer)

    def _linger(self) -> bool:
        """Whether a body is still coming: it is read and dropped then, since to close in its face would destroy the answer."""
        if not self._in_body or self._final_answer is not None:
            return False
        self._final_answer = b""
        return True

    def timeout_keep_alive_handler(self) -> None:
        """Closing waits until the client has read what was written; one that reads nothing more is cut off."""
        if self.transport.is_closing() and self.transport.get_write_buffer_size() == self._unread:
            self.transport.abort()
            return
        super().timeout_keep_alive_handler()
        self._cut_off_unread()

    def pause_writing(self) -> None:
        """The system takes no more bytes until the client reads."""
        super().pause_writing()
        self._count_unsent()
        self._unsent_first = self._unsent
        self._unsent_since = self._unsent_less = self.loop.time()
        self._watch_unsent()

    def resume_writing(self) -> None:
        """The system took all bytes."""
        super().resume_writing()
        self._forget_unsent()

    def _count_unsent(self) -> None:
        size = self.transport.get_write_buffer_size()
        self._limits.unsent.add(size - self._unsent)
        self._unsent = size

    def _forget_unsent(self) -> None:
        self._limits.unsent.add(-self._unsent)
        self._unsent = 0
        if self._unsent_watch is not None:
            self._unsent_watch.cancel()
            self._unsent_watch = None

    def _watch_unsent(self) -> None:
        if self._unsent_watch is None:
            self._unsent_watch = self.loop.call_later(self._limits.unread_seconds / UNSENT_CHECKS, self._check_unsent)

    def _check_unsent(self) -> None:
        self._unsent_watch = None
        before, now = self._unsent, self.loop.time()
        self._count_unsent()
        if self._unsent < before:
            self._unsent_less = now
        if now < self._limits.unread_deadline(self._unsent_since, self._unsent_less, self._unsent_first - self._unsent):
            self._watch_unsent()
        else:
            self._limits.refused("unread_seconds")
            self.transport.abort()

    def _cut_off_unread(self) -> None:
        self._unread = self.transport.get_write_buffer_size()
        if self._unread:
            self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self._unset_keepalive_if_required()
        self._forget_unsent()
        if self._watch is not None:
            self._watch.cancel()
        self.pipeline.clear()
        for cycle in self._open:  # upstream tells only the one that came last
            cycle.disconnected = True
            cycle.message_event.set()
            cycle.scope["extensions"][DISCONNECT].notify()  # type: ignore[attr-defined]
        self._open.clear()
        super().connection_lost(exc)

    def _refuse(self, status: HTTPStatus) -> None:
        self._status = status
        raise _Refused

    def _stop_parsing(self) -> None:
        """Nothing more can be understood. Requests that came before are still answered, and first."""
        if not self._in_body:
            self._final_answer = self._bare(self._status, SLOW_HEAD if self._status == HTTPStatus.REQUEST_TIMEOUT else b"")
        else:
            self._final_answer = b""
            if not self.cycle.response_complete:
                self.cycle.scope["extensions"][BROKEN_BODY] = {}
                self.cycle.message_event.set()
        if not self._open:
            self._hang_up(self._final_answer)

    def _bare(self, status: HTTPStatus, text: bytes = b"") -> bytes:
        headers = [*self.server_state.default_headers, (b"content-length", b"%d" % len(text)), (b"connection", b"close")]
        if text:
            headers.append((b"content-type", b"text/plain; charset=utf-8"))
        return STATUS_LINE[status] + b"".join(b"%b: %b\r\n" % header for header in headers) + b"\r\n" + text

    def _hang_up(self, final_answer: bytes) -> None:
        self._unset_keepalive_if_required()
        self.transport.write(final_answer)
        if self.transport.can_write_eof():  # TLS has no half of a connection to close
            self.transport.write_eof()
        self.flow.resume_reading()
        self.timeout_keep_alive_task = self.loop.call_later(LINGER_SECONDS, self.timeout_keep_alive_handler)
