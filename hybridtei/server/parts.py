"""A large request in parts, with `--split-large-batches`: as many inputs inside at once as two ordinary requests hold.

The permits of these are taken before the first part begins and held until the last is done: a request that was let in is never
refused in the middle, and never holds more, however many inputs it has. An answer grows with the request, so it is bounded too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from hybridtei.engine.admission import most_of_turns
from hybridtei.engine.service import Answered, EngineService, Task
from hybridtei.errors import EmptyInput, RequestRefused
from hybridtei.outputs import Embeddings, Timings
from hybridtei.tasks.classify import Classified

PARTS_INSIDE = 2
ANSWER_NUMBERS = 16_000_000  # 64 MB as float32, and about three times as much as JSON: ten thousand vectors of 1,600

T = TypeVar("T")
Start = Callable[[], Coroutine[Any, Any, T]]


def too_much_to_answer() -> RequestRefused:
    """Of an answer that would not fit into memory with those of others."""
    return RequestRefused(f"the answer would hold more than {ANSWER_NUMBERS} numbers: send fewer inputs at once")


@dataclass(frozen=True, slots=True)
class Plan:
    """How a request of many inputs goes through: so many inputs a part, so many parts at once, with so many permits."""

    inputs: int
    part: int
    parts_inside: int

    @property
    def permits(self) -> int:
        return min(self.inputs, self.part * self.parts_inside)

    @property
    def turns(self) -> bool:
        """Whether the permits are held for several turns."""
        return self.permits < self.inputs

    def ranges(self) -> Iterator[slice]:
        """Which inputs each part has."""
        return (slice(begin, begin + self.part) for begin in range(0, self.inputs, self.part))


def plan(inputs: int, *, largest: int, permits: int) -> Plan:
    """For more inputs than the `largest` request may have, where all `permits` together may be fewer than that."""
    if inputs <= min(largest, permits):
        return Plan(inputs, inputs, 1)
    most = most_of_turns(permits)
    part = min(largest, most)
    return Plan(inputs, part, min(PARTS_INSIDE, most // part))


async def in_order(starts: Iterator[Start[T]], inside: int) -> list[T]:
    """All results, of which `inside` are worked on at once. Raises what the first by place raises, and starts no more then."""
    done: list[T] = []
    running: list[asyncio.Task[T]] = []
    try:
        for start in starts:
            if len(running) == inside:
                done.append(await running.pop(0))
            running.append(asyncio.ensure_future(start()))
        while running:
            done.append(await running.pop(0))
    finally:
        for left in running:
            left.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return done


async def run_in_parts(service: EngineService, task: Any, plan: Plan) -> Answered[Any]:
    """A task with `inputs`, through the engine. Raises what its first part that fails raises; Overloaded, RequestRefused."""
    numbers = 0

    async def run(part: Task[Any], first: int) -> Answered[Any]:
        nonlocal numbers
        try:
            answered = await service.run(part, inputs=0)
        except EmptyInput as error:
            error.place = None if error.place is None else error.place + first
            raise
        numbers += numbers_in(answered.answer)
        if numbers > ANSWER_NUMBERS:
            raise too_much_to_answer()
        return answered

    def starts() -> Iterator[Start[Answered[Any]]]:
        for inputs in plan.ranges():
            part = replace(task, inputs=task.inputs[inputs])
            yield lambda part=part, first=inputs.start: run(part, first)  # type: ignore[misc]

    with service.admission.inside(plan.permits, turns=plan.turns):
        task.check(service.model.spec)
        parts = await in_order(starts(), plan.parts_inside)
    return Answered(
        _joined([part.answer for part in parts]),
        _lengths(parts),
        mean_timings([(len(part.lengths), part.timings) for part in parts], plan.inputs),
    )


def numbers_in(answer: Any) -> int:
    """How many numbers an answer holds, about: of embeddings; others are small."""
    if not isinstance(answer, Embeddings):
        return 0
    columns: list[Any] = [answer.dense, answer.sparse, answer.multivector, answer.tokens]
    return sum(getattr(column, "values", column).size for column in columns if column is not None)


def mean_timings(shares: Sequence[tuple[int, Timings]], inputs: int) -> Timings:
    """As if all parts had been one, from (inputs of a part, its times). What ran without permits of its own tells how long
    tokenisation took altogether, and of the other times the mean over its inputs."""
    return Timings(
        sum(times.tokenization_ns for _, times in shares) // inputs,
        sum(share * times.queue_ns for share, times in shares) // inputs,
        sum(share * times.inference_ns for share, times in shares) // inputs,
    )


def _lengths(parts: Sequence[Answered[Any]]) -> list[int]:
    return [length for part in parts for length in part.lengths]


def _joined(answers: Sequence[Any]) -> Any:
    if isinstance(answers[0], Embeddings):
        return Embeddings.concat(answers)
    if isinstance(answers[0], Classified):
        return Classified(np.concatenate([answer.scores for answer in answers]), answers[0].labels)
    return [item for answer in answers for item in answer]
