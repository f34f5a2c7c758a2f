"""Handlers as spans: durations as Rust writes them, names, nesting, and what is logged within."""

import asyncio
import json
import os
import re
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.errors import InvalidInput
from hybridtei.outputs import Timings
from hybridtei.system import logs
from hybridtei.system.tracing import CURRENT, HandlerSpan, human
from tests.server.live import serving


@pytest.mark.parametrize(
    ("duration_ns", "text"),
    [
        (999, "999ns"),
        (72_010, "72.01µs"),
        (10_000_001, "10.000001ms"),
        (1_500_000_000, "1.5s"),
        (61_000_000_001, "61.000000001s"),
    ],
)
def test_durations(duration_ns, text):
    assert human(duration_ns) == text


@given(st.integers(0, 10**15))
def test_no_nanosecond_is_lost(duration_ns):
    number, unit = re.fullmatch(r"(\d+(?:\.\d*[1-9])?)(s|ms|µs|ns)", human(duration_ns)).groups()
    assert Decimal(number) * {"s": 10**9, "ms": 10**6, "µs": 1000, "ns": 1}[unit] == duration_ns


def test_fields_are_teis_once_the_engine_has_answered():
    span = HandlerSpan("embed")
    assert span.fields() == {}
    span.timings, span.total_ns = Timings(1_000, 2_000, 3_000), 7_000
    times = {"total": "7µs", "tokenization": "1µs", "queue": "2µs", "inference": "3µs"}
    expected = [(f"{name}_time", value) for name, value in times.items()]
    assert [*span.fields().items()] == expected


async def inner(fails):
    with HandlerSpan("inner") as span:
        if fails:
            raise InvalidInput("no")
        return ":".join(one.name for one in span.from_outermost())


async def outer(fails):
    with HandlerSpan("outer"):
        first = await inner(False)
        return [first, *await asyncio.gather(inner(False), inner(fails))]


async def test_a_failed_span_is_the_current_one_and_holds_no_later_span():
    for failing in (outer, inner):
        with pytest.raises(InvalidInput):
            await failing(True)
        assert [span.name for span in CURRENT.get().from_outermost()] == [failing.__name__]
    assert await outer(False) == ["outer:inner"] * 3
    assert CURRENT.get() is None


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


def names_of(entries):
    return [[span["name"] for span in entry["spans"]] for entry in entries]


def test_each_inference_is_logged_and_each_failure(root, tmp_path, monkeypatch):
    lines = tmp_path / "lines"
    descriptor = os.open(lines, os.O_CREAT | os.O_WRONLY)
    monkeypatch.setattr(logs, "STANDARD_OUTPUT", descriptor)
    logs.configure(json_output=True, level="info")
    with serving() as running:
        for path, body, _ in SENT:
            assert running.post(path, body).status_code == 200, path
        for path, body, _ in REFUSED:
            assert running.post(path, body).is_client_error, path
    root.handlers[0].flush()
    os.close(descriptor)
    entries = [json.loads(line) for line in lines.read_text().splitlines() if '"spans"' in line]
    done = [entry for entry in entries if entry["message"] == "Success"]
    assert names_of(done) == [names for *_, names in SENT if names]
    assert all(entry["level"] == "INFO" and "inference_time" in entry["span"] for entry in done)
    others = [entry for entry in entries if entry not in done]
    # A line an hour about requests without a side is no failure
    failed = [entry for entry in others if "input_type" not in entry["message"]]
    assert names_of(failed) == [names for *_, names in REFUSED]
    assert all(entry["level"] == "ERROR" and entry["message"] for entry in failed)
