"""Counters, gauges and histograms, and their Prometheus text.

This module does not use `prometheus_client`, because dashboards for TEI expect TEI's exact text: no `_total`, no `# HELP`,
bucket bounds in plain decimals, counters first. Metrics that TEI lacks follow Prometheus' conventions. A series without labels
appears after its first use; `# TYPE` lines of declared metrics always appear.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

HELP = {
    "hybridtei_batch_fill": "Share of the token budget that a batch used.",
    "hybridtei_cache_bytes": "Bytes of results in the embedding cache.",
    "hybridtei_cache_hits_total": "Inputs answered from the embedding cache.",
    "hybridtei_cache_misses_total": "Inputs that the embedding cache did not hold.",
    "hybridtei_departed_requests_total": "Requests whose client left before the answer.",
    "hybridtei_dropped_requests_total": "Requests whose caller left while they waited for a forward pass.",
    "hybridtei_forward_passes_total": "Forward passes of a backend.",
    "hybridtei_key_requests_total": "Requests by the name of their API key.",
    "hybridtei_lane_batches_total": "Batches that lanes of a kind took.",
    "hybridtei_lane_tokens_total": "Tokens that lanes of a kind took.",
    "hybridtei_queue_tokens": "Tokens that wait for a forward pass.",
    "hybridtei_refusals_total": "Requests refused, by the limit that refused them.",
    "hybridtei_running_batches": "Batches in a forward pass now.",
    "hybridtei_shared_inputs_total": "Inputs identical to one that waited already, computed once.",
    "hybridtei_store_errors_total": "Requests that the vector store failed or refused, by kind.",
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


@dataclass(frozen=True, slots=True)
class Reading:
    """One metric's state: `values` by labels, or a histogram's `counts` up to each of `bounds` and the sum `total`."""

    kind: str
    name: str
    values: Mapping[str, float]
    bounds: tuple[float, ...] = ()
    counts: Sequence[int] = ()
    total: float = 0.0


class _Metric:
    kind = ""

    def __init__(self, name: str, lock: threading.Lock) -> None:
        self.name = name
        self._lock = lock

    def samples(self) -> Iterator[str]:
        raise NotImplementedError

    def reading(self) -> Reading:
        raise NotImplementedError

    def absorb(self, reading: Reading) -> None:
        raise NotImplementedError


class Counter(_Metric):
    """A sum for each set of labels. It never decreases."""

    kind = "counter"

    def __init__(self, name: str, lock: threading.Lock) -> None:
        super().__init__(name, lock)
        self._values: dict[str, float] = {}

    def add(self, amount: float = 1, **labels: str) -> None:
        self.of(**labels)(amount)

    def of(self, **labels: str) -> Callable[..., None]:
        """Return a function that adds 1, or a number, under these labels. The labels are formatted only once."""
        key = _labels(labels)

        def add(amount: float = 1) -> None:
            with self._lock:
                self._values[key] = self._values.get(key, 0) + amount

        return add

    def value(self, **labels: str) -> float:
        return self._values.get(_labels(labels), 0)

    def samples(self) -> Iterator[str]:
        return (f"{self.name}{labels} {format_number(value)}" for labels, value in self._values.items())

    def reading(self) -> Reading:
        return Reading(self.kind, self.name, dict(self._values))

    def absorb(self, reading: Reading) -> None:
        for labels, value in reading.values.items():
            self._values[labels] = self._values.get(labels, 0) + value


class Gauge(Counter):
    """A value that rises and falls."""

    kind = "gauge"

    def set(self, value: float) -> None:
        with self._lock:
            self._values[""] = value


class Observed(_Metric):
    """A value that is read only for `/metrics`."""

    kind = "gauge"

    def __init__(self, name: str, lock: threading.Lock, read: Callable[[], float]) -> None:
        super().__init__(name, lock)
        self.value = read

    def samples(self) -> Iterator[str]:
        yield f"{self.name} {format_number(self.value())}"

    def reading(self) -> Reading:
        return Reading(self.kind, self.name, {"": self.value()})


class Histogram(_Metric):
    """Counts of observations up to each bound."""

    kind = "histogram"

    def __init__(self, name: str, lock: threading.Lock, bounds: Iterable[float]) -> None:
        super().__init__(name, lock)
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        slot = bisect_left(self._bounds, value)
        with self._lock:
            self._counts[slot] += times
            self._sum += value * times

    def samples(self) -> Iterator[str]:
        running = 0
        if not any(self._counts):
            return
        for bound, count in zip(self._bounds, self._counts, strict=False):
            running += count
            yield f'{self.name}_bucket{{le="{format_number(bound)}"}} {running}'
        running += self._counts[-1]
        yield f'{self.name}_bucket{{le="+Inf"}} {running}'
        yield f"{self.name}_sum {format_number(self._sum)}"
        yield f"{self.name}_count {running}"

    def reading(self) -> Reading:
        return Reading(self.kind, self.name, {}, self._bounds, tuple(self._counts), self._sum)

    def absorb(self, reading: Reading) -> None:
        bounds = tuple(sorted({*self._bounds, *reading.bounds}))  # of several models with different lengths of inputs
        counts = [0] * (len(bounds) + 1)
        for own, part in ((self._bounds, self._counts), (reading.bounds, reading.counts)):
            for bound, count in zip((*own, float("inf")), part, strict=True):
                counts[bisect_left(bounds, bound)] += count
        self._bounds, self._counts = bounds, counts
        self._sum += reading.total


M = TypeVar("M", bound=_Metric)


class Registry:
    """The metrics of one process, by kind in order of declaration. `others`: another process's current readings."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._metrics: list[_Metric] = []
        self.others: Sequence[Reading] = ()

    def counter(self, name: str) -> Counter:
        return self._add(Counter(name, self._lock))

    def gauge(self, name: str) -> Gauge:
        return self._add(Gauge(name, self._lock))

    def observed(self, name: str, read: Callable[[], float]) -> Observed:
        """Declare an `Observed`. Any thread may call `read`, which must not count anything."""
        return self._add(Observed(name, self._lock, read))

    def histogram(self, name: str, bounds: Iterable[float]) -> Histogram:
        return self._add(Histogram(name, self._lock, bounds))

    def text(self) -> str:
        """Return the Prometheus text: counters, gauges, histograms."""
        if self.others:
            whole = Registry()
            whole.absorb(self.readings())
            return whole.text()
        with self._lock:
            blocks = [
                "\n".join([*_head(metric), *metric.samples(), ""])
                for kind in ("counter", "gauge", "histogram")
                for metric in self._metrics
                if metric.kind == kind
            ]
        return "\n".join(blocks) + "\n"

    def readings(self) -> list[Reading]:
        """Return all values, for another registry to add."""
        with self._lock:
            return [*(metric.reading() for metric in self._metrics), *self.others]

    def keep(self, readings: Iterable[Reading]) -> None:
        """Add the counters of a process or model that has ended: Prometheus counters must not decrease."""
        self.absorb(reading for reading in readings if reading.kind != Gauge.kind)

    def absorb(self, readings: Iterable[Reading]) -> None:
        """Add readings of another registry; declare metrics that this one lacks."""
        known = {metric.name: metric for metric in self._metrics}
        for reading in readings:
            metric = known.get(reading.name) or self._declare(reading)
            with self._lock:
                metric.absorb(reading)

    def _declare(self, reading: Reading) -> _Metric:
        if reading.kind == Histogram.kind:
            return self.histogram(reading.name, reading.bounds)
        return self.gauge(reading.name) if reading.kind == Gauge.kind else self.counter(reading.name)

    def _add(self, metric: M) -> M:
        self._metrics.append(metric)
        return metric


def _head(metric: _Metric) -> Iterator[str]:
    if metric.name in HELP:
        yield f"# HELP {metric.name} {HELP[metric.name]}"
    yield f"# TYPE {metric.name} {metric.kind}"


def _labels(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join([f'{name}="{value}"' for name, value in labels.items()]) + "}"
