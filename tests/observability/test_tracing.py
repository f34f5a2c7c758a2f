"""Handlers as spans: names, nesting, what is logged within, and what a recorder hears."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sys

import pytest

from hybridtei.errors import InvalidInput
from hybridtei.observability import logs
from hybridtei.observability.tracing import CURRENT, Span, arrived, as_handler, handler, passes_on
from hybridtei.outputs import Timings
from tests.server.live import serving

TIMES = Timings(1, 2, 3)


class Kept:
    """A recorder that remembers."""

    def __init__(self) -> None:
        self.begun: list[tuple[Span, dict[str, str]]] = []
        self.over: list[tuple[str, str | None, str | None]] = []

    def begin(self, span: Span, headers: dict[str, str]) -> None:
        self.begun.append((span, headers))

    def end(self, span: Span, error: BaseException | None) -> None:
        outer = None if span.outer is None else span.outer.name
        self.over.append((span.name, outer, None if error is None else type(error).__name__))


@handler("inner")
async def inner(fails: bool) -> str:
    span = CURRENT.get()
    assert span is not None
    if fails:
        raise InvalidInput("no")
    span.computed(TIMES, 9)
    return span.name


@handler("outer")
async def outer(fails: bool) -> list[str]:
    first = await inner(False)
    return [first, *await asyncio.gather(inner(False), inner(fails))]


def test_spans_nest_and_are_recorded():
    kept = Kept()

    async def request() -> list[str]:
        arrived(kept, [(b"traceparent", b"00-x"), (b"other", b"y"), (b"tracestate", b"z\xff")])
        return await outer(False)

    assert asyncio.run(request()) == ["inner"] * 3
    assert kept.over == [*[("inner", "outer", None)] * 3, ("outer", None, None)]
    assert kept.begun[0][1] == {"traceparent": "00-x", "tracestate": "zÿ"}


def test_without_a_recorder_nothing_is_kept():
    async def request() -> str:
        arrived(None, [(b"traceparent", b"00-x")])
        return await inner(False)

    assert asyncio.run(request()) == "inner"


async def test_after_a_failure_the_next_request_of_a_task_is_not_within():
    kept = Kept()
    arrived(kept, [])
    with pytest.raises(InvalidInput):
        await inner(True)
    assert CURRENT.get().name == "inner"  # whoever tells of it does so within
    await inner(False)
    with pytest.raises(InvalidInput):
        await outer(True)
    assert kept.over[0] == ("inner", None, "InvalidInput")
    assert kept.over[1] == ("inner", None, None)
    assert kept.over[-1] == ("outer", None, "InvalidInput")


async def test_what_leaves_ends_its_span_too():
    kept = Kept()

    @handler("slow")
    async def slow() -> None:
        await asyncio.Event().wait()

    async def request() -> None:
        arrived(kept, [])
        await slow()

    task = asyncio.create_task(request())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert kept.over == [("slow", None, "CancelledError")]


def test_what_is_no_handler_is_made_one():
    async def plain() -> None: ...

    assert as_handler(plain).span_name == "plain"
    assert as_handler(inner) is inner
    assert as_handler(passes_on(plain)) is plain


SENT = [
    ("/embed", {"inputs": "one"}, ["embed"]),
    ("/embed_all", {"inputs": "one"}, ["embed_all"]),
    ("/embed_sparse", {"inputs": "one"}, ["embed_sparse"]),
    ("/v1/embeddings", {"input": "one"}, ["openai_embed"]),
    ("/similarity", {"inputs": {"source_sentence": "one", "sentences": ["two"]}}, ["similarity"]),
    ("/embed_hybrid", {"inputs": "one"}, ["embed_hybrid"]),
    ("/", {"inputs": "one"}, ["embed"]),
    ("/rerank", {"query": "one", "texts": ["two"]}, ["rerank"]),
    ("/rerank", {"query": "one", "documents": ["two"]}, ["rerank"]),
    ("/vertex", {"instances": [{"inputs": "one"}]}, ["vertex_compatibility", "embed"]),
    ("/tokenize", {"inputs": "one"}, None),
    ("/decode", {"ids": [5]}, None),
]
REFUSED = [
    ("/embed", {"inputs": ""}, ["embed"]),
    ("/predict", {"inputs": "one"}, ["predict"]),
    ("/tokenize", {"inputs": []}, ["tokenize"]),
    ("/vertex", {"instances": [{"inputs": ""}]}, ["vertex_compatibility"]),
]


def test_each_inference_is_logged_and_each_failure(root: logging.Logger, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdout", lines := io.StringIO())
    logs.configure(json_output=True, level="info")
    with serving() as running:
        for path, body, _ in SENT:
            assert running.post(path, body).status_code == 200, path
        for path, body, _ in REFUSED:
            assert running.post(path, body).is_client_error, path
    root.handlers[0].flush()
    entries = [json.loads(line) for line in lines.getvalue().splitlines() if '"spans"' in line]
    done = [entry for entry in entries if entry["message"] == "Success"]
    assert [[span["name"] for span in entry["spans"]] for entry in done] == [names for *_, names in SENT if names]
    assert all(entry["level"] == "INFO" and "inference_time" in entry["span"] for entry in done)
    failed = [entry for entry in entries if entry not in done]
    assert [[span["name"] for span in entry["spans"]] for entry in failed] == [names for *_, names in REFUSED]
    assert all(entry["level"] == "ERROR" and entry["message"] for entry in failed)
