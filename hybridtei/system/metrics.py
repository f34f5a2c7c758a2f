"""Counters, gauges and histograms, and their Prometheus text.

This module does not use `prometheus_client`, because dashboards for TEI expect TEI's exact text: no
`_total`, no `# HELP`, bucket bounds in plain decimals, counters first. Metrics that TEI lacks
follow Prometheus' conventions. A series without labels appears after its first use; `# TYPE` lines
of declared metrics always appear.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeVar

import numpy as np

LOADED_MODELS = "hybridtei_loaded_models"
HELP = {
    "hybridtei_batch_fill": "Share of the token budget that a batch used.",
    "hybridtei_cache_bytes": "Bytes of results in the embedding cache.",
    "hybridtei_cache_hits_total": "Inputs answered from the embedding cache.",
    "hybridtei_cache_misses_total": "Inputs that were not in the embedding cache.",
    "hybridtei_departed_requests_total": "Requests whose client left before the answer.",
    "hybridtei_dropped_requests_total": (
        "Requests whose client left while they waited for a forward pass."
    ),
    "hybridtei_forward_passes_total": "Forward passes of a backend.",
    "hybridtei_key_requests_total": "Requests by the name of their API key.",
    "hybridtei_key_tokens_total": "Tokens of answers by the name of their API key.",
    "hybridtei_lane_batches_total": "Batches that lanes of a kind took.",
    "hybridtei_lane_tokens_total": "Tokens that lanes of a kind took.",
    LOADED_MODELS: "Models in memory; --idle-unload takes them out.",
    "hybridtei_queue_tokens": "Tokens that wait for a forward pass.",
    "hybridtei_refusals_total": "Requests refused, by the limit that refused them.",
    "hybridtei_requests_without_side_total": (
        "Requests that name no side of a model with prompts for queries and documents."
    ),
    "hybridtei_running_batches": "Batches in a forward pass now.",
    "hybridtei_shared_inputs_total": "Inputs identical to a waiting input, computed once.",
    "hybridtei_store_errors_total": (
        "Requests that failed or were refused at the vector store, by kind."
    ),
    "hybridtei_truncated_inputs_total": "Inputs that were cut to the model's length.",
    "hybridtei_unsent_bytes": "Bytes of answers that clients have not read yet.",
}


def format_number(value: float) -> str:
    """Write a number as the shortest decimal without exponent; whole numbers without a point."""
    return str(int(value)) if value == int(value) else np.format_float_positional(value, trim="-")


def duration_buckets() -> tuple[float, ...]:
    """TEI's bounds in seconds: 1e-5 multiplied by 1.5 in float64, 35 times."""
    bounds, bound = [], 0.00001
    for _ in range(35):
        bound *= 1.5
        bounds.append(bound)
    return tuple(bounds)


def powers_of_two(limit: int) -> tuple[float, ...]:
    """1, 2, 4 … up to `limit`."""
    return tuple(float(2**k) for k in range(limit.bit_length()))


# In the order of the text
KINDS = ("counter", "gauge", "histogram")


@dataclass(frozen=True, slots=True)
class Reading:
    """One metric's state: `values` by labels, or a histogram's `counts` up to each of `bounds` and
    the sum `total`."""

    kind: str
    name: str
    values: Mapping[str, float]
    bounds: tuple[float, ...] = ()
    counts: Sequence[int] = ()
    total: float = 0.0

    def __add__(self, other: Reading) -> Reading:
        """Add the values of the same metric of another model or process."""
        values = dict(self.values)
        for labels, value in other.values.items():
            values[labels] = values.get(labels, 0) + value
        # Models differ in the lengths of their inputs
        bounds = tuple(sorted({*self.bounds, *other.bounds}))
        counts = [0] * (len(bounds) + 1)
        for reading in (self, other):
            # Only histograms have counts
            for bound, count in zip((*reading.bounds, inf), reading.counts, strict=False):
                counts[bisect_left(bounds, bound)] += count
        return Reading(self.kind, self.name, values, bounds, counts, self.total + other.total)

    def lines(self) -> Iterator[str]:
        """Its lines of the Prometheus text."""
        if self.name in HELP:
            yield f"# HELP {self.name} {HELP[self.name]}"
        yield f"# TYPE {self.name} {self.kind}"
        for labels, value in self.values.items():
            yield f"{self.name}{labels} {format_number(value)}"
        if not any(self.counts):
            return
        running = 0
        for bound, count in zip(
            (*map(format_number, self.bounds), "+Inf"), self.counts, strict=True
        ):
            running += count
            yield f'{self.name}_bucket{{le="{bound}"}} {running}'
        yield f"{self.name}_sum {format_number(self.total)}"
        yield f"{self.name}_count {running}"


def added(readings: Iterable[Reading]) -> list[Reading]:
    """One reading for each metric, in the order of their first ones."""
    sums: dict[str, Reading] = {}
    for reading in readings:
        before = sums.get(reading.name)
        sums[reading.name] = reading if before is None else before + reading
    return [*sums.values()]


def text_of(readings: Iterable[Reading]) -> str:
    """Return the Prometheus text: counters, gauges, histograms."""
    ordered = sorted(added(readings), key=lambda reading: KINDS.index(reading.kind))
    return "\n".join("\n".join([*reading.lines(), ""]) for reading in ordered) + "\n"


class Counter:
    """A sum for each set of labels. It never decreases."""

    kind = "counter"

    def __init__(self, name: str, lock: threading.Lock) -> None:
        self.name, self._lock = name, lock
        self._values: dict[str, float] = {}

    def add(self, amount: float = 1, **labels: str) -> None:
        self.of(**labels)(amount)

    def of(self, **labels: str) -> Callable[..., None]:
        """Return a function that adds 1, or a number, under these labels. The labels are formatted
        only once."""
        key = _labels(labels)

        def add(amount: float = 1) -> None:
            with self._lock:
                self._values[key] = self._values.get(key, 0) + amount

        return add

    def value(self, **labels: str) -> float:
        return self._values.get(_labels(labels), 0)

    def reading(self) -> Reading:
        return Reading(self.kind, self.name, dict(self._values))


class Gauge(Counter):
    """A value that rises and falls."""

    kind = "gauge"

    def set(self, value: float) -> None:
        with self._lock:
            self._values[""] = value


class Observed:
    """A gauge, or a counter that appears once it is above 0, that is read only for `/metrics`."""

    def __init__(self, name: str, read: Callable[[], float], kind: str = Gauge.kind) -> None:
        self.name, self.value, self.kind = name, read, kind

    def reading(self) -> Reading:
        value = self.value()
        return Reading(
            self.kind, self.name, {"": value} if value or self.kind == Gauge.kind else {}
        )


class Histogram:
    """Counts of observations up to each bound."""

    def __init__(self, name: str, lock: threading.Lock, bounds: Iterable[float]) -> None:
        self.name, self.lock = name, lock
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        slot = bisect_left(self.bounds, value)
        with self.lock:
            self.counts[slot] += times
            self.total += value * times

    def reading(self) -> Reading:
        return Reading("histogram", self.name, {}, self.bounds, tuple(self.counts), self.total)


def observe_pairs(
    values: Sequence[float], pairs: Sequence[tuple[Histogram, Histogram]], times: int
) -> None:
    """Observe each value in a pair of histograms of one registry with equal bounds: once in the
    first, `times` times in the second. One search a value and one lock for all, since every request
    observes four."""
    with pairs[0][0].lock:
        for value, (once, repeated) in zip(values, pairs, strict=True):
            slot = bisect_left(once.bounds, value)
            once.counts[slot] += 1
            once.total += value
            repeated.counts[slot] += times
            repeated.total += value * times


M = TypeVar("M", Counter, Gauge, Observed, Histogram)


class Registry:
    """The metrics of one process, in order of declaration. `others`: another process's current
    readings."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._metrics: list[Counter | Observed | Histogram] = []
        self._ended: list[Reading] = []
        self.others: Sequence[Reading] = ()

    def counter(self, name: str) -> Counter:
        return self._add(Counter(name, self._lock))

    def gauge(self, name: str) -> Gauge:
        return self._add(Gauge(name, self._lock))

    def observed(self, name: str, read: Callable[[], float]) -> Observed:
        """Declare an `Observed`. Any thread may call `read`, which must not count anything."""
        return self._add(Observed(name, read))

    def counted(self, name: str, read: Callable[[], float]) -> Observed:
        """Declare a counter that something else counts."""
        return self._add(Observed(name, read, Counter.kind))

    def histogram(self, name: str, bounds: Iterable[float]) -> Histogram:
        return self._add(Histogram(name, self._lock, bounds))

    def text(self) -> str:
        """Return the Prometheus text."""
        return text_of(self.readings())

    def readings(self) -> list[Reading]:
        """Return all values."""
        with self._lock:
            return [*(metric.reading() for metric in self._metrics), *self._ended, *self.others]

    def keep(self, readings: Iterable[Reading]) -> None:
        """Add the counters of a process or model that has ended: Prometheus counters must not
        decrease."""
        self._ended = added(
            [*self._ended, *(reading for reading in readings if reading.kind != Gauge.kind)]
        )

    def _add(self, metric: M) -> M:
        self._metrics.append(metric)
        return metric


def _labels(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join([f'{name}="{value}"' for name, value in labels.items()]) + "}"
