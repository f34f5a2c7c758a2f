"""A server of which each route costs something known: `python -m tests.conformance.costly_app
DESCRIPTOR PORT`."""

import asyncio
import subprocess
import sys
import time

import uvicorn

from conformance.amplify.probe import watch

TAKEN_BYTES, ANSWER_BYTES, STALL_SECONDS = 100_000_000, 10_000_000, 0.2
# Others are let in again after that
CLOSED_SECONDS = 1.1
door = asyncio.Lock()
# A process that takes memory for a moment, for each line
CHILD = f"import sys\nfor line in sys.stdin: b'x' * {TAKEN_BYTES}; print(flush=True)"
child = subprocess.Popen(
    [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
)


async def costly(scope, receive, send):
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    body = b"{}"
    if scope["path"] == "/calm":
        async with door:
            pass
    elif scope["path"] == "/close":
        async with door:
            await asyncio.sleep(CLOSED_SECONDS)
    elif scope["path"] == "/child":
        child.stdin.write(b"\n")
        child.stdin.flush()
        child.stdout.readline()
    elif scope["path"] == "/memory":
        # Twice, for a moment
        bytes(bytearray(b"x" * (TAKEN_BYTES // 2)))
    elif scope["path"] == "/stall":
        burn()
    elif scope["path"] == "/wait":
        await asyncio.sleep(STALL_SECONDS)
    elif scope["path"] == "/answer":
        body = b"x" * ANSWER_BYTES
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def burn():
    """Take so much time of the processor, however busy it is."""
    began = time.thread_time()
    while time.thread_time() - began < STALL_SECONDS:
        pass


if __name__ == "__main__":
    watch(int(sys.argv[1]))
    uvicorn.run(costly, port=int(sys.argv[2]), log_level="warning")
