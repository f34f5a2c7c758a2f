"""Ranking on a budget of time: documents are scored in their order, in passes whose size follows
from the passes before, until the time is used. A calculation: callers have the clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from msgspec import structs

from hybridtei.inference.tasks.rerank import Ranking, RerankByVectors, Scored
from hybridtei.outputs import Floats

# Documents of the first pass, whose pace is unknown. Later passes take half of the time that is
# left, but no fewer documents than these if they fit into all of it.
FEW_DOCUMENTS = 4
# A pass has at most this many times the documents before it: the first ones may be repeated or
# blank, and cost nothing.
GROWTH = 4
# Documents of a pass, which others wait for
MOST_DOCUMENTS = 32
# The cost of a short pair, and of a token at most
LEAST_CHARACTERS, CHARACTERS_PER_TOKEN = 40, 5


class TimedRanking:
    """The passes of one ranking. Their pace is of this ranking alone, so that no other request
    changes it."""

    def __init__(self, task: Ranking, max_input_length: int) -> None:
        self._task = task
        self._timeless = structs.replace(task.options, budget_ms=None, deadline_ns=None)
        windows = task.options.max_chunks_per_doc or 1
        longest = max_input_length * CHARACTERS_PER_TOKEN * windows
        of_query = LEAST_CHARACTERS + len(task.query)
        self._costs = [min(of_query + len(text), longest) for text in task.inputs]
        self._parts: list[Scored] = []
        self._spent_ns = 0
        # The documents that are scored
        self.done = 0

    def following(self, left_ns: int) -> Ranking | None:
        """The next pass, if `left_ns` is left; None if no time is left, or no document."""
        pace_ns: float | None = None
        bound = FEW_DOCUMENTS
        if self.done:
            pace_ns = self._spent_ns / sum(self._costs[: self.done])
            bound = min(GROWTH * self.done, MOST_DOCUMENTS)
        count = fitting(self._costs[self.done : self.done + bound], left_ns, pace_ns)
        if count == 0:
            return None
        documents = self._task.inputs[self.done : self.done + count]
        part = replace(self._task, inputs=documents, options=self._timeless)
        if self._parts and isinstance(part, RerankByVectors):
            part = part.knowing(self._parts[0])
        return part

    def scored(self, part: Scored, spent_ns: int) -> None:
        """Note the answer of the pass, and its time."""
        self._parts.append(part)
        self._spent_ns += spent_ns
        self.done += len(part.scores)

    def answer(self) -> Scored:
        """The scores of all documents; those that no pass has scored get the lowest."""
        rest = len(self._costs) - self.done
        if not self._parts:
            return Scored(np.zeros(rest, np.float32), unscored=rest)
        return _with_rest(Scored.concat(self._parts), rest)


def fitting(costs: Sequence[int], left_ns: int, pace_ns: float | None) -> int:
    """The number of documents of these costs to score in one pass. `pace_ns`: of a character."""
    if left_ns <= 0:
        return 0
    if pace_ns is None:
        return min(FEW_DOCUMENTS, len(costs))
    spent_ns = 0.0
    for count, cost in enumerate(costs):
        spent_ns += cost * pace_ns
        if spent_ns > left_ns or (count >= FEW_DOCUMENTS and 2 * spent_ns > left_ns):
            return count
    return len(costs)


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
