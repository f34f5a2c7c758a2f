"""What is counted and timed per request, under TEI's names, and the headers that tell the same to the client."""

from __future__ import annotations

from time import perf_counter_ns
from typing import Literal, get_args

from hybridtei import errors
from hybridtei.errors import NoInputs
from hybridtei.observability.metrics import Histogram, Registry, duration_buckets, powers_of_two
from hybridtei.observability.tracing import CURRENT
from hybridtei.outputs import Usage

SECOND_NS, MILLISECOND_NS = 1e9, 1_000_000
INPUT_LENGTH_MOST = 2**19  # of the bounds of its histogram

Scope = Literal["embed", "predict"]


def headers_of(usage: Usage) -> list[tuple[bytes, bytes]]:
    """TEI's `x-compute-*` and timing headers; `gpu+optimized` is what it says on every device."""
    elapsed = b"%d" % ((perf_counter_ns() - usage.began_ns) // MILLISECOND_NS)
    times = usage.timings
    return [
        (b"x-compute-type", b"gpu+optimized"),
        (b"x-compute-time", elapsed),
        (b"x-compute-characters", b"%d" % usage.load.characters),
        (b"x-compute-tokens", b"%d" % usage.tokens),
        (b"x-total-time", elapsed),
        (b"x-tokenization-time", b"%d" % (times.tokenization_ns // MILLISECOND_NS)),
        (b"x-queue-time", b"%d" % (times.queue_ns // MILLISECOND_NS)),
        (b"x-inference-time", b"%d" % (times.inference_ns // MILLISECOND_NS)),
    ]


class RequestMetrics:
    """TEI's `te_request_*`, `te_embed_*` and `te_predict_*`."""

    def __init__(self, registry: Registry, max_input_length: int) -> None:
        self._count = registry.counter("te_request_count")
        self._success = registry.counter("te_request_success")
        self._failure = registry.counter("te_request_failure")
        self._left = registry.counter("hybridtei_departed_requests")
        lengths = powers_of_two(min(max_input_length, INPUT_LENGTH_MOST))
        self._input_length = registry.histogram("te_request_input_length", lengths)
        self._of_request = _stages(registry, "request")
        self._scopes = {scope: _ScopeMetrics(registry, scope) for scope in get_args(Scope)}

    def began(self, inputs: int, *, is_batch: bool, scope: Scope = "embed") -> None:
        """A request of `inputs` inputs came in."""
        self._count.add(method=_method(is_batch))
        self._scopes[scope].count.add(inputs)

    def succeeded(self, usage: Usage, *, is_batch: bool, scope: Scope = "embed") -> None:
        """A request was answered: counted, and told to the current span, if there is one."""
        inputs, times, of_scope = usage.load.inputs, usage.timings, self._scopes[scope]
        self._success.add(method=_method(is_batch))
        of_scope.success.add(inputs)
        for length in usage.lengths:
            self._input_length.observe(length)
        total_ns = perf_counter_ns() - usage.began_ns
        span = CURRENT.get()
        if span is not None:
            span.computed(times, total_ns)
        took = (total_ns, times.tokenization_ns, times.queue_ns, times.inference_ns)
        for took_ns, of_request, of_input in zip(took, self._of_request, of_scope.stages, strict=True):
            of_request.observe(took_ns / SECOND_NS)
            of_input.observe(took_ns / SECOND_NS, inputs)

    def dropped(self) -> None:
        """A client went away before its answer."""
        self._failure.add(err="dropped")

    def left(self) -> None:
        """A client went away before its request was read, or before any work on it began."""
        self._left.add()

    def failed(self, error: Exception) -> None:
        """A request was refused or failed."""
        self._failure.add(err=next((name for kind, name in FAILURES if isinstance(error, kind)), "inference"))


class _ScopeMetrics:
    """Of one kind of work, an input at a time."""

    def __init__(self, registry: Registry, scope: Scope) -> None:
        self.count = registry.counter(f"te_{scope}_count")
        self.success = registry.counter(f"te_{scope}_success")
        self.stages = _stages(registry, scope)


def _stages(registry: Registry, scope: str) -> list[Histogram]:
    bounds = duration_buckets()
    return [registry.histogram(f"te_{scope}_{stage}duration", bounds) for stage in STAGES]


STAGES = ("", "tokenization_", "queue_", "inference_")
FAILURES: tuple[tuple[type[Exception], str], ...] = (
    (errors.RequestRefused, "batch_size"),
    (NoInputs, "validation"),
    (errors.InvalidDimensions, "validation"),
    (errors.UnsupportedHead, "model_type"),
    (errors.Overloaded, "overloaded"),
    (errors.TimedOut, "timeout"),
    (errors.AnswerTooLarge, "answer_size"),
    (errors.RequestError, "tokenization"),
)


def _method(is_batch: bool) -> str:
    return "batch" if is_batch else "single"
