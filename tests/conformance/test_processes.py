"""`conformance/processes.py`: a process of the standard library's HTTP server, and one that ends at its start."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from conformance.processes import answers, free_port, started

SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    seen = []
    def do_GET(self):
        self.seen.append(self.path)
        self.send_response(503 if len(self.seen) < 3 else int(sys.argv[2]))
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.mark.parametrize("status", [200, 404])
def test_a_process_is_given_once_it_answers_and_ends_with_the_block(tmp_path: Path, status: int):
    port = free_port()
    command = [sys.executable, "-c", SERVER, str(port), str(status)]
    with started(command, port, tmp_path / "log") as process:
        assert process.poll() is None
        assert (tmp_path / "log").read_text().count("GET /health") == 3  # two that were no answers yet
    assert process.returncode is not None
    assert not answers(f"http://127.0.0.1:{port}/health")


def test_one_that_ends_is_told_with_its_last_words(tmp_path: Path):
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with pytest.raises(RuntimeError, match="ended with 1:\nno such model"), started(command, free_port(), tmp_path / "log"):
        pass
