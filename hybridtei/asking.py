"""Requests to a server: which inputs go into one, how it is sent again, and what its answer means.

Each step is a coroutine. `Blocking` has them over a transport that blocks, so that each ends without waiting.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar, cast

import httpx
import orjson

from hybridtei import errors
from hybridtei.errors import BackendError, HybridTeiError, InvalidInput, NoAnswer
from hybridtei.system.retries import Retries, retry_after_s

T = TypeVar("T")
REQUEST_BYTES = 1_000_000  # half of what a server takes by default
BODY_TOO_LARGE = b"Failed to buffer the request body: length limit exceeded"  # the server's and TEI's, as plain text with 413
SHOWN_CHARACTERS = 300  # of a response, in an error
REQUESTS_AT_ONCE = 4
URL = re.compile(r"https?://([^/\s@]+@)?(\[[\da-fA-F:.]+\]|[^/\s:@\[\]]+)(:\d{1,5})?(/\S*)?")
RETRIED = frozenset({408, 429, 500, 502, 503, 504})
HEADERS = {"accept": "application/json", "content-type": "application/json"}
HELP = re.compile(r"/errors\.html#(\w+)>")  # in the header `link` of errors of routes that are not TEI's
NAMED = {
    name.lower(): kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, HybridTeiError)
}
KINDS: Mapping[tuple[int, str | None], type[HybridTeiError]] = {
    (400, "Empty"): errors.EmptyInput,
    (413, "Validation"): InvalidInput,
    (422, "Validation"): InvalidInput,
    (422, "Tokenizer"): errors.TokenizerError,
    (424, "Backend"): BackendError,
    (401, None): errors.NoKey,
}


def portions(items: Sequence[Any], most: int) -> Iterator[list[Any]]:
    """Lists of at most `most` items, or rows of spans, and REQUEST_BYTES; an item that is larger stands alone."""
    portion: list[Any] = []
    size = rows = 0
    for place, item in enumerate(items):
        try:
            bytes_here = len(orjson.dumps(item))
        except TypeError as error:
            raise InvalidInput(f"item {place} is no JSON: {error}") from None
        rows_here = len(item.get("spans", ".")) if isinstance(item, Mapping) else 1
        if portion and (size + bytes_here > REQUEST_BYTES or rows + rows_here > most):
            yield portion
            portion, size, rows = [], 0, 0
        portion.append(item)
        size, rows = size + bytes_here, rows + rows_here
    if portion:
        yield portion


class Answer(NamedTuple):
    """A response."""

    status: int
    headers: httpx.Headers
    content: bytes

    def read(self, where: str) -> Any:
        """The decoded body. Raises the error that the server names, NoAnswer if it is another program's answer."""
        try:
            decoded = orjson.loads(self.content)
        except ValueError:
            decoded = None
        if self.status == 200 and decoded is not None:
            return decoded
        fields = decoded if isinstance(decoded, dict) else {}
        named = HELP.search(self.headers.get("link", ""))
        kind = NAMED.get(named[1], InvalidInput) if named else KINDS.get((self.status, fields.get("error_type")))
        if self.status == 413 and self.content.startswith(BODY_TOO_LARGE):
            kind = InvalidInput
        message = f"{where}: status {self.status}: {fields.get('error') or fields.get('message') or self.shown}"
        if kind is None:
            raise NoAnswer(message, self.status)
        raise kind.__new__(kind, message)  # some classes make the message themselves

    @property
    def shown(self) -> str:
        """The beginning of the text, for an error, after the target of a redirection."""
        target = f"to {self.headers['location']}: " if "location" in self.headers else ""
        return (target + " ".join(self.content.decode(errors="replace").split()))[:SHOWN_CHARACTERS]


class Asking:
    """A server by its URL. See `AsyncClient`."""

    def __init__(self, url: str, *, api_key: str | None, timeout_s: float, patience_s: float, transport: Any = None) -> None:
        self.url = url.rstrip("/")
        if URL.fullmatch(self.url) is None:
            raise InvalidInput(f"{url!r} is no URL of a server; it should be like http://127.0.0.1:3000")
        self._timeout_s, self._patience_s = timeout_s, patience_s
        headers = HEADERS | ({"authorization": f"Bearer {api_key}"} if api_key else {})
        self._open(headers=headers, timeout=timeout_s, transport=transport)

    async def asked(self, path: str, body: Any = None) -> Any:
        """The decoded answer to a GET, or to a POST of `body`, retried. Raises HybridTeiError."""
        where, retries = self.url + path, Retries(self._patience_s)
        try:
            content = None if body is None else orjson.dumps(body)
        except TypeError as error:
            raise InvalidInput(f"{where}: the request is no JSON: {error}") from None
        while True:
            asked_s = None
            try:
                answer = await self._send("GET" if content is None else "POST", where, content)
                if answer.status not in RETRIED:
                    return answer.read(where)
                failure, asked_s = f"status {answer.status}: {answer.shown}", retry_after_s(answer.headers)
            except (httpx.RequestError, TimeoutError) as error:
                failure = f"{type(error).__name__}: {error}" if str(error) else f"nothing came for {self._timeout_s:g} s"
            if (pause_s := retries.pause_s(asked_s)) is None:
                tries = "1 try" if retries.tries == 1 else f"{retries.tries} tries"
                raise NoAnswer(f"{where}: no answer within {self._patience_s:g} s, {tries}; the last: {failure}")
            await self._sleep(pause_s)

    def _open(self, **settings: Any) -> None:
        self._http: Any = httpx.AsyncClient(**settings)
        self._turn = asyncio.Semaphore(REQUESTS_AT_ONCE)

    async def all_asked(self, asks: Sequence[tuple[str, Any]]) -> list[Any]:
        """The answers to several, a few at once."""
        tasks = [asyncio.ensure_future(self.asked(*ask)) for ask in asks]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _send(self, method: str, url: str, content: bytes | None) -> Answer:
        async with self._turn, asyncio.timeout(self._timeout_s):
            answer = await self._http.request(method, url, content=content)
        return Answer(answer.status_code, answer.headers, answer.content)

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class Blocking(Asking):
    """The same over a transport that blocks: none of its coroutines ever waits."""

    def _open(self, **settings: Any) -> None:
        self._http = httpx.Client(**settings)

    async def all_asked(self, asks: Sequence[tuple[str, Any]]) -> list[Any]:
        if len(asks) == 1:
            return [await self.asked(*asks[0])]
        with ThreadPoolExecutor(REQUESTS_AT_ONCE, thread_name_prefix="client") as threads:
            return list(threads.map(lambda ask: finished(self.asked(*ask)), asks))  # an error cancels those that wait

    async def _send(self, method: str, url: str, content: bytes | None) -> Answer:
        end_s, body = time.monotonic() + self._timeout_s, bytearray()
        with self._http.stream(method, url, content=content) as answer:
            for part in answer.iter_bytes():
                body += part
                if time.monotonic() > end_s:
                    raise TimeoutError
        return Answer(answer.status_code, answer.headers, bytes(body))

    async def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def finished(verb: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits."""
    try:
        verb.send(None)
    except StopIteration as end:
        return cast(T, end.value)
    raise AssertionError("a blocking client waited")
