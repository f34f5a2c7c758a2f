"""What is counted and timed per request, under TEI's names, and the headers that tell the same to the client."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any

from hybridtei import errors
from hybridtei.engine.service import Answered
from hybridtei.metrics import Registry, duration_buckets, powers_of_two
from hybridtei.outputs import Timings
from hybridtei.server.errors import NoInputs, RequestRefused

SECOND_NS, MILLISECOND_NS = 1e9, 1_000_000


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request cost: characters and tokens summed over its inputs, and its times."""

    characters: int
    lengths: list[int]
    timings: Timings
    began_ns: int = field(default_factory=perf_counter_ns)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def headers(self) -> dict[str, str]:
        """TEI's `x-compute-*` and timing headers; `gpu+optimized` is what it says on every device."""
        elapsed = str((perf_counter_ns() - self.began_ns) // MILLISECOND_NS)
        return {
            "x-compute-type": "gpu+optimized",
            "x-compute-time": elapsed,
            "x-compute-characters": str(self.characters),
            "x-compute-tokens": str(self.tokens),
            "x-total-time": elapsed,
            "x-tokenization-time": str(self.timings.tokenization_ns // MILLISECOND_NS),
            "x-queue-time": str(self.timings.queue_ns // MILLISECOND_NS),
            "x-inference-time": str(self.timings.inference_ns // MILLISECOND_NS),
        }


class RequestMetrics:
    """TEI's `te_request_*` and `te_embed_*`."""

    def __init__(self, registry: Registry, max_input_length: int) -> None:
        self._count = registry.counter("te_request_count")
        self._success = registry.counter("te_request_success")
        self._failure = registry.counter("te_request_failure")
        self._embed_count = registry.counter("te_embed_count")
        self._embed_success = registry.counter("te_embed_success")
        self._input_length = registry.histogram("te_request_input_length", powers_of_two(max_input_length))
        self._stages = {
            scope: {stage: registry.histogram(f"te_{scope}_{stage}duration", duration_buckets()) for stage in STAGES}
            for scope in ("request", "embed")
        }

    def began(self, inputs: int, *, is_batch: bool) -> None:
        """A request of `inputs` inputs came in."""
        self._count.add(method=_method(is_batch))
        self._embed_count.add(inputs)

    def succeeded(self, usage: Usage, *, is_batch: bool) -> None:
        """A request was answered."""
        self._success.add(method=_method(is_batch))
        self._embed_success.add(len(usage.lengths))
        for length in usage.lengths:
            self._input_length.observe(length)
        total = perf_counter_ns() - usage.began_ns
        times = usage.timings
        stages = {"": total, "tokenization_": times.tokenization_ns, "queue_": times.queue_ns, "inference_": times.inference_ns}
        for stage, took_ns in stages.items():
            self._stages["request"][stage].observe(took_ns / SECOND_NS)
            for _ in usage.lengths:
                self._stages["embed"][stage].observe(took_ns / SECOND_NS)

    def dropped(self) -> None:
        """A client went away before its answer."""
        self._failure.add(err="dropped")

    def failed(self, error: Exception) -> None:
        """A request was refused or failed."""
        self._failure.add(err=next((name for kind, name in FAILURES if isinstance(error, kind)), "inference"))


STAGES = ("", "tokenization_", "queue_", "inference_")
FAILURES: tuple[tuple[type[Exception], str], ...] = (
    (RequestRefused, "batch_size"),
    (NoInputs, "validation"),
    (errors.InvalidDimensions, "validation"),
    (errors.UnsupportedHead, "model_type"),
    (errors.Overloaded, "overloaded"),
    (errors.RequestError, "tokenization"),
)


def usage_of(answered: Answered[Any], characters: int, began_ns: int) -> Usage:
    """From the engine's account of a request."""
    return Usage(characters, list(answered.lengths), answered.timings, began_ns)


def _method(is_batch: bool) -> str:
    return "batch" if is_batch else "single"
