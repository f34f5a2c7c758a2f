"""How many tokens a pass needs to keep this hardware busy, and which backend does most with them: measured, and remembered.

A pass of few tokens waits for weights instead of computing; beyond some size a larger one only makes others wait. Where the
curve becomes flat is the working budget. Results are kept in the user's cache by machine, library, precision and architecture,
unless other programs took the processors meanwhile or passes of one size did not agree: that would mislead later starts.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from time import perf_counter, process_time
from typing import TypeVar

import msgspec
import numpy as np

from hybridtei.backends.base import Backend
from hybridtei.batch import Encoding, Head, PackedBatch, pack
from hybridtei.checkpoint.spec import ModelSpec
from hybridtei.errors import LoadError
from hybridtei.system.machine import LaneKind, OtherPrograms, available_cores, cache_folder, whole

FIRST_TOKENS = 64
TEXT_TOKENS = 64  # of the texts that are measured
PASSES, MAX_PASSES = 3, 6  # of a size: more than the first while the two fastest do not agree
AGREEMENT = 0.1  # of the fastest pass's time, that the second may take longer
MAX_BUSY = 0.2  # of the cores that a pass may use, that other programs take
ATTEMPTS = 3  # of a measurement that is asked for, on a busy machine
FLAT = 0.97  # of the best rate: a smaller pass that gets there is preferred
MIN_SECONDS = 1e-9  # of a pass, where a clock is too coarse
LIMIT_SECONDS = 1.0  # of a start that nobody measured for

Clock = Callable[[], float]
T = TypeVar("T")


class Point(msgspec.Struct, frozen=True):
    """A size of pass, and what all lanes for long texts achieve by it. `spread`: how much longer than the fastest pass the
    second took."""

    tokens: int
    tokens_per_s: float
    spread: float


@dataclass(frozen=True, slots=True)
class Curve:
    """Rates by size, ascending. `busy`: share of the cores that other programs took meanwhile."""

    points: Sequence[Point]
    busy: float = 0.0

    @property
    def doubt(self) -> str | None:
        """Why the measurement is not to be believed; None if it is."""
        if self.busy > MAX_BUSY:
            return f"other programs took {self.busy:.0%} of the cores"
        wide = [point for point in self.points if point.spread > AGREEMENT]
        if 2 * len(wide) > len(self.points):
            return f"the two fastest of {MAX_PASSES} passes differed by {max(point.spread for point in wide):.0%}"
        return None

    @property
    def best_rate(self) -> float:
        """Most tokens a second that any size reached; 0 if none was measured."""
        return max((point.tokens_per_s for point in self.points), default=0.0)

    def budget(self) -> int | None:
        """The smallest size that is about as fast as any."""
        return next((point.tokens for point in self.points if point.tokens_per_s >= FLAT * self.best_rate), None)


def curve_of(backend: Backend, max_tokens: int, *, limit_seconds: float | None = None) -> Curve:
    """Measure sizes up to `max_tokens`, within about `limit_seconds`."""
    others = OtherPrograms()
    points = [*measure(backend, max_tokens, limit_seconds=limit_seconds)]
    return Curve(points, others.share())


def measure(
    backend: Backend, max_tokens: int, *, limit_seconds: float | None = None, clock: Clock | None = None
) -> Iterator[Point]:
    """One point after the other, each twice the size, until the budget's cap, the limit, or twice nothing more is gained.

    A pass is measured in one lane, and counts as often as there are lanes for long texts, so that backends whose passes take
    one core each compare with those whose pass takes all.
    """
    lanes = max(backend.lanes.count(LaneKind.BULK), 1)
    clock = clock or _clock_for(backend)
    began, size, best, flat = clock(), FIRST_TOKENS, 0.0, 0
    with _lane(backend) as in_lane:
        while size <= max(max_tokens, FIRST_TOKENS):
            rate, spread = in_lane(partial(_rate, backend, size, clock))
            yield Point(size, rate * lanes, spread)
            flat = flat + 1 if rate < best / FLAT else 0
            best = max(best, rate)
            if flat == 2 or (limit_seconds is not None and clock() - began > limit_seconds):
                return
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


def rate(backend: Backend, tokens: int, clock: Clock) -> float:
    """Tokens a second of the fastest of several passes: whatever else the machine does only ever slows one down."""
    return _rate(backend, tokens, clock)[0]


def _rate(backend: Backend, tokens: int, clock: Clock) -> tuple[float, float]:
    """Return tokens a second of the fastest pass, and how much longer the second took, as a share."""
    batch = _texts(backend.spec, tokens)
    took: list[float] = []
    while len(took) < PASSES or (len(took) < MAX_PASSES and _spread(took) > AGREEMENT):
        began = clock()
        backend.forward(batch)
        took.append(clock() - began)
    return len(batch.input_ids) / max(min(took), MIN_SECONDS), _spread(took)


def _spread(seconds: Sequence[float]) -> float:
    first, second = sorted(seconds)[:2]
    return max(second, MIN_SECONDS) / max(first, MIN_SECONDS) - 1


def _texts(spec: ModelSpec, tokens: int) -> PackedBatch:
    length = min(TEXT_TOKENS, spec.max_input_length, tokens)
    first = spec.positions.offset
    ids = np.arange(first, first + length, dtype=np.int64) % spec.vocab_size
    heads = frozenset({next(iter(sorted(spec.heads - {Head.TOKENS})))})
    return pack([Encoding(ids)] * max(tokens // length, 1), heads, spec.positions)


def remembered(backend: str, dtype: str, spec: ModelSpec, threads: int = 1) -> Curve | None:
    """What was measured here for this backend and architecture, or None. `threads` of one pass."""
    try:
        return Curve(msgspec.json.decode(_file(backend, dtype, spec, threads).read_bytes(), type=list[Point]))
    except (OSError, LoadError, msgspec.DecodeError):
        return None


def remember(curve: Curve, backend: str, dtype: str, spec: ModelSpec, threads: int = 1) -> None:
    """Keep a measurement, unless there is doubt; without a writable cache it is made again next time."""
    if curve.doubt is not None:
        return
    with suppress(OSError, LoadError), whole(_file(backend, dtype, spec, threads)) as part:
        part.write_bytes(msgspec.json.encode(list(curve.points)))


def _file(backend: str, dtype: str, spec: ModelSpec, threads: int) -> Path:
    facts = json.dumps(["all lanes", threads, *machine(), _sizes(spec.config)], sort_keys=True)
    return cache_folder("tuning") / f"{backend}-{dtype}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.json"


def _sizes(config: Mapping[str, object]) -> dict[str, object]:
    """What the arithmetic of a pass depends on."""
    return {key: value for key, value in config.items() if isinstance(value, int) or key in ("model_type", "hidden_act")}


def machine() -> list[object]:
    """What a measurement holds for: the processor, its cores, a GPU, and the versions of libraries."""
    gpu = _gpu()
    return [[processor(), available_cores(), *([] if gpu is None else [gpu])], _versions()]


def processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpu() -> str | None:
    """Of a process that has loaded torch, as one that computes on a GPU has; no other is made to."""
    torch = sys.modules.get("torch")
    return str(torch.cuda.get_device_name()) if torch is not None and torch.cuda.is_available() else None


def _versions() -> dict[str, str]:
    found = {}
    for name in ("onnxruntime", "openvino", "torch"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
