"""Bytes to a server and from it, as they are."""

import socket
from contextlib import contextmanager

from tests.server.live import HANG

BODY = b'{"inputs":"one two"}'
POST = b"POST /embed HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
WHOLE = POST + b"content-length: 20\r\n\r\n" + BODY
LAST = POST + b"connection: close\r\ncontent-length: 20\r\n\r\n" + BODY
GET = b"GET /health HTTP/1.1\r\nhost: x\r\n"
CLOSE = b"connection: close\r\n\r\n"
Answer = tuple[int, dict[bytes, bytes], bytes]


@contextmanager
def connected(running):
    with socket.create_connection(("127.0.0.1", running.port), timeout=HANG) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield client


def told(running, *parts):
    """Everything the server says until it closes."""
    with connected(running) as client:
        for part in parts:
            client.sendall(part)
        return heard(client)


def heard(client):
    said = b"".join(iter(lambda: client.recv(1 << 16), b""))
    found = []
    while said:
        head, _, said = said.partition(b"\r\n\r\n")
        status, *lines = head.split(b"\r\n")
        headers = dict(line.split(b": ", 1) for line in lines)
        length = int(headers[b"content-length"])
        found.append((int(status.split()[1]), headers, said[:length]))
        said = said[length:]
    return found


def statuses(answers):
    return [status for status, _, _ in answers]


def fields(count):
    return b"a: b\r\n" * count
