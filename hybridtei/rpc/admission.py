"""Permits that may be waited for: streams and reranking wait, whoever else comes to a full house is told so at once.

Whoever has waited carries its permits into the tasks it starts, so that the same routes serve both. Those who wait leave a
share to those who cannot, or one stream of many messages would keep everybody else out.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from urllib.parse import unquote

from hybridtei.engine.admission import Admission

RESERVE = 8  # of so many permits, one is not given to those who wait
GATHERERS = 16  # of so many permits, one may be held by a call that still reads its inputs

_carried: ContextVar[int] = ContextVar("carried_permits", default=0)


@dataclass(slots=True, eq=False)
class _Waiter:
    lacking: int
    served: asyncio.Future[None]


class PatientAdmission(Admission):
    """Used from the event loop's thread. First come, first served; the first in line gathers what others give back."""

    def __init__(self, permits: int) -> None:
        super().__init__(permits)
        self._reserve = permits // RESERVE
        self._most = permits - self._reserve
        self._waiting: deque[_Waiter] = deque()
        self.gathering = asyncio.Semaphore(max(permits // GATHERERS, 1))  # calls that keep inputs before they are ranked

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @contextmanager
    def inside(self, inputs: int, *, turns: bool = False) -> Iterator[None]:
        """See `Admission.inside`; whoever carries enough takes none."""
        if inputs <= _carried.get():
            yield
            return
        try:
            with super().inside(inputs, turns=turns):
                yield
        finally:
            self._serve()

    async def wait(self, inputs: int) -> int:
        """Take a permit an input, as soon as there are so many; -> how many: never more than those who wait may have."""
        inputs = min(inputs, self._most)
        waiter = _Waiter(inputs, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._serve()
        try:
            await waiter.served
        except asyncio.CancelledError:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            self.give_back(inputs - waiter.lacking)
            raise
        return inputs

    def give_back(self, permits: int) -> None:
        """What `wait` took."""
        self._free += permits
        self._serve()

    @asynccontextmanager
    async def held(self, inputs: int) -> AsyncIterator[None]:
        """Wait, and carry the permits within."""
        permits = await self.wait(inputs)
        try:
            with carrying(inputs):
                yield
        finally:
            self.give_back(permits)

    def _serve(self) -> None:
        while self._waiting and self._free > self._reserve:
            first = self._waiting[0]
            given = min(first.lacking, self._free - self._reserve)
            self._free -= given
            first.lacking -= given
            if first.lacking == 0:
                self._waiting.popleft()
                if not first.served.done():
                    first.served.set_result(None)


@contextmanager
def carrying(inputs: int) -> Iterator[None]:
    """So many inputs within, and in tasks started there, need no permits of their own."""
    before = _carried.set(inputs)
    try:
        yield
    finally:
        _carried.reset(before)


OPEN_FILES = "/dev/fd"  # of this process, on Linux and macOS
Address = tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]


def close(peer: str) -> None:
    """Close the connection from `peer`, as gRPC writes it (`ipv4:127.0.0.1:1234`). It takes 3 µs for each file that is open."""
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    wanted = _address(host.strip("[]"), int(port))
    for one in _connections():
        with suppress(OSError):  # it has no other side, or none any more
            if _address(*one.getpeername()[:2]) == wanted:
                one.shutdown(socket.SHUT_RDWR)  # gRPC notices, and closes its own


def _address(host: str, port: int) -> Address:
    """What IPv6 calls an address of IPv4 is that address."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address, port


def _connections() -> Iterator[socket.socket]:
    """The process's sockets, each under a number that is ours while it is looked at."""
    for name in os.listdir(OPEN_FILES):
        try:
            number = os.dup(int(name))
        except OSError:
            continue
        try:
            one = socket.socket(fileno=number)
        except OSError:  # another kind of file
            os.close(number)
            continue
        with one:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                yield one
