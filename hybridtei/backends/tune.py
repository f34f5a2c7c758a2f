"""`hybridtei tune`: the curve of every backend that can run a model here; what it finds decides later starts."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from hybridtei.backends import tuning
from hybridtei.backends.base import Backend
from hybridtei.backends.select import PREFERRED, choices, open_backend, why_not
from hybridtei.checkpoint.spec import ModelSpec
from hybridtei.config import EngineConfig, ModelConfig
from hybridtei.errors import LoadError

BAR = 40  # characters of the fastest


def tune(config: ModelConfig, spec: ModelSpec, engine: EngineConfig) -> Iterator[str]:
    """Measure and remember; lines for people as they come."""
    for dtype in [config.dtype] if config.dtype else ["float32", "bfloat16", "int8"]:
        for name in PREFERRED[dtype]:
            if config.backend in ("auto", name):
                yield from _one(msgspec.structs.replace(config, backend=name, dtype=dtype), spec, engine)
        yield from _verdict(msgspec.structs.replace(config, dtype=dtype), spec)


def _one(config: ModelConfig, spec: ModelSpec, engine: EngineConfig) -> Iterator[str]:
    title = f"{config.backend} {config.dtype}"
    reason = why_not(config.backend, config.dtype, spec)
    if reason is not None:
        yield f"{title}: no, {reason}"
        return
    try:
        backend = open_backend(config, spec, bulk_niceness=engine.bulk_niceness)
    except LoadError as error:
        yield f"{title}: no, {error}"
        return
    yield f"{title}, one lane of {len(backend.lanes)}:"
    try:
        yield from _curve(backend, engine)
    finally:
        backend.close()


def _curve(backend: Backend, engine: EngineConfig) -> Iterator[str]:
    points: list[tuning.Point] = []
    for point in tuning.measure(backend, engine.max_batch_tokens):
        points.append(point)
        bar = "█" * round(BAR * point.tokens_per_s / tuning.Curve(points).best_rate)
        yield f"  {point.tokens:6} tokens a pass  {point.tokens_per_s:9.0f} tokens/s  {bar}"
    curve = tuning.Curve(points)
    tuning.remember(curve, backend.name, backend.dtype, backend.spec)
    yield f"  budget: {curve.budget()} tokens a pass"


def _verdict(config: ModelConfig, spec: ModelSpec) -> Iterator[str]:
    if config.backend != "auto":
        return
    try:
        best = choices(config, spec)[0]
    except LoadError:
        return
    yield f"--dtype {config.dtype} runs on {best.name}: {best.why}"
