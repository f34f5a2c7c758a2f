"""A server whose standard output nobody reads goes on answering, and ends when it is told to."""

import fcntl
import os
import re
import signal
import subprocess
import sys

import httpx
import pytest

from tests.server.live import HANG, JSON, ROOT

PIPE_BYTES = 4096
# Whose lines do not fit into the pipe
REQUESTS = 200


class Server:
    """A process whose output is read when somebody calls `line`."""

    def __init__(self, keys):
        known = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        environment = {**known, "HF_HUB_OFFLINE": "1", "API_KEY_FILE": str(keys)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.server.processes.fake_server", "0"],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        fcntl.fcntl(self.process.stdout, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self.url = ""
        while "Ready" not in (line := self.line()):
            found = re.search(r"Starting HTTP server: ([\d.:]+)", line)
            self.url = f"http://{found[1]}" if found else self.url

    def line(self):
        line = self.process.stdout.readline()
        assert line, "it has ended"
        return line


@pytest.fixture
def unread(tmp_path):
    """A server that has more to say than the pipe takes."""
    keys = tmp_path / "keys"
    keys.write_text("a:key\n")
    server = Server(keys)
    try:
        with httpx.Client(base_url=server.url, timeout=HANG, trust_env=False) as client:
            for number in range(REQUESTS):
                client.post(
                    "/embed",
                    json={"inputs": f"one {number}", "prompt_name": "query"},
                    headers={**JSON, "authorization": "Bearer key"},
                )
            # A request's line is written after its answer, and before the next one's
            client.get("/health")
            # A line of no request
            server.process.send_signal(signal.SIGHUP)
            assert client.get("/health").status_code == 200
        yield server
    finally:
        server.process.kill()
        server.process.wait(HANG)
        server.process.stdout.close()


def test_it_answers_and_what_it_had_to_say_is_read_later_in_order(unread):
    lines = [unread.line() for _ in range(REQUESTS + 1)]
    assert all("Success" in line for line in lines[:-1])
    assert "read the keys again" in lines[-1]


@pytest.mark.slow
def test_it_ends_when_it_is_told_to(unread):
    unread.process.terminate()
    assert unread.process.wait(HANG) == 0
