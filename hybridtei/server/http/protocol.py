"""uvicorn's HTTP/1.1 with bounds, and with the answers of hyper (TEI's server) to malformed
requests.

This module answers a head that is too large, too slow or malformed; it costs no more than the bytes
read so far. The parser buffers an unfinished header or chunk extension without an event or a bound,
so bytes read without an event are counted too. After a refusal for lack of permits the connection
is not read for `PAUSE_SECONDS`: clients that retry at once would fill the event loop with refusals.
Slow clients within these bounds, and fairness among refused clients, are a proxy's work:
`deploy/nginx`.

A client that shuts down its sending side counts as disconnected, as in hyper: FIN looks the same in
both cases, and the server would otherwise notice a disconnect only when it writes the answer.
"""

from __future__ import annotations

from asyncio import TimerHandle, Transport
from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from hybridtei.server.http.body import BROKEN_BODY, DISCONNECT, REFUSED, SLOW_BODY, Disconnect
from hybridtei.server.http.connection import ConnectionLimits, body_deadline

# The limits of hyper
HEADER_COUNT_LIMIT = 100
URL_LIMIT_BYTES = 65_534
# Requests that wait behind the running one; then reading pauses, and a disconnect goes unnoticed
PIPELINE_LIMIT = 16
# After a refusal for lack of permits; a client that obeys `Retry-After` does not notice
PAUSE_SECONDS = 0.5
# Keep reading after a refusal: closing at once sends RST, and the client loses the answer
LINGER_SECONDS = 1.0
# Without progress in reading an answer, then the client is cut off
UNREAD_SECONDS = 20.0
# Without progress of a body while the server stops
STOP_SECONDS = 1.0
# Colon, space, line end
HEADER_OVERHEAD_BYTES = 4
# The parser would also accept 0.9 and 2.0 in HTTP/1 syntax
VERSIONS = ("1.0", "1.1")
AT_CAPACITY = b"too many connections (max-connections)"
SLOW_HEAD = b"the head of the request took too long (header-timeout)"


class Answering:
    """The transport that answers write to. It sends a head together with its body: one packet and
    one system call, not two."""

    def __init__(self, transport: Transport, close: Callable[[], object]) -> None:
        """`close`: called instead of the transport's `close`."""
        self.is_closing = transport.is_closing
        self._transport = transport
        self._close = close
        self._head: bytes | memoryview = b""

    def write(self, data: bytes | memoryview) -> None:
        if self._head:
            self._transport.writelines((self._head, data))
            self._head = b""
        elif data[:9] == b"HTTP/1.1 " and data[9:12] != b"100":
            self._head = data
        else:
            self._transport.write(data)

    def flush(self) -> None:
        """Write a head that has no body."""
        if self._head:
            self._transport.write(self._head)
            self._head = b""

    def close(self) -> None:
        self.flush()
        self._close()


class _Refused(Exception):
    """Raised in a callback to stop the parser."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """The protocol of one connection."""

    on_body: Any

    def __init__(self, config: Config, *args: Any, limits: ConnectionLimits, **kwargs: Any) -> None:
        # The parts of the body in the data that is being parsed. A body that comes byte by byte has
        # forty thousand in one read of the socket, so the parser appends them itself.
        self._chunks: list[bytes] = []
        self.on_body = self._chunks.append
        super().__init__(config, *args, **kwargs)
        self._limits, self._bounds = limits, limits.server
        # Unanswered requests, the oldest first
        self._open: deque[RequestResponseCycle] = deque()
        # The transport that answers write to
        self._answering: Any = None
        self._in_body = False
        self._fields = self._field_bytes = self._eventless_bytes = self._hosts = 0
        self._has_event = False
        self._status = HTTPStatus.BAD_REQUEST
        # Once set, parsing has stopped
        self._final_answer: bytes | None = None
        # Since when the connection waits for the next head
        self._head_since: float | None = None
        # A part of the next head has arrived
        self._head_begun = False
        self._body_since = self._body_last = 0.0
        # Received of the body; not yet taken by the system
        self._body_bytes = self._unsent = 0
        self._is_stopping = False
        self._watch: TimerHandle | None = None
        self._pause: TimerHandle | None = None
        self._unsent_watch: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # The system reports every byte that it does not take at once
        transport.set_write_buffer_limits(high=1)
        self._answering = Answering(transport, self._close)
        if len(self.connections) <= self._bounds.max_connections:
            self._head_since = self.loop.time()
            self._watch_deadline()
            return
        self._limits.refused("max_connections")
        # Answers to more than twice the limit would cost too much
        if len(self.connections) > 2 * self._bounds.max_connections:
            transport.abort()
            return
        self._final_answer = self._bare(HTTPStatus.SERVICE_UNAVAILABLE, AT_CAPACITY)
        self._hang_up(self._final_answer)

    def data_received(self, data: bytes) -> None:
        if self._final_answer is not None:
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
        if self._chunks:
            self._pass_on_chunks()
        self._eventless_bytes = 0 if self._has_event else self._eventless_bytes + len(data)
        if self._eventless_bytes > self._bounds.header_limit:
            self._status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            self._limits.refused("header_limit")
            self._stop_parsing()
        elif self._in_body or self._head_since is not None:
            # Most requests arrive whole and need no timer
            self._watch_deadline()

    def _feed(self, data: bytes) -> None:
        """Parse. Offers to upgrade, which the JDK's client sends with every request, are left out
        of the head: the parser would accept them and take the body for another protocol."""
        rest: bytes | memoryview = data
        while True:
            try:
                self.parser.feed_data(rest)
            except httptools.HttpParserUpgrade as offer:
                rest = memoryview(rest)[offer.args[0] :]
                version = self.parser.get_http_version().encode()
                fields = b"".join(
                    b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade"
                )
                head = b"%b %b HTTP/%b\r\n%b\r\n" % (
                    self.parser.get_method(),
                    self.url,
                    version,
                    fields,
                )
                self.parser = httptools.HttpRequestParser(self)
                self.parser.feed_data(head)
            else:
                return

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {DISCONNECT: Disconnect()}  # type: ignore[dict-item]
        self._fields = self._field_bytes = self._hosts = 0
        self._head_since, self._head_begun = self.loop.time(), True

    def on_url(self, url: bytes) -> None:
        self._has_event = True
        super().on_url(url)
        self._field_bytes += len(url)
        if len(self.url) > min(URL_LIMIT_BYTES, self._bounds.header_limit):
            self._limits.refused("header_limit")
            self._refuse(HTTPStatus.REQUEST_URI_TOO_LONG)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._has_event = True
        self._fields += 1
        self._field_bytes += len(name) + len(value) + HEADER_OVERHEAD_BYTES
        if self._fields > HEADER_COUNT_LIMIT or self._field_bytes > self._bounds.header_limit:
            self._limits.refused("header_limit")
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        # Trailers are not headers
        if not self._in_body:
            super().on_header(name, value)
            self._hosts += self.headers[-1][0] == b"host"

    def on_headers_complete(self) -> None:
        self._has_event = True
        if self.parser.should_upgrade():
            # CONNECT asks for a tunnel; declined like an upgrade, it would be parsed for ever
            if self.parser.get_method() == b"CONNECT":
                self._refuse(HTTPStatus.BAD_REQUEST)
            return
        if self.parser.get_http_version() not in VERSIONS:
            self._refuse(HTTPStatus.BAD_REQUEST)
        if self._hosts > 1:
            self._refuse(HTTPStatus.BAD_REQUEST)
        super().on_headers_complete()
        self._in_body = True
        self._head_since, self._head_begun = None, False
        self._body_since = self._body_last = self.loop.time()
        self._body_bytes = 0
        # Trailers may follow
        self._fields = self._field_bytes = 0
        self.cycle.transport = self._answering
        self._open.append(self.cycle)
        if 0 < len(self.pipeline) < PIPELINE_LIMIT:
            self.flow.resume_reading()

    def _pass_on_chunks(self) -> None:
        body = b"".join(self._chunks)
        self._chunks.clear()
        self._has_event = True
        self._body_last = self.loop.time()
        self._body_bytes += len(body)
        HttpToolsProtocol.on_body(self, body)

    def on_message_complete(self) -> None:
        if self._chunks:
            self._pass_on_chunks()
        self._has_event = True
        if self.parser.should_upgrade():
            return
        self._in_body = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._answering.flush()
        is_refused = bool(self._open) and REFUSED in self._open.popleft().scope["extensions"]
        super().on_response_complete()
        if self.transport.is_closing():
            self._watch_unsent()
        elif self._final_answer is None:
            if is_refused:
                self.flow.pause_reading()
                self._pause = self._pause or self.loop.call_later(PAUSE_SECONDS, self._read_again)
        elif not self._open:
            self._hang_up(self._final_answer)

    def _read_again(self) -> None:
        self._pause = None
        if not self.transport.is_closing():
            self.flow.resume_reading()

    def _deadline(self) -> float | None:
        """The loop time at which more bytes are due. None if no timeout applies."""
        if self._in_body:
            seconds = STOP_SECONDS if self._is_stopping else self._bounds.body_timeout
            if not seconds:
                return None
            return body_deadline(self._body_since, self._body_last, self._body_bytes, seconds)
        if self._head_since is None or not self._bounds.header_timeout:
            return None
        return self._head_since + self._bounds.header_timeout

    def _watch_deadline(self) -> None:
        """Set a timer for the deadline, unless an earlier one is set: moving a timer costs more
        than one check too many."""
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
        # The client is not late, since this side has paused reading
        if self.flow.read_paused:
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
        elif not self._head_begun:
            # An idle connection, opened for later use, is no error
            self.transport.close()
        else:
            self._limits.refused("header_timeout")
            self._status = HTTPStatus.REQUEST_TIMEOUT
            self._stop_parsing()

    def shutdown(self) -> None:
        """Stop: uvicorn closes an idle connection. A stalled body is not awaited."""
        super().shutdown()
        self._is_stopping = True
        self._watch_deadline()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch_unsent()

    def pause_writing(self) -> None:
        """Called when the system takes no more bytes until the client reads."""
        super().pause_writing()
        self._watch_unsent()

    def resume_writing(self) -> None:
        """Called when the system has taken all bytes."""
        super().resume_writing()
        self._forget_unsent()

    def _watch_unsent(self) -> None:
        """Count the bytes that the client has not read; cut it off if their number does not
        fall."""
        size = self.transport.get_write_buffer_size()
        self._limits.unsent.give_back(self._unsent - size)
        self._unsent = size
        if size and self._unsent_watch is None:
            self._unsent_watch = self.loop.call_later(UNREAD_SECONDS, self._check_unsent, size)

    def _check_unsent(self, before: int) -> None:
        self._unsent_watch = None
        if self.transport.get_write_buffer_size() < before:
            self._watch_unsent()
        else:
            self._limits.refused("unread_seconds")
            self.transport.abort()

    def _forget_unsent(self) -> None:
        self._limits.unsent.give_back(self._unsent)
        self._unsent = 0
        if self._unsent_watch is not None:
            self._unsent_watch.cancel()
            self._unsent_watch = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._unset_keepalive_if_required()
        self._forget_unsent()
        for timer in (self._watch, self._pause):
            if timer is not None:
                timer.cancel()
        self.pipeline.clear()
        # Uvicorn informs only the latest request
        for cycle in self._open:
            cycle.disconnected = True
            cycle.message_event.set()
            cycle.scope["extensions"][DISCONNECT].notify()  # type: ignore[attr-defined]
        self._open.clear()
        super().connection_lost(exc)

    def _refuse(self, status: HTTPStatus) -> None:
        self._status = status
        raise _Refused

    def _stop_parsing(self) -> None:
        """Stop parsing after malformed bytes. Earlier requests are still answered, before the
        error."""
        if not self._in_body:
            text = SLOW_HEAD if self._status == HTTPStatus.REQUEST_TIMEOUT else b""
            self._final_answer = self._bare(self._status, text)
        else:
            self._final_answer = b""
            if not self.cycle.response_complete:
                self.cycle.scope["extensions"][BROKEN_BODY] = {}
                self.cycle.message_event.set()
        if not self._open:
            self._hang_up(self._final_answer)

    def _bare(self, status: HTTPStatus, text: bytes = b"") -> bytes:
        headers = [
            *self.server_state.default_headers,
            (b"content-length", b"%d" % len(text)),
            (b"connection", b"close"),
        ]
        if text:
            headers.append((b"content-type", b"text/plain; charset=utf-8"))
        lines = b"".join(b"%b: %b\r\n" % header for header in headers)
        return STATUS_LINE[status] + lines + b"\r\n" + text

    def _close(self) -> None:
        """Close after the last answer. While a body is still arriving, `on_response_complete` hangs
        up instead. Then the requests behind get no answer: their bodies are no longer parsed, so
        they would wait for ever."""
        if self._in_body and self._final_answer is None:
            self._final_answer = b""
            self.pipeline.clear()
            self._open = deque([self._open[0]])
        else:
            self.transport.close()

    def _hang_up(self, final_answer: bytes) -> None:
        """Write, and keep reading briefly: closing at once sends RST, and the client loses the
        answer."""
        self._unset_keepalive_if_required()
        self.transport.write(final_answer)
        # TLS cannot close one direction
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self.timeout_keep_alive_task = self.loop.call_later(
            LINGER_SECONDS, self.timeout_keep_alive_handler
        )
