"""Ranking on a budget of time: documents are scored in their order, in passes whose cost is known
from those before, until the time is used."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter_ns

import numpy as np
from msgspec import structs

from hybridtei.inference.tasks.rerank import Ranking, RerankByVectors, Scored
from hybridtei.outputs import Cut, Floats, Usage
from hybridtei.server.context import CHUNK_DOCUMENTS, Context, NameOf, checked, load_of_pairs

# Documents of a pass of a model whose pace is unknown. Later passes take half of the time that is
# left, but no fewer documents than these if they fit into all of it.
FEW_DOCUMENTS = 4
# The cost of a short pair, and of a token at most
LEAST_CHARACTERS, CHARACTERS_PER_TOKEN = 40, 5
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
    """Score documents in their order until the deadline, but at least one. The others get the
    lowest score."""
    documents, service = task.inputs, context.service
    timeless = structs.replace(task.options, deadline_ns=None)
    costs = _costs(context, task)
    bounds = context.bounds_of_ranking(task)
    parts: list[Scored] = []
    usages: list[Usage] = []
    done = 0

    # An error names a document by its place in the request, not in the pass
    def name_of(place: int) -> str:
        return f"{field}[{done + place}]"

    # Later passes take no further permits: a full server refuses the whole request or nothing
    with (
        service.admission.inside(bounds.permits, turns=bounds.turns),
        service.admission.carrying(bounds.permits),
    ):
        while done < len(documents):
            left_ns = deadline_ns - perf_counter_ns()
            count = fitting(costs[done : done + CHUNK_DOCUMENTS], left_ns, service.pace_ns)
            if count == 0 and parts:
                break
            end = done + max(count, 1)
            part = replace(task, inputs=documents[done:end], options=timeless)
            if parts and isinstance(part, RerankByVectors):
                part = part.knowing(parts[0])
            began_ns = perf_counter_ns()
            try:
                async with asyncio.timeout(left_ns / NS_PER_S if parts else None):
                    scored, usage = await rank(context, part, field and name_of)
            except TimeoutError:
                break
            # The mean pace of a character, in which this pass is a third
            pace_ns = (perf_counter_ns() - began_ns) / sum(costs[done:end])
            service.pace_ns = (2 * (service.pace_ns or pace_ns) + pace_ns) / 3
            cuts = [Cut(done + cut.index, cut.characters) for cut in usage.cuts]
            usages.append(replace(usage, cuts=cuts))
            parts.append(scored)
            done = end
    return _with_rest(Scored.concat(parts), len(documents) - done), Usage.total(usages)


def fitting(costs: Sequence[int], left_ns: int, pace_ns: float | None) -> int:
    """The number of documents of these costs to score in one pass. `pace_ns`: of a character."""
    if pace_ns is None:
        return min(FEW_DOCUMENTS, len(costs))
    spent_ns = 0.0
    for count, cost in enumerate(costs):
        spent_ns += cost * pace_ns
        if spent_ns > left_ns or (count >= FEW_DOCUMENTS and 2 * spent_ns > left_ns):
            return count
    return len(costs)


def _costs(context: Context, task: Ranking) -> list[int]:
    """The characters of each document that the model reads, with the query's."""
    longest = (
        context.service.reader.max_input_length
        * CHARACTERS_PER_TOKEN
        * (task.options.max_chunks_per_doc or 1)
    )
    of_query = LEAST_CHARACTERS + len(task.query)
    return [min(of_query + len(text), longest) for text in task.inputs]


def _with_rest(scored: Scored, rest: int) -> Scored:
    """Add documents that were not scored."""
    if rest == 0:
        return scored
    logits = scored.logits
    if logits is not None:
        logits = _padded(logits, rest)
    windows = [*scored.windows, *[None] * rest] if scored.windows else ()
    spans = [*scored.spans, *[()] * rest] if scored.spans else ()
    return replace(
        scored,
        scores=_padded(scored.scores, rest),
        logits=logits,
        windows=windows,
        spans=spans,
        unscored=rest,
    )


def _padded(scores: Floats, rest: int) -> Floats:
    return np.concatenate([scores, np.full(rest, scores.min(), np.float32)])
