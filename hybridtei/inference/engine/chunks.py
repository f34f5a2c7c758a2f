"""The chunks of a large request: run, bounded and joined."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from msgspec import Struct

from hybridtei.errors import RequestError
from hybridtei.inference.engine.core import SHORT_TOKENS
from hybridtei.inference.tasks.base import Task
from hybridtei.limits import Bounds
from hybridtei.outputs import Cut, Timings

if TYPE_CHECKING:
    from hybridtei.inference.backends.base import Backend

T = TypeVar("T")
Start = Callable[[], Coroutine[Any, Any, T]]
# 1 / GATHERERS of the permits is the number of calls that may read their inputs at a time
GATHERERS = 16


def permits_for(permits: int, backend: Backend, budget_tokens: int) -> int:
    """Return the default number of permits for a backend: `permits`, or on a GPU the number of
    texts of `SHORT_TOKENS` in all concurrent passes. With fewer permits, passes of short texts
    would not reach their budget of tokens."""
    passes = len(backend.lanes) + backend.ahead if backend.ahead else 0
    return max(permits, passes * budget_tokens // SHORT_TOKENS)


class Answered(Struct, Generic[T], frozen=True):
    """The answer of a task or a chunk, its number of inputs, each encoding's tokens, its times
    (means over the inputs), and the inputs that were cut."""

    answer: T
    size: int
    lengths: list[int]
    timings: Timings
    cuts: Sequence[Cut] = ()


async def run_in_chunks(
    task: Task[T],
    chunks: Sequence[Task[T]],
    bounds: Bounds,
    run_chunk: Callable[[Task[T], int], Coroutine[Any, Any, Answered[T]]],
) -> Answered[T]:
    """Run the chunks of a large task by `run_chunk`, and join their answers. Raises the first
    chunk's error."""
    place, numbers = 0, 0

    async def run(chunk: Task[T], begin: int) -> Answered[T]:
        nonlocal numbers
        try:
            answered = await run_chunk(chunk, chunk.size)
        except RequestError as error:
            if error.place is not None:
                error.place += begin
            raise
        numbers += chunk.numbers(answered.answer)
        bounds.check(numbers)
        return answered

    def starts(chunks: Iterable[Task[T]]) -> Iterator[Start[Answered[T]]]:
        nonlocal place
        for chunk in chunks:
            yield partial(run, chunk, place)
            place += chunk.size

    if not task.needs_first:
        return joined(task, await in_order(starts(chunks), bounds.at_once))
    (start,) = starts(chunks[:1])
    first = await start()
    others = (chunk.knowing(first.answer) for chunk in chunks[1:])
    return joined(task, [first, *await in_order(starts(others), bounds.at_once)])


async def in_order(starts: Iterator[Start[T]], at_once: int) -> list[T]:
    """Return all results in order; `at_once` run concurrently. Raises the error of the first
    failing one, and starts no more."""
    done: list[T] = []
    running: list[asyncio.Task[T]] = []
    try:
        for start in starts:
            if len(running) == at_once:
                done.append(await running.pop(0))
            running.append(asyncio.ensure_future(start()))
        while running:
            done.append(await running.pop(0))
    finally:
        for unfinished in running:
            unfinished.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return done


def joined(task: Task[T], done: Sequence[Answered[T]], *, same_inputs: bool = False) -> Answered[T]:
    """Join chunks to the answer of the whole task. Times are means over all inputs. `same_inputs`:
    the chunks are parts of the same inputs, one after the other."""
    inputs = max(task.size, 1)
    timings = Timings(
        sum(chunk.size * chunk.timings.tokenization_ns for chunk in done) // inputs,
        sum(chunk.size * chunk.timings.queue_ns for chunk in done) // inputs,
        sum(chunk.size * chunk.timings.inference_ns for chunk in done) // inputs,
    )
    answer = task.join([chunk.answer for chunk in done])
    lengths: list[int] = []
    cuts: list[Cut] = []
    begin = 0
    for chunk in done:
        lengths += chunk.lengths
        cuts += [Cut(begin + cut.index, cut.characters) for cut in chunk.cuts]
        if not same_inputs:
            begin += chunk.size
    return Answered(answer, task.size, lengths, timings, cuts)
