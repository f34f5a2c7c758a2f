"""A request -> a server's answer, byte for byte: no redirects, no decoding, headers as received."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

from conformance.wire.case import Question, filled

TIMEOUT = 60


@dataclass(frozen=True)
class Answer:
    """Status, headers by lower-case name (the last of each), body."""

    status: int
    headers: dict[str, str]
    body: bytes
    request: str
    # Asks the same server something else
    again: Callable[[Question], Answer] | None = None

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")

    @property
    def data(self) -> Any:
        """Raises ValueError."""
        return json.loads(self.body)


def ask(url: str, question: Question, key: str | None = None) -> Answer:
    """`url`: of the server; `key`: sent along where the question names no authorization."""
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    if question.raw is not None:
        return _ask_raw(host, port, filled(question.raw, question.fill))
    method, _, path = filled(question.request, question.fill).partition(" ")
    headers = {} if question.body is None else {"content-type": "application/json"}
    headers |= {} if key is None else {"authorization": f"Bearer {key}"}
    headers |= {name.lower(): value for name, value in question.headers.items()}
    connection = HTTPConnection(host, port, timeout=TIMEOUT)
    connection.putrequest(method, path, skip_accept_encoding=True)
    for name, value in headers.items():
        if value:
            connection.putheader(name, value)
    body = None if question.body is None else filled(question.body, question.fill).encode()
    if body is not None:
        connection.putheader("content-length", str(len(body)))
    try:
        connection.endheaders(body)
        return _read(connection.getresponse(), question.request)
    finally:
        connection.close()


def _ask_raw(host: str, port: int, raw: str) -> Answer:
    with socket.create_connection((host, port), timeout=TIMEOUT) as connection:
        connection.sendall(raw.replace("\r\n", "\n").replace("\n", "\r\n").encode())
        response = HTTPResponse(connection, method=raw.split(" ", 1)[0])
        response.begin()
        return _read(response, raw.split("\n", 1)[0].strip())


def _read(response: HTTPResponse, request: str) -> Answer:
    body = response.read()
    return Answer(
        response.status,
        {name.lower(): value for name, value in response.getheaders()},
        body,
        request,
    )
