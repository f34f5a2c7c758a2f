"""`--shadow`: another server sees a share of the traffic; clients see nothing of it, whatever it does."""

from __future__ import annotations

import json
import logging
import re
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from hybridtei import cli
from hybridtei.evaluate.compare import MIN_TEXTS, SAMPLES
from hybridtei.server.http import shadow
from tests.engine import small
from tests.server.live import HANG, JSON, Running, serving
from tests.vocabulary import texts

TEXTS = texts(MIN_TEXTS, most=20)
KEY = {"authorization": "Bearer client"}


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def counted(running: Running, name: str) -> float:
    """A metric of `hybridtei_shadow_…` as /metrics shows it; 0 where it is not shown."""
    found = re.search(rf"^hybridtei_shadow_{re.escape(name)} (\S+)$", running.get("/metrics").text, re.MULTILINE)
    return 0.0 if found is None else float(found[1])


@contextmanager
def shadowed(url: str, **server: Any) -> Iterator[Running]:
    with serving(small.dense_only(), server={"shadow": url, "shadow_rate": 1.0, **server}) as running:
        yield running


@contextmanager
def answering(answer: bytes = b"", status: int = 200, **headers: str) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """A server that always answers the same: its URL, and the heads of the requests that came."""
    heads: list[dict[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            heads.append({":path": self.path, **{name.lower(): value for name, value in self.headers.items()}})
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", heads
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def hanging() -> Iterator[str]:
    """A server that takes connections and never reads: the system accepts for it."""
    with socket.create_server(("127.0.0.1", 0), backlog=16) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def vectors(*rows: list[float]) -> bytes:
    return json.dumps(rows).encode()


def verdict(caplog: pytest.LogCaptureFixture) -> str:
    return [record.getMessage() for record in caplog.records if record.name == shadow.__name__][-1]


ZIPPED = {**JSON, "content-encoding": "gzip"}
FORMS: tuple[Callable[[Running, list[str]], httpx.Response], ...] = (
    lambda running, given: running.post("/embed", {"inputs": given}),
    lambda running, given: running.post("/m/small/embed", {"inputs": given}),
    lambda running, given: running.post("/v1/embeddings", {"input": given}),
    lambda running, given: running.post("/embeddings", {"input": given, "encoding_format": "base64"}),
    lambda running, given: running.post("/embed", {"inputs": given}, headers={**JSON, "accept": "application/msgpack"}),
    lambda running, given: running.post("/embed", {"inputs": given}, headers={**JSON, "accept-encoding": "zstd"}),
    lambda running, given: running.post(
        "/embed", zlib.compress(json.dumps({"inputs": given}).encode(), wbits=31), headers=ZIPPED
    ),
)


def test_copies_are_compared_whatever_their_form(caplog):
    with caplog.at_level(logging.INFO, shadow.__name__), serving(small.dense_only()) as other, shadowed(other.url) as running:
        for at, text in enumerate(TEXTS):
            form = FORMS[at % len(FORMS)]
            assert form(running, [text, TEXTS[at - 1]] * 4).status_code == 200  # enough to be compressed
        until(lambda: counted(running, "cosine_count") == 8 * len(TEXTS))
        assert counted(running, 'cosine_bucket{le="0.999999"}') == 0
        assert counted(running, "sent_total") == len(TEXTS)
        assert "_failed_total{" not in running.get("/metrics").text
        until(lambda: counted(running, "bytes") == 0)
    assert verdict(caplog).endswith("overlap@10 1.0000: keep the index")


def test_another_models_vectors_are_told_apart(caplog):
    with (
        caplog.at_level(logging.INFO, shadow.__name__),
        serving(small.dense_only(), engine={"default_prompt": "the meaning of "}, default_prompt="the meaning of ") as other,
        shadowed(other.url) as running,
    ):
        for text in SAMPLES:
            running.post("/embed", {"inputs": text})
        until(lambda: counted(running, "cosine_count") == len(SAMPLES))
    assert verdict(caplog).endswith("embed again")


def test_a_server_that_hangs_is_left_behind(monkeypatch):
    """More requests than copies may wait: all are answered, the queue stays at its bound, and nobody waits at the end."""
    monkeypatch.setattr(shadow, "TIMEOUT_S", 10 * HANG)
    monkeypatch.setattr(shadow, "MAX_WAITING", 8)
    with hanging() as url, serving(small.dense_only()) as alone, shadowed(url) as running:
        for text in TEXTS:
            body = {"inputs": text}
            assert running.post("/embed", body).json() == alone.post("/embed", body).json()
        # one copy is held by each connection
        assert counted(running, "sent_total") == shadow.CONNECTIONS
        assert counted(running, "waiting") == 8
        assert counted(running, 'dropped_total{reason="queue"}') == len(TEXTS) - 8 - shadow.CONNECTIONS
        assert 0 < counted(running, "bytes") <= (8 + shadow.CONNECTIONS) * 1000


def test_a_call_has_a_time_limit(monkeypatch):
    monkeypatch.setattr(shadow, "TIMEOUT_S", 0.01)
    with hanging() as url, shadowed(url) as running:
        assert running.post("/embed", {"inputs": "one"}).status_code == 200
        until(lambda: counted(running, 'failed_total{reason="timeout"}') == 1)
        until(lambda: counted(running, "bytes") == 0)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"status": 500}, "status"),
        ({"status": 307, "location": "/elsewhere"}, "status"),
        ({"answer": b"no JSON"}, "answer"),
        ({"answer": b"7"}, "answer"),
        ({"answer": b'{"data": [{"index": 0}]}'}, "answer"),
        ({"answer": vectors([1.0], [1.0, 2.0])}, "answer"),
        ({"answer": vectors([1.0] * small.HIDDEN, [1.0] * small.HIDDEN)}, "answer"),
        ({"answer": b"[[null]]"}, "answer"),
        ({"answer": vectors([1.0] * small.HIDDEN), "content_encoding": "gzip"}, "answer"),
        ({"answer": b"[" + b" " * shadow.MAX_COPY_BYTES + b"]"}, "size"),
        ({"answer": vectors([1.0, 2.0])}, "width"),
        (None, "connection"),
    ],
)
def test_its_failures_are_counted_and_nobody_elses(answer, reason):
    with answering(**(answer or {})) as (url, _), shadowed(url if answer is not None else "http://127.0.0.1:1") as running:
        for _ in range(2):  # the connection goes on
            assert running.post("/embed", {"inputs": "one"}).status_code == 200
        until(lambda: counted(running, f'failed_total{{reason="{reason}"}}') == 2)
        until(lambda: counted(running, "bytes") == 0)
        assert counted(running, "cosine_count") == 0


def test_keys_stay_here_and_copies_are_not_copied():
    with answering(vectors([1.0] * small.HIDDEN)) as (url, heads):
        with shadowed(url, api_key="client") as running:
            running.post("/embed", {"inputs": "one"}, headers={**JSON, **KEY, "cookie": "a=b", "user-agent": "mine"})
            until(lambda: counted(running, "cosine_count") == 1)
            marked = {**JSON, **KEY, shadow.MARK.decode(): "1"}
            assert running.post("/embed", {"inputs": "one"}, headers=marked).status_code == 200
        with shadowed(f"{url}/below/", shadow_api_key="theirs") as running:
            running.post("/v1/embeddings", {"input": "one"})
            until(lambda: len(heads) == 2)
    assert [head[":path"] for head in heads] == ["/embed", "/below/v1/embeddings"]
    assert [head.get("authorization") for head in heads] == [None, "Bearer theirs"]
    assert "cookie" not in heads[0]
    assert "mine" not in heads[0].values()


def test_what_was_refused_or_is_no_embedding_is_not_copied():
    with answering() as (url, heads), shadowed(url, api_key="client") as running:
        assert running.post("/embed", {"inputs": "one"}).status_code == 401
        assert running.post("/embed", {"inputs": []}, headers={**JSON, **KEY}).status_code == 400
        assert running.post("/tokenize", {"inputs": "one"}, headers={**JSON, **KEY}).status_code == 200
        assert running.get("/info", headers=KEY).status_code == 200
        assert counted(running, "sent_total") == counted(running, "bytes") == 0
    assert heads == []


@pytest.mark.parametrize(("bound", "reason"), [("MAX_COPY_BYTES", "size"), ("MAX_HELD_BYTES", "bytes")])
def test_copies_are_bounded_in_bytes(bound, reason, monkeypatch):
    monkeypatch.setattr(shadow, bound, 100)
    with answering() as (url, heads), shadowed(url) as running:
        assert running.post("/embed", {"inputs": "one " * 20}).status_code == 200
        assert counted(running, f'dropped_total{{reason="{reason}"}}') == 1
        assert counted(running, "bytes") == 0
    assert heads == []


def test_the_rate_chooses(monkeypatch):
    draws = iter([0.25, 0.249, 0.9])
    monkeypatch.setattr(shadow.random, "random", lambda: next(draws))
    with answering(vectors([1.0] * small.HIDDEN)) as (url, heads), shadowed(url, shadow_rate=0.25) as running:
        for _ in range(3):
            running.post("/embed", {"inputs": "one"})
        until(lambda: counted(running, "cosine_count") == 1)
    assert len(heads) == 1


@pytest.mark.parametrize(
    "flags",
    [
        ("--shadow", "new:8080"),
        ("--shadow", "ftp://new"),
        ("--shadow", "http://new:no"),
        ("--shadow", "http://user:word@new"),
        ("--shadow", "http://new/?a=b"),
        ("--shadow", "http://new", "--shadow-rate", "1.5"),
        ("--shadow", "http://new", "--shadow-api-key", "a\n"),
    ],
)
def test_flags_that_cannot_be(flags, capsys):
    try:
        status = cli.main(["serve", *flags])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert "--shadow" in capsys.readouterr().err
