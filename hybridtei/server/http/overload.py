"""At capacity: what no permit could admit is refused before it has a task, and who asks again at once is read later.

While no permit is free for any model that a path can reach, the answer is known as soon as the head is. `Overload` reads the
head by the parser that reads all requests, checks the key and writes bytes that were prepared once for each route; the body is
dropped unread. What is not plain goes the ordinary way, which refuses once it has checked the key: bodies in chunks, or with
more than `SKIP_BYTES` to come; `Expect`, `Upgrade`, `Connection: close`, HTTP/1.0; a request behind one that is at work; a
client that does not read its answers.

Clients that ask again as soon as they are refused would fill the event loop with refusals. After a refusal a connection is read
again when permits are free, or `READ_LATER_SECONDS` later: a client that waits as long never notices. One that did not pause is
impatient until it does, and leaves a share of the permits to all others, so that those who wait before they ask again find one.
While there are such connections, so does every other that asks again as soon as it is answered, unless it has shown patience.
"""

from __future__ import annotations

import logging
from asyncio import AbstractEventLoop, TimerHandle
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, Literal

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from hybridtei.engine.admission import Admission
from hybridtei.errors import Overloaded
from hybridtei.server.http.connection import Refusals
from hybridtei.server.http.protocol import HEADER_COUNT_LIMIT, BoundedHttpProtocol
from hybridtei.server.http.security import Authenticator, Origins, Role

SKIP_BYTES = 65_536  # of a body, which come within `--header-timeout`
READ_LATER_SECONDS = 0.5
LATER_STEP_SECONDS = 0.05  # between two looks at who is to be read again: of many at once, each costs less
PAUSE_SECONDS = 0.75  # above the bound of reading later, below the second that a patient client waits
LOG_SECONDS = 1.0
SHARE_LEFT = 2  # one permit of so many is not given to the impatient: half of them keep an engine busy, and wait half as long
Headers = tuple[tuple[bytes, bytes], ...]
RETRY_AFTER = (b"retry-after", b"1")  # seconds, the least that the header can say
END = b"\r\n\r\n"
UNUSUAL = frozenset((b"transfer-encoding", b"expect", b"upgrade"))
REFUSED = "hybridtei.refused"  # in a scope's extensions: no permit was free

log = logging.getLogger(__name__)


def _left_to_others(admission: Admission) -> int:
    """How many permits the impatient leave."""
    return admission.permits // SHARE_LEFT


@dataclass(frozen=True, slots=True)
class Refusal:
    """What one path says at capacity: `body`, to who may use it by `role`. `headers`: beside those of every answer.
    `admissions`: of every model that it can reach. `count`: called for each refusal."""

    body: bytes
    headers: Headers
    role: Role | Literal["any"] | None
    admissions: Callable[[], Sequence[Admission]]
    count: Callable[[], object]

    def applies(self, *, impatient: bool = False) -> bool:
        """Whether no permit is free; to the `impatient`, none beyond the share of all others."""
        for one in self.admissions():  # noqa: SIM110 - every request comes here, and a generator takes twice as long
            if one.free > (_left_to_others(one) if impatient else 0):
                return False
        return True


class _Head:
    """One head, without its body."""

    def __init__(self, head: bytes) -> None:
        self.url = b""
        self.fields: dict[bytes, bytes] = {}  # the first of each name
        self._is_plain = False
        self._parser = httptools.HttpRequestParser(self)
        try:
            self._parser.feed_data(head)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._is_plain = False

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.fields.setdefault(name.lower(), value)

    def on_headers_complete(self) -> None:
        parser = self._parser
        self._is_plain = parser.get_method() == b"POST" and parser.get_http_version() == "1.1" and parser.should_keep_alive()

    @property
    def is_plain(self) -> bool:
        """Whether a request with this head can be refused by dropping as many bytes as it says."""
        return self._is_plain and UNUSUAL.isdisjoint(self.fields)

    @property
    def length(self) -> int:
        """Bytes of the body; the parser has seen that it is a number."""
        return int(self.fields.get(b"content-length", b"0"))


class Overload:
    """The refusals of one server at capacity. For one event loop."""

    def __init__(
        self,
        find: Callable[[str], Refusal | None],
        admissions: Callable[[], Sequence[Admission]],
        authenticator: Authenticator,
        refusals: Refusals,
        origins: Origins,
    ) -> None:
        """`find`: what a path says; None if nothing at it needs a permit. `admissions`: of all models."""
        self._find = find
        self._admissions = admissions
        self._authenticator = authenticator
        self._count = refusals.counter_of(Overloaded.limit)
        self._origins = origins
        self._answers: dict[tuple[bytes, Headers, bytes | None], bytes] = {}  # of this second, by its `date`
        self._dated: object = None
        self._later: deque[tuple[float, OverloadProtocol]] = deque()  # who is not read, and until when at most
        self._timer: TimerHandle | None = None
        self._unlogged = 0
        self._logging: TimerHandle | None = None

    @property
    def is_near(self) -> bool:
        """Whether some model may have no permit for somebody."""
        for one in self._admissions():  # noqa: SIM110 - as above
            if one.free <= _left_to_others(one):
                return True
        return False

    def refuse(self, connection: OverloadProtocol, data: bytes) -> int:
        """Refuse the request at the begin of `data`, if no permit is free for it; return how many bytes it takes, or 0."""
        end = data.find(END) + len(END)
        if end < len(END) or end > connection.max_head_bytes or data.count(b"\n", 0, end) - 2 > HEADER_COUNT_LIMIT:
            return 0
        head = _Head(data[:end])
        if not head.is_plain or end + head.length - len(data) > SKIP_BYTES:
            return 0
        refusal = self._find(head.url.partition(b"?")[0].decode("latin-1"))
        if refusal is None or not refusal.applies(impatient=connection.is_impatient(beside_others=bool(self._later))):
            return 0
        if not self._authenticator.allows(head.fields.get(b"authorization", b""), refusal.role):
            return 0
        connection.transport.write(self._answer(refusal, head.fields.get(b"origin"), connection.server_state.default_headers))
        refusal.count()
        self._count()
        self._log(connection.loop)
        for admission in refusal.admissions():
            if admission.freed is None:
                admission.freed = partial(self._freed, admission)
        return end + head.length

    def read_later(self, connection: OverloadProtocol, now: float) -> None:
        """Stop reading a connection until permits are free, for a while at most."""
        connection.stop_reading()
        loop = connection.loop
        self._later.append((now + READ_LATER_SECONDS, connection))
        if self._timer is None:
            self._timer = loop.call_later(READ_LATER_SECONDS, self._read_due, loop)

    def _read_due(self, loop: AbstractEventLoop) -> None:
        self._timer = None
        now = loop.time()
        while self._later and self._later[0][0] <= now:
            self._later.popleft()[1].read_again()
        if self._later:
            self._timer = loop.call_at(max(self._later[0][0], now + LATER_STEP_SECONDS), self._read_due, loop)

    def _freed(self, admission: Admission, permits: int) -> None:
        """Read on as many as may find one of the `permits` that came back. Who was refused last comes first, and is answered
        soonest; who waited longest is read in time anyway."""
        if self._later:
            for _ in range(min(permits, admission.free - _left_to_others(admission), len(self._later))):
                self._later.pop()[1].read_again()

    def _answer(self, refusal: Refusal, origin: bytes | None, default_headers: list[tuple[bytes, bytes]]) -> bytes:
        if default_headers is not self._dated:  # uvicorn makes them anew every second
            self._dated = default_headers
            self._answers.clear()
        key = refusal.body, refusal.headers, self._origins.allowed(origin)
        answer = self._answers.get(key)
        if answer is None:
            headers = [
                *default_headers,
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(refusal.body)),
                *refusal.headers,
                *self._origins.headers(origin),
            ]
            lines = b"".join([b"%b: %b\r\n" % header for header in headers])
            answer = self._answers[key] = b"%b%b\r\n%b" % (STATUS_LINE[HTTPStatus.TOO_MANY_REQUESTS], lines, refusal.body)
        return answer

    def _log(self, loop: AbstractEventLoop) -> None:
        """The first refusal at once, those of the next second together: a line for each would cost more than to refuse."""
        if self._logging is not None:
            self._unlogged += 1
            return
        log.error("%s (errors.md#overloaded)", Overloaded())
        self._logging = loop.call_later(LOG_SECONDS, self._log_rest, loop)

    def _log_rest(self, loop: AbstractEventLoop) -> None:
        self._logging = None
        if self._unlogged:
            log.error("%s: %d more requests were refused within %g s", Overloaded(), self._unlogged, LOG_SECONDS)
            self._unlogged = 0
            self._logging = loop.call_later(LOG_SECONDS, self._log_rest, loop)


class OverloadProtocol(BoundedHttpProtocol):
    """The protocol of one connection to a server that refuses at capacity."""

    def __init__(self, *args: Any, overload: Overload, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._overload = overload
        self.max_head_bytes = self._limits.head_bytes
        self._patience: bool | None = None  # that it showed after its last refusal, or by any pause since
        self._waits = False  # for its turn to be read
        self._kept = b""  # what was read before it had to wait
        self._skip = 0  # bytes of a refused body, still to come
        self._was_refused = False  # by the last answer
        self._answered: float | None = None  # when its last answer was complete
        self._refused = 0.0  # when it was refused here

    def data_received(self, data: bytes) -> None:
        if self._waits or self._kept:
            self._kept += data
            if self._waits:  # a request behind the refused one has had its body read, or was answered
                self.flow.pause_reading()
            return
        if self._skip:
            data = self._skipped(data)
            if not data:
                return
        if not (self._open or self._in_body or self._head_begun or self._eventless_bytes) and self._final_answer is None:
            self._judge()
            if self._overload.is_near and not self.flow.write_paused:
                size = self._overload.refuse(self, data)
                if size:
                    self._refused_now(data, size)
                    return
        super().data_received(data)

    def _skipped(self, data: bytes) -> bytes:
        skipped = min(self._skip, len(data))
        self._skip -= skipped
        if not self._skip:
            self._head_since = None
        return data[skipped:]

    def _judge(self) -> None:
        """Whether the client paused since its last answer."""
        if self._answered is not None and self.loop.time() - self._answered >= PAUSE_SECONDS:
            self._patience = True
        elif self._was_refused:
            self._patience = False
        self._was_refused = False

    def is_impatient(self, *, beside_others: bool) -> bool:
        """Whether it should leave permits to others; `beside_others`: that were just refused."""
        return self._patience is False or (beside_others and self._patience is None and self._answered is not None)

    def _refused_now(self, data: bytes, size: int) -> None:
        """After a refusal of the first `size` bytes, of which `data` may hold more or fewer."""
        self._refused = self.loop.time()
        self._kept = data[size:]
        self._skip = max(0, size - len(data))
        self._head_since = self._refused if self._skip else None
        if self._skip:
            self._watch_deadline()
        if self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
        self._asks_later(self._refused)
        if self._kept and not self._waits:
            self.loop.call_soon(self._read_kept)

    def _asks_later(self, now: float) -> None:
        self._was_refused = True
        self._answered = now
        if not self._waits and self._overload.is_near and not self.transport.is_closing():
            self._overload.read_later(self, now)

    def stop_reading(self) -> None:
        """Until `read_again`."""
        self._waits = True
        self.flow.pause_reading()

    def read_again(self) -> None:
        """Read on."""
        self._waits = False
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self._kept:
            self.loop.call_soon(self._read_kept)

    def _read_kept(self) -> None:
        data, self._kept = self._kept, b""
        if data and not self.transport.is_closing():
            self.data_received(data)

    def on_response_complete(self) -> None:
        refused = bool(self._open) and REFUSED in (self._open[0].scope.get("extensions") or ())
        super().on_response_complete()
        self._answered = self.loop.time()
        if refused and self._final_answer is None:
            self._asks_later(self._answered)

    def timeout_keep_alive_handler(self) -> None:
        """A refusal counts as use of the connection, and sets no timer of its own."""
        left = self._refused + self.timeout_keep_alive - self.loop.time()
        if self._refused and left > 0 and self._final_answer is None and not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_later(left, self.timeout_keep_alive_handler)
        else:
            super().timeout_keep_alive_handler()

    def connection_lost(self, exc: Exception | None) -> None:
        self._kept = b""
        super().connection_lost(exc)
