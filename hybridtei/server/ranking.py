"""Ranking by a served model: in chunks, or until a deadline."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from time import perf_counter_ns

from hybridtei.inference.tasks.budget import TimedRanking
from hybridtei.inference.tasks.rerank import Ranking, Scored
from hybridtei.outputs import Cut, Load, Timings, Usage
from hybridtei.server.context import Context, NameOf, checked, load_of_pairs

NS_PER_S = 1e9


async def rank(
    context: Context,
    task: Ranking,
    field: str | NameOf | None = None,
) -> tuple[Scored, Usage]:
    """Score documents in chunks, or until the task's deadline. `field`: as for `Context.run`.
    Raises HybridTeiError."""
    if task.options.deadline_ns is not None:
        return await _rank_within(context, task, task.options.deadline_ns, field)
    load = load_of_pairs(task.query, task.inputs)
    bounds = context.bounds_of_ranking(task)
    return await context.run(
        task,
        load,
        bounds,
        scope="predict",
        check=checked,
        field=field,
    )


async def _rank_within(
    context: Context, task: Ranking, deadline_ns: int, field: str | NameOf | None
) -> tuple[Scored, Usage]:
    """Score documents in their order until the deadline. A pass that is not done by then is
    cancelled, and its documents are not scored."""
    service = context.service
    bounds = context.bounds_of_ranking(task)
    timed = TimedRanking(task, service.reader.max_input_length)
    # Nothing, if no pass is done in time
    usages = [Usage(Load(0, 0, is_batch=True), [], Timings(), perf_counter_ns())]

    # An error names a document by its place in the request, not in the pass
    def name_of(place: int) -> str:
        return f"{field}[{timed.done + place}]"

    # Later passes take no further permits: a full server refuses the whole request or nothing
    with (
        service.admission.inside(bounds.permits, is_large=bounds.turns),
        service.admission.carrying(bounds.permits),
    ):
        while part := timed.following(deadline_ns - perf_counter_ns()):
            began_ns = perf_counter_ns()
            try:
                async with asyncio.timeout((deadline_ns - began_ns) / NS_PER_S):
                    scored, usage = await rank(context, part, field and name_of)
            except TimeoutError:
                break
            cuts = [Cut(timed.done + cut.index, cut.characters) for cut in usage.cuts]
            usages.append(replace(usage, cuts=cuts))
            timed.scored(scored, perf_counter_ns() - began_ns)
    return timed.answer(), Usage.total(usages)
