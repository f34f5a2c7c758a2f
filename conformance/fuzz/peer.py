"""A connection of the fuzzer: sends a shot, reads strict HTTP/1.1, and distinguishes a hang from a
wait.

Has its own reader, since HTTP libraries accept answers that should be findings.
"""

import asyncio
import socket
import struct

from conformance.fuzz.heads import UNKNOWN
from conformance.fuzz.shot import Outcome, Reply, Shot

HANG_SECONDS = 20.0
# After which nothing more is expected of bytes that may be no request
SILENCE_SECONDS = 0.3
READ_LIMIT = 2**20
BODILESS = frozenset({204, 304})


class Malformed(Exception):
    """The server's bytes are not HTTP."""


class Peer:
    """One connection at a time, opened when needed and kept until the server closes it."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, shot: Shot) -> Outcome:
        """Send a shot and read what it brings. A kept connection that the server has just closed is
        opened again, once."""
        kept = self._reader is not None
        outcome = await self._ask(shot)
        if (
            kept
            and outcome.closed
            and not outcome.replies
            and not outcome.hung
            and shot.answers > 0
        ):
            outcome = await self._ask(shot)
        return outcome

    async def _ask(self, shot: Shot) -> Outcome:
        outcome = Outcome()
        try:
            async with asyncio.timeout(HANG_SECONDS):
                await self._open()
                await self._send(shot)
                if shot.leaves:
                    self._abort()
                    return outcome
                await self._read(shot, outcome)
        except TimeoutError:
            outcome.hung = True
        except (ConnectionError, asyncio.IncompleteReadError):
            outcome.closed = True
        except (Malformed, ValueError, asyncio.LimitOverrunError) as error:
            outcome.broken = f"{type(error).__name__}: {error}"
        ended = (
            outcome.replies and outcome.replies[-1].headers.get("connection", "").lower() == "close"
        )
        if outcome.hung or outcome.closed or outcome.broken or ended or shot.answers == UNKNOWN:
            self.close()
        return outcome

    async def _read(self, shot: Shot, outcome: Outcome) -> None:
        while shot.answers == UNKNOWN or len(outcome.replies) < shot.answers:
            if shot.answers != UNKNOWN:
                reply = await self._reply(len(outcome.replies) in shot.heads)
            else:
                try:
                    async with asyncio.timeout(SILENCE_SECONDS):
                        reply = await self._reply(head_only=False)
                except TimeoutError:
                    await self._until_closed(outcome)
                    return
            if reply.status >= 200:
                outcome.replies.append(reply)

    async def _until_closed(self, outcome: Outcome) -> None:
        """Say that nothing more comes: the server has to end it. What it says meanwhile may begin
        in the middle."""
        assert self._reader is not None
        assert self._writer is not None
        self._writer.write_eof()
        rest = await self._reader.read(-1)
        outcome.closed = True
        if rest.startswith(b"HTTP/1.1 5"):
            outcome.replies.append(Reply(int(rest[9:12]), {}, rest))

    async def _open(self) -> None:
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(
                self._host, self._port, limit=READ_LIMIT
            )

    async def _send(self, shot: Shot) -> None:
        assert self._writer is not None
        for place, piece in enumerate(shot.pieces):
            if place:
                # Else packets would be joined
                await asyncio.sleep(0.002)
            self._writer.write(piece)
        if len(piece) > 60_000:
            sending = asyncio.ensure_future(self._writer.drain())
            # The server may refuse, and read no further
            await asyncio.wait({sending}, timeout=5)
            if not sending.done():
                sending.cancel()
            # What it says of the connection, reading will say too
            await asyncio.gather(sending, return_exceptions=True)

    async def _reply(self, head_only: bool) -> Reply:
        assert self._reader is not None
        head = await self._reader.readuntil(b"\r\n\r\n")
        lines = head[:-4].split(b"\r\n")
        version, _, rest = lines[0].partition(b" ")
        if version != b"HTTP/1.1" or not rest[:3].isdigit():
            raise Malformed(f"status line {lines[0][:100]!r}")
        headers = {}
        for line in lines[1:]:
            name, colon, value = line.partition(b":")
            if not colon:
                raise Malformed(f"header {line[:100]!r}")
            headers[name.decode("latin-1").lower()] = value.strip().decode("latin-1")
        status = int(rest[:3])
        if head_only or status < 200 or status in BODILESS:
            return Reply(status, headers, b"")
        if headers.get("transfer-encoding") == "chunked":
            return Reply(status, headers, await self._chunks())
        if "content-length" not in headers:
            raise Malformed(f"{status} without a length")
        return Reply(
            status, headers, await self._reader.readexactly(int(headers["content-length"]))
        )

    async def _chunks(self) -> bytes:
        assert self._reader is not None
        parts = []
        while size := int((await self._reader.readuntil(b"\r\n")).strip(), 16):
            parts.append((await self._reader.readexactly(size + 2))[:-2])
        await self._reader.readexactly(2)
        return b"".join(parts)

    def _abort(self) -> None:
        """Reset the connection."""
        assert self._writer is not None
        plug = self._writer.get_extra_info("socket")
        plug.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None
