"""HTTP on asyncio streams: thousands of clients in one process, also faulty ones that no library allows."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import orjson

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: a close that sends RST


@dataclass(frozen=True, slots=True)
class Answer:
    """`seconds`: from the first byte sent to the last received, connecting included where it was opened for this."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    seconds: float


@dataclass(frozen=True, slots=True)
class Address:
    """A server's address, and the key."""

    host: str
    port: int
    api_key: str | None = None


def request(address: Address, path: str, body: Any = None) -> bytes:
    """A whole request: POST of JSON, or GET where there is no body."""
    content = b"" if body is None else orjson.dumps(body)
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", f"host: {address.host}"]
    if body is not None:
        lines += ["content-type: application/json", f"content-length: {len(content)}"]
    if address.api_key is not None:
        lines.append(f"authorization: Bearer {address.api_key}")
    return "\r\n".join([*lines, "", ""]).encode() + content


class Connection:
    """One keep-alive connection, a request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @property
    def ended(self) -> bool:
        """Whether the server has closed it."""
        return self._reader.at_eof() or self._writer.transport.is_closing()

    def send(self, data: bytes) -> None:
        if not self.ended:
            self._writer.write(data)

    async def answer(self, began: float) -> Answer:
        """The next one. Raises asyncio.IncompleteReadError or OSError if the server ends first."""
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.split("\r\n")[:-2]
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = await self._reader.readexactly(int(headers.get("content-length", 0)))
        return Answer(int(first.split()[1]), headers, body, time.perf_counter() - began)

    async def ask(self, data: bytes) -> Answer:
        """Send, and wait for the answer."""
        began = time.perf_counter()
        self.send(data)
        return await self.answer(began)

    def drop(self, *, reset: bool = False) -> None:
        """Disconnect, in order or by a reset."""
        end: Any = self._writer.get_extra_info("socket")
        if reset and end is not None:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self._writer.transport.abort()


async def connect(address: Address) -> Connection:
    return Connection(*await asyncio.open_connection(address.host, address.port))


@asynccontextmanager
async def connected(address: Address) -> AsyncIterator[Connection]:
    connection = await connect(address)
    try:
        yield connection
    finally:
        connection.drop()


async def ask(address: Address, path: str, body: Any = None) -> Answer:
    """On a connection of its own, whose opening counts."""
    began = time.perf_counter()
    async with connected(address) as connection:
        connection.send(request(address, path, body))
        return await connection.answer(began)
