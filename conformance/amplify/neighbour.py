"""Another client of a measured server: `python -m conformance.amplify.neighbour PORT REQUEST`.

From the line `begin` on it sends a small request again and again, each after the answer to the one
before, until the line `end`; then it prints the longest time to an answer, and the number of
refusals for want of permits. It asks again after a 503 or a lost connection, and the time goes on:
a server keeps a share of its bytes for small requests.
"""

import json
import select
import sys
import time
from http.client import HTTPConnection, HTTPException

from conformance.amplify.request import Request

PAUSE_SECONDS = 0.05
# That a server may take for an answer, before its bound is exceeded many times
TIMEOUT_SECONDS = 60.0
NO_PERMIT, NO_ROOM = 429, 503


class Neighbour:
    """A client with one connection at a time."""

    def __init__(self, port: int, request: Request) -> None:
        self._connection = HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_SECONDS)
        self._request, self._body = request, request.content()

    def wait(self) -> tuple[float, int]:
        """Seconds until an answer other than 503, and its status; 0 if none came in time."""
        began, status = time.perf_counter(), 0
        while (seconds := time.perf_counter() - began) < TIMEOUT_SECONDS:
            status = self._status()
            if status not in (0, NO_ROOM):
                return time.perf_counter() - began, status
            time.sleep(PAUSE_SECONDS)
        return seconds, status

    def _status(self) -> int:
        headers = {"content-type": "application/json"}
        try:
            self._connection.request(
                self._request.method, self._request.path, self._body or None, headers
            )
            answer = self._connection.getresponse()
            answer.read()
        except (HTTPException, OSError):
            self._connection.close()
            return 0
        return answer.status


def main() -> int:
    neighbour = Neighbour(int(sys.argv[1]), Request.read(sys.argv[2]))
    neighbour.wait()
    print(json.dumps("ready"), flush=True)
    asking, longest, refused = False, 0.0, 0
    while True:
        if select.select([sys.stdin], [], [], PAUSE_SECONDS if asking else None)[0]:
            line = sys.stdin.readline()
            if line == "begin\n":
                asking, longest, refused = True, 0.0, 0
            elif line == "end\n":
                asking = False
                print(json.dumps({"wait_seconds": longest, "refused": refused}), flush=True)
            else:
                return 0
        elif asking:
            seconds, status = neighbour.wait()
            longest = max(longest, seconds)
            refused += status == NO_PERMIT


if __name__ == "__main__":
    sys.exit(main())
