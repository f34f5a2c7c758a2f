"""What a line of the log, or a trace, is about: the handler at work, how long it took, and the handler around it.

A leaf: the log reads here which span it writes in, and knows no server. Each request runs in a task of its own, so the current
span is a variable of the context and need not be handed through the rooms.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any

from hybridtei.outputs import Timings

SECOND_NS, MILLISECOND_NS, MICROSECOND_NS = 1_000_000_000, 1_000_000, 1_000

CALLER: ContextVar[str | None] = ContextVar("hybridtei.caller", default=None)


@dataclass(slots=True, eq=False)
class Span:
    """One handler's work on one request. `timings` and `total_ns` are there once it has been computed; `identity` belongs to
    whoever exports it; `caller` is the name of the key that the request came with, if keys have names."""

    name: str
    outer: Span | None = None
    began_ns: int = field(default_factory=perf_counter_ns)
    ended: bool = False
    timings: Timings | None = None
    total_ns: int = 0
    identity: Any = None
    caller: str | None = field(default_factory=CALLER.get)

    def computed(self, timings: Timings, total_ns: int) -> None:
        """The engine's account of the request."""
        self.timings, self.total_ns = timings, total_ns

    def fields(self) -> dict[str, str]:
        """TEI's, in its order; none before there is an account. The caller's, which TEI has not, comes first."""
        caller = {} if self.caller is None else {"key": self.caller}
        if self.timings is None:
            return caller
        return {
            **caller,
            "total_time": human(self.total_ns),
            "tokenization_time": human(self.timings.tokenization_ns),
            "queue_time": human(self.timings.queue_ns),
            "inference_time": human(self.timings.inference_ns),
        }

    def from_outermost(self) -> list[Span]:
        """Those around it, and then itself."""
        chain = [self]
        while (outer := chain[-1].outer) is not None:
            chain.append(outer)
        return chain[::-1]


CURRENT: ContextVar[Span | None] = ContextVar("hybridtei.span", default=None)


def human(duration_ns: int) -> str:
    """As Rust writes a duration: `1.5s`, `5.123ms`, `72.01µs`, `15ns`; exact, without zeros at the end."""
    for unit_ns, digits, unit in ((SECOND_NS, 9, "s"), (MILLISECOND_NS, 6, "ms"), (MICROSECOND_NS, 3, "µs")):
        if duration_ns >= unit_ns:
            whole, rest = divmod(duration_ns, unit_ns)
            return f"{whole}.{rest:0{digits}}".rstrip("0") + unit if rest else f"{whole}{unit}"
    return f"{duration_ns}ns"
