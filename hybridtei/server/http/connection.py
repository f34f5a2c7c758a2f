"""What the protocol tells the application about a request's client: whether it went away, and whether its body can still come.
And the transport that an answer is written to.

The former stands in a scope's extensions, because ASGI servers tell of a disconnect only to whoever waits in `receive`.
"""

from __future__ import annotations

import socket
from asyncio import Transport
from collections.abc import Callable
from typing import Any

# In a scope's extensions: no more of the body will come, and its client still listens; it came too slowly; and a Disconnect.
BROKEN_BODY, SLOW_BODY, DISCONNECT = "hybridtei.broken_body", "hybridtei.slow_body", "hybridtei.disconnect"
CONTINUE = b"HTTP/1.1 100 "
CROWD = 8  # requests at work; beyond, a client may well be gone by the time it is its turn
TCP_INFO = getattr(socket, "TCP_INFO", None)  # of which the first byte is the connection's state, on Linux
CLOSED_STATES = (b"\x07", b"\x08")  # reset by the other side, or it has sent all that it ever will: CLOSE, CLOSE_WAIT


class ClientDisconnected(Exception):
    """The client went away, so that no answer is needed."""


def is_disconnected(transport: Transport) -> bool:
    """Whether a client closed its side already, with its end still to be read. False where the system does not say.

    Of a thousand clients that sent something and went away, the event loop hears of each request before it hears of its end,
    and whoever comes next would wait until all of them were begun. To ask takes some microseconds.
    """
    if TCP_INFO is None:
        return False
    try:
        return transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, TCP_INFO, 1) in CLOSED_STATES
    except (OSError, AttributeError):
        return False


class Disconnect:
    """Whether a request's client went away before its answer. `on_disconnect` is called when it does. `crowd`: how many
    requests were at work when this one came, at `transport`."""

    __slots__ = ("_transport", "crowd", "happened", "on_disconnect")

    def __init__(self, crowd: int = 0, transport: Transport | None = None) -> None:
        self.crowd = crowd
        self._transport = transport
        self.happened = False
        self.on_disconnect: Callable[[], object] | None = None

    def is_known(self) -> bool:
        """Whether it has happened, even if the event loop has not heard of it; asked only in a crowd, where it pays."""
        return self.crowd > CROWD and (self.happened or (self._transport is not None and is_disconnected(self._transport)))

    def notify(self) -> None:
        """Note that it happened, and call `on_disconnect`."""
        self.happened = True
        if self.on_disconnect is not None:
            self.on_disconnect()


class GatheredTransport:
    """A transport for one answer, whose head waits for its body: one packet and one system call, where upstream takes two.

    Waking a client costs as much as all the Python of a short request, and it can do nothing with a head alone.
    """

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._parts: list[bytes | memoryview] = []
        self.is_closing = transport.is_closing

    def write(self, data: bytes | memoryview) -> None:
        if isinstance(data, memoryview):  # a slice of a large body, as `edge` sends it
            self._parts.append(data)
            self.flush()
        elif data.startswith(CONTINUE):  # no part of the answer: the client waits for it before it sends its body
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
