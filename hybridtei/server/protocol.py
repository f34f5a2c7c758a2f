"""Bytes on a connection -> requests: uvicorn's HTTP/1.1, with bounds, and with what hyper (TEI's) says to what is not HTTP.

A head beyond the bounds, or malformed, is answered here with a bare status, and costs no more than the bytes read until then.
A surprise of the parser underneath: it gathers an unfinished header or chunk extension without a word to anyone and without
end, so bytes that are read without any event are counted too.

A client that shuts down its sending side is taken for gone, as hyper does: the same FIN ends a connection, and who really
left would be noticed only once the answer is written, with the work done for nobody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

HEADER_COUNT_LIMIT = 100  # hyper's
HEAD_LIMIT_BYTES = 64 * 1024  # URL and headers; clients send some hundred bytes, proxies with cookies and traces a few kB
URL_LIMIT_BYTES = 65_534  # hyper's
PIPELINE_LIMIT = 16  # so many requests wait behind the one at work before reading pauses; a paused client's end goes unnoticed
LINGER_SECONDS = 1.0  # how long a refused client may go on sending; a close in its face would destroy the answer
HEADER_OVERHEAD_BYTES = 4  # colon, space, line end
CONTINUE = b"HTTP/1.1 100 "
VERSIONS = ("1.0", "1.1")  # the parser would take 0.9 and 2.0 in the same clothes
# In a scope's extensions: no more of the body will come, and its client still listens; and a Departure.
BROKEN_BODY, DEPARTURE = "hybridtei.broken_body", "hybridtei.departure"


class Departure:
    """Whether a request's client went away before its answer; `tell` is called when it does."""

    __slots__ = ("happened", "tell")

    def __init__(self) -> None:
        self.happened = False
        self.tell: Callable[[], object] | None = None

    def happens(self) -> None:
        self.happened = True
        if self.tell is not None:
            self.tell()


class _Gathered:
    """A transport for one answer, whose head waits for its body: one packet and one system call, where upstream takes two.

    Waking a client costs as much as all the Python of a short request, and it can do nothing with a head alone.
    """

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._parts: list[bytes] = []
        self.is_closing = transport.is_closing

    def write(self, data: bytes) -> None:
        if data.startswith(CONTINUE):  # no part of the answer: the client waits for it before it sends its body
            self._transport.write(data)
        else:
            self._parts.append(data)

    def flush(self) -> None:
        if self._parts:
            self._transport.writelines(self._parts)
            self._parts.clear()

    def close(self) -> None:
        self.flush()
        self._transport.close()


class _Refused(Exception):
    """Stops the parser."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._open: deque[RequestResponseCycle] = deque()  # requests not yet answered, the oldest first
        self._in_body = False
        self._fields = 0
        self._field_bytes = 0
        self._silent_bytes = 0
        self._heard = False
        self._status = HTTPStatus.BAD_REQUEST
        self._last_words: bytes | None = None  # once set, nothing more is parsed

    def data_received(self, data: bytes) -> None:
        if self._last_words is not None:
            return
        self._unset_keepalive_if_required()
        self._heard = False
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._stop_parsing()
            return
        self._silent_bytes = 0 if self._heard else self._silent_bytes + len(data)
        if self._silent_bytes > HEAD_LIMIT_BYTES:
            self._status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
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
        self.scope["extensions"] = {DEPARTURE: Departure()}  # type: ignore[dict-item]
        self._fields = self._field_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._heard = True
        super().on_url(url)
        self._field_bytes += len(url)
        if len(self.url) > URL_LIMIT_BYTES:
            self._refuse(HTTPStatus.REQUEST_URI_TOO_LONG)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._heard = True
        self._fields += 1
        self._field_bytes += len(name) + len(value) + HEADER_OVERHEAD_BYTES
        if self._fields > HEADER_COUNT_LIMIT or self._field_bytes > HEAD_LIMIT_BYTES:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        if not self._in_body:  # trailers are no headers
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._heard = True
        if self._is_offer():
            return
        if self.parser.get_http_version() not in VERSIONS:
            self._refuse(HTTPStatus.BAD_REQUEST)
        super().on_headers_complete()
        self._in_body = True
        self._fields = self._field_bytes = 0  # trailers may come
        self.cycle.transport = _Gathered(self.transport)  # type: ignore[assignment]
        self._open.append(self.cycle)
        if 0 < len(self.pipeline) < PIPELINE_LIMIT:
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._heard = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._heard = True
        if self._is_offer():
            return
        self._in_body = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._open:
            self._open.popleft().transport.flush()  # type: ignore[attr-defined]
        super().on_response_complete()
        if self._last_words is not None and not self._open and not self.transport.is_closing():
            self._hang_up(self._last_words)

    def connection_lost(self, exc: Exception | None) -> None:
        self.pipeline.clear()
        for cycle in self._open:  # upstream tells only the one that came last
            cycle.disconnected = True
            cycle.message_event.set()
            cycle.scope["extensions"][DEPARTURE].happens()  # type: ignore[attr-defined]
        self._open.clear()
        super().connection_lost(exc)

    def _is_offer(self) -> bool:
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _refuse(self, status: HTTPStatus) -> None:
        self._status = status
        raise _Refused

    def _stop_parsing(self) -> None:
        """Nothing more can be understood. Requests that came before are still answered, and first."""
        if not self._in_body:
            self._last_words = self._bare(self._status)
        else:
            self._last_words = b""
            if not self.cycle.response_complete:
                self.cycle.scope["extensions"][BROKEN_BODY] = {}
                self.cycle.message_event.set()
        if not self._open:
            self._hang_up(self._last_words)

    def _bare(self, status: HTTPStatus) -> bytes:
        headers = [*self.server_state.default_headers, (b"content-length", b"0"), (b"connection", b"close")]
        return STATUS_LINE[status] + b"".join(b"%b: %b\r\n" % header for header in headers) + b"\r\n"

    def _hang_up(self, last_words: bytes) -> None:
        self._unset_keepalive_if_required()
        self.transport.write(last_words)
        self.transport.write_eof()
        self.flow.resume_reading()
        self.timeout_keep_alive_task = self.loop.call_later(LINGER_SECONDS, self.timeout_keep_alive_handler)
