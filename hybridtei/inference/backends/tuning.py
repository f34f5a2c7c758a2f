"""`hybridtei tune`: tokens a second of each backend and precision by the size of a pass, and the flags to use.

Nothing is kept, and no start measures: `backends.base.busy_tokens` gives the size of a pass by tables that were printed here.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from time import perf_counter
from typing import NamedTuple

import msgspec
import numpy as np

from hybridtei.batch import Encoding, Head, PackedBatch, pack
from hybridtei.config import EngineConfig, ModelConfig
from hybridtei.errors import LoadError
from hybridtei.inference.backends.base import Backend
from hybridtei.inference.backends.select import PREFERRED, open_backend, why_not
from hybridtei.models.checkpoint.spec import ModelSpec
from hybridtei.system.machine import LaneKind

FIRST_TOKENS = 64
BEYOND = 2  # how many times the size of the server's passes the largest is
TEXT_TOKENS = 64  # of the texts that are measured
PASSES = 5  # of a size; the fastest counts, since other programs only ever slow one down
FLAT = 0.97  # of the best rate: a smaller pass that gets there is enough
MIN_SECONDS = 1e-9  # of a pass, where a clock is too coarse


class Point(NamedTuple):
    """A size of pass, and what all lanes for long texts achieve by it."""

    tokens: int
    tokens_per_s: float


def tune(config: ModelConfig, spec: ModelSpec, engine: EngineConfig) -> Iterator[str]:
    """Measure what `config` leaves open; lines for people as they come, last the flags, those of the fastest first."""
    rates = dict[str, float]()
    for dtype in [config.dtype] if config.dtype else ["float32", "bfloat16", "int8"]:
        for name in PREFERRED[dtype]:
            if config.backend in ("auto", name):
                points = yield from _table(msgspec.structs.replace(config, backend=name, dtype=dtype), spec, engine)
                if points:
                    rates[f"--backend {name} --dtype {dtype}"] = _best(points)
    if rates:
        yield "flags to use, the fastest first; bfloat16 and int8 change vectors a little:"
    for flags in sorted(rates, key=lambda flags: -rates[flags]):
        yield f"  {flags:35} {rates[flags]:9.0f} tokens/s"


def _table(config: ModelConfig, spec: ModelSpec, engine: EngineConfig) -> Generator[str, None, list[Point]]:
    title, points = f"{config.backend} {config.dtype}", list[Point]()
    try:
        reason = why_not(config.backend, config.dtype, spec)
        backend = None if reason is not None else open_backend(config, spec, bulk_niceness=engine.bulk_niceness)
    except LoadError as error:
        backend, reason = None, str(error)
    if backend is None:
        yield f"{title}: no, {reason}"
        return points
    with closing(backend):
        yield f"{title}, one lane times {backend.lanes.count(LaneKind.BULK)}:"
        given = min(backend.busy_tokens, engine.max_batch_tokens)
        for point in measure(backend, min(BEYOND * given, engine.max_batch_tokens)):
            points.append(point)
            yield f"  {point.tokens:6} tokens a pass  {point.tokens_per_s:9.0f} tokens/s"
        yield f"  {enough(points)} tokens are enough for {FLAT:.0%} of the best rate; a pass of the server takes up to {given}"
    return points


def _best(points: list[Point]) -> float:
    return max(point.tokens_per_s for point in points)


def enough(points: list[Point]) -> int:
    """The smallest size that is about as fast as any of these, at least one, in ascending order."""
    return next(point.tokens for point in points if point.tokens_per_s >= FLAT * _best(points))


def measure(backend: Backend, most: int, *, clock: Callable[[], float] = perf_counter) -> Iterator[Point]:
    """A point for each power of two from FIRST_TOKENS to `most`.

    A pass is measured in one lane, and counts as often as there are lanes for long texts, so that backends whose passes take
    one core each compare with those whose pass takes all.
    """
    lanes = max(backend.lanes.count(LaneKind.BULK), 1)
    with ThreadPoolExecutor(1, initializer=backend.enter_lane, initargs=(LaneKind.BULK,)) as lane:
        size = FIRST_TOKENS
        while size <= max(most, FIRST_TOKENS):
            yield Point(size, lanes * lane.submit(_rate, backend, size, clock).result())
            size *= 2


def _rate(backend: Backend, tokens: int, clock: Callable[[], float]) -> float:
    batch, took = _texts(backend.spec, tokens), list[float]()
    for _ in range(PASSES):
        began = clock()
        backend.forward(batch)
        took.append(clock() - began)
    return len(batch.input_ids) / max(min(took), MIN_SECONDS)


def _texts(spec: ModelSpec, tokens: int) -> PackedBatch:
    length = min(TEXT_TOKENS, spec.max_input_length, tokens)
    first = spec.positions.offset
    ids = np.arange(first, first + length, dtype=np.int64) % spec.vocab_size
    heads = frozenset({next(iter(sorted(spec.heads - {Head.TOKENS})))})
    return pack([Encoding(ids)] * max(tokens // length, 1), heads, spec.positions)
