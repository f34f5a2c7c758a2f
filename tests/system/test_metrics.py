"""Prometheus text as TEI writes it."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.system.metrics import (
    Registry,
    duration_buckets,
    format_number,
    powers_of_two,
    text_of,
)


def test_duration_buckets_are_teis_to_the_letter():
    bounds = [format_number(bound) for bound in duration_buckets()]
    assert len(bounds) == 35
    assert bounds[:6] == [
        "0.000015000000000000002",
        "0.000022500000000000005",
        "0.00003375000000000001",
        "0.00005062500000000001",
        "0.00007593750000000002",
        "0.00011390625000000003",
    ]
    assert bounds[-2:] == ["9.707397373664762", "14.561096060497142"]


@pytest.mark.parametrize(
    ("limit", "last", "count"), [(1, 1, 1), (64, 64, 7), (100, 64, 7), (4096, 4096, 13)]
)
def test_powers_of_two(limit, last, count):
    powers = powers_of_two(limit)
    assert (powers[0], powers[-1], len(powers)) == (1, last, count)


@given(st.floats(0, 1e12))
def test_numbers_have_no_exponent_and_round_trip(value):
    text = format_number(value)
    assert float(text) == value
    assert "e" not in text
    assert not text.endswith((".", ".0"))


def test_an_observed_level_is_looked_up_when_asked():
    registry, levels = Registry(), iter([1, 2, 3])
    registry.observed("level", lambda: next(levels))
    assert registry.text() == "# TYPE level gauge\nlevel 1\n\n"
    assert (
        text_of([*registry.readings(), *registry.readings()]) == "# TYPE level gauge\nlevel 5\n\n"
    )


def test_the_whole_text():
    registry = Registry()
    histogram = registry.histogram("h", (1, 2.5))
    gauge, counter = registry.gauge("g"), registry.counter("c")
    assert registry.text() == "# TYPE c counter\n\n# TYPE g gauge\n\n# TYPE h histogram\n\n"
    counter.add()
    counter.add(2, method="single")
    counter.add(method="single")
    gauge.set(4)
    for value in (0.5, 1, 2):
        histogram.observe(value)
    histogram.observe(3, 2)
    assert registry.text() == (
        '# TYPE c counter\nc 1\nc{method="single"} 3\n\n'
        "# TYPE g gauge\ng 4\n\n"
        '# TYPE h histogram\nh_bucket{le="1"} 2\nh_bucket{le="2.5"} 3\nh_bucket{le="+Inf"} 5\nh_sum 9.5\nh_count 5\n\n'
    )
    values = (counter.value(), counter.value(method="single"), counter.value(method="batch"))
    assert values == (1, 3, 0)


@given(st.lists(st.floats(0, 100)))
def test_a_histogram_counts_each_observation_once(values):
    registry = Registry()
    histogram = registry.histogram("h", (1, 10))
    for value in values:
        histogram.observe(value)
    lines = dict(
        line.rpartition(" ")[::2] for line in registry.text().splitlines() if line.startswith("h")
    )
    if values:
        assert int(lines['h_bucket{le="1"}']) == sum(value <= 1 for value in values)
        assert int(lines['h_bucket{le="10"}']) == sum(value <= 10 for value in values)
        assert int(lines['h_bucket{le="+Inf"}']) == int(lines["h_count"]) == len(values)


def test_what_several_registries_counted_adds_up():
    def count(*observers):
        """Each observation by one of them."""
        declared = [
            (
                one.counter("c"),
                one.gauge("g"),
                one.counter("unused"),
                one.histogram("h", duration_buckets()),
            )
            for one in observers
        ]
        for number in range(30):
            counter, gauge, _, histogram = declared[number % len(declared)]
            counter.add(method="single" if number % 3 else "batch")
            gauge.add()
            histogram.observe(2.0 ** (number - 20))
        return text_of(reading for one in observers for reading in one.readings())

    alone = Registry()
    assert count(alone) == alone.text() == count(Registry(), Registry(), Registry())


def test_threads_lose_nothing():
    registry = Registry()
    counter, histogram = registry.counter("c"), registry.histogram("h", (1,))

    def work():
        for _ in range(2000):
            counter.add()
            histogram.observe(1)

    with ThreadPoolExecutor(4) as threads:
        for _ in range(4):
            threads.submit(work)
    assert "c 8000" in registry.text()
    assert "h_count 8000" in registry.text()
