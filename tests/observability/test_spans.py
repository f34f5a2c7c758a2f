"""Durations as Rust writes them, and spans within spans."""

from __future__ import annotations

import re
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.observability.tracing import Span, human
from hybridtei.outputs import Timings


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


def test_fields_are_teis_once_there_is_an_account():
    outer = Span("vertex_compatibility")
    span = Span("embed", outer)
    assert span.fields() == {}
    span.computed(Timings(1_000, 2_000, 3_000), 7_000)
    assert list(span.fields().items()) == [
        ("total_time", "7µs"),
        ("tokenization_time", "1µs"),
        ("queue_time", "2µs"),
        ("inference_time", "3µs"),
    ]
    assert span.from_outermost() == [outer, span]
