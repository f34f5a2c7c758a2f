"""`hybridtei tune`: tokens a second of each backend and precision by the size of a pass, and the flags to use.

Nothing is kept, and no start measures: `backends.base.busy_tokens` gives the size of a pass by tables that were printed here.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from time import perf_counter, process_time
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from hybridtei.backends.base import Backend
from hybridtei.backends.select import PREFERRED, open_backend, why_not
from hybridtei.batch import Encoding, Head, PackedBatch, pack
from hybridtei.checkpoint.spec import ModelSpec
from hybridtei.config import EngineConfig, ModelConfig
from hybridtei.errors import LoadError
from hybridtei.system.machine import LaneKind

FIRST_TOKENS = 64
TEXT_TOKENS = 64  # of the texts that are measured
PASSES = 5  # of a size; the fastest counts, since other programs only ever slow one down
FLAT = 0.97  # of the best rate: a smaller pass that gets there is enough
MIN_SECONDS = 1e-9  # of a pass, where a clock is too coarse

Clock = Callable[[], float]
T = TypeVar("T")


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
        for point in measure(backend, engine.max_batch_tokens):
            points.append(point)
            yield f"  {point.tokens:6} tokens a pass  {point.tokens_per_s:9.0f} tokens/s"
        given = min(backend.busy_tokens, engine.max_batch_tokens)
        yield f"  {enough(points)} tokens are enough for {FLAT:.0%} of the best rate; a pass of the server takes up to {given}"
    return points


def _best(points: list[Point]) -> float:
    return max(point.tokens_per_s for point in points)


def enough(points: list[Point]) -> int:
    """The smallest size that is about as fast as any of these, at least one, in ascending order."""
    return next(point.tokens for point in points if point.tokens_per_s >= FLAT * _best(points))


def measure(backend: Backend, max_tokens: int, *, clock: Clock | None = None) -> Iterator[Point]:
    """One point after the other, each twice the size, until the cap, or twice nothing more is gained.

    A pass is measured in one lane, and counts as often as there are lanes for long texts, so that backends whose passes take
    one core each compare with those whose pass takes all.
    """
    lanes = max(backend.lanes.count(LaneKind.BULK), 1)
    clock = clock or _clock_for(backend)
    size, best, flat = FIRST_TOKENS, 0.0, 0
    with _lane(backend) as in_lane:
        while flat < 2 and size <= max(max_tokens, FIRST_TOKENS):
            rate = in_lane(partial(_rate, backend, size, clock))
            yield Point(size, rate * lanes)
            flat = flat + 1 if rate < best / FLAT else 0
            best = max(best, rate)
            size *= 2


@contextmanager
def _lane(backend: Backend) -> Iterator[Callable[[Callable[[], T]], T]]:
    """What runs work as a lane does: a backend that fills all cores does so outside of its lanes only."""
    if not backend.fills_cores:
        yield lambda work: work()
        return
    with ThreadPoolExecutor(1, initializer=backend.enter_lane, initargs=(LaneKind.BULK,)) as lane:
        yield lambda work: lane.submit(work).result()


def _clock_for(backend: Backend) -> Clock:
    """The processor's time where a pass has one thread of it, as express lanes tell: other programs, that interrupt a long pass
    and spare many a short one, would make small passes look fast. A device, or a team of threads, needs a clock."""
    return process_time if LaneKind.EXPRESS in backend.lanes else perf_counter


def _rate(backend: Backend, tokens: int, clock: Clock) -> float:
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
