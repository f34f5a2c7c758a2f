"""`hybridtei tune`: tokens a second of each backend and precision by the size of a pass, and the
flags to use.

It stores nothing, and servers do not measure at start: `backends.base.busy_tokens` uses tables that
this command printed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from time import perf_counter

import msgspec

from hybridtei.batch import Head
from hybridtei.config import EngineConfig, ModelConfig
from hybridtei.errors import LoadError
from hybridtei.inference.backends.base import Backend, made_up
from hybridtei.inference.backends.select import PREFERRED, open_backend, why_not
from hybridtei.models.checkpoint.spec import ModelSpec
from hybridtei.system.machine import LaneKind

FIRST_TOKENS = 64
# The largest measured pass, in sizes of the server's passes
BEYOND = 2
# Tokens of each measured text
TEXT_TOKENS = 64
# Runs per size; the fastest counts, since other programs can only slow a run down
PASSES = 5
# A smaller pass is large enough at this share of the best rate
FLAT = 0.97

# Size of a pass -> tokens a second of all bulk lanes; the smallest size first
Rates = dict[int, float]


def tune(config: ModelConfig, spec: ModelSpec, engine: EngineConfig) -> Iterator[str]:
    """Measure the choices that `config` leaves open. Yield lines for people, at the end the flags,
    the fastest first."""
    best = dict[str, float]()
    for dtype in [config.dtype] if config.dtype else ["float32", "bfloat16", "int8"]:
        for name in PREFERRED[dtype]:
            if config.backend in ("auto", name):
                rates = yield from _table(
                    msgspec.structs.replace(config, backend=name, dtype=dtype), spec, engine
                )
                if rates:
                    best[f"--backend {name} --dtype {dtype}"] = max(rates.values())
    if best:
        yield "flags to use, the fastest first; bfloat16 and int8 change vectors a little:"
    for flags in sorted(best, key=lambda flags: -best[flags]):
        yield f"  {flags:35} {best[flags]:9.0f} tokens/s"


def _table(
    config: ModelConfig, spec: ModelSpec, engine: EngineConfig
) -> Generator[str, None, Rates]:
    title = f"{config.backend} {config.dtype}"
    rates = Rates()
    try:
        reason = why_not(config.backend, config.dtype, spec)
        if reason is not None:
            raise LoadError(reason)
        backend = open_backend(config, spec, bulk_niceness=engine.bulk_niceness)
    except LoadError as error:
        yield f"{title}: no, {error}"
        return rates
    with closing(backend):
        yield f"{title}, one lane times {backend.lanes.count(LaneKind.BULK)}:"
        budget = min(backend.busy_tokens, engine.max_batch_tokens)
        for tokens, rate in measure(backend, min(BEYOND * budget, engine.max_batch_tokens)):
            rates[tokens] = rate
            yield f"  {tokens:6} tokens a pass  {rate:9.0f} tokens/s"
        yield (
            f"  {enough(rates)} tokens are enough for {FLAT:.0%} of the best rate; a pass of the "
            f"server takes up to {budget}"
        )
    return rates


def enough(rates: Mapping[int, float]) -> int:
    """The smallest size that is about as fast as the fastest one. `rates` is not empty."""
    return min(tokens for tokens, rate in rates.items() if rate >= FLAT * max(rates.values()))


def measure(
    backend: Backend, limit: int, *, clock: Callable[[], float] = perf_counter
) -> Iterator[tuple[int, float]]:
    """(size, tokens a second) of each power of two from FIRST_TOKENS to `limit`.

    A pass runs in one lane, and its rate is multiplied by the number of bulk lanes. So backends
    with one core a pass compare with backends whose pass takes all cores.
    """
    lanes, size = max(backend.lanes.count(LaneKind.BULK), 1), FIRST_TOKENS
    with ThreadPoolExecutor(1, initializer=backend.enter_lane, initargs=(LaneKind.BULK,)) as lane:
        while size <= max(limit, FIRST_TOKENS):
            yield size, lanes * lane.submit(_rate, backend, size, clock).result()
            size *= 2


def _rate(backend: Backend, tokens: int, clock: Callable[[], float]) -> float:
    spec = backend.spec
    seconds: list[float] = []
    length = min(TEXT_TOKENS, spec.max_input_length, tokens)
    lengths = max(tokens // length, 1) * [length]
    # Any of the model's heads, the same in each run
    batch = made_up(spec, lengths, frozenset({min(spec.heads - {Head.TOKENS})}))
    for _ in range(PASSES):
        began = clock()
        backend.forward(batch)
        seconds.append(clock() - began)
    return len(batch.input_ids) / min(seconds)
