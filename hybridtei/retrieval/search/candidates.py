"""Candidates of a query, in tiers: some vectors find them, others score them; optionally one
candidate a group.

`zscore` adds scores that are normalised for each query: dense and sparse score all candidates
exactly, and each leg's scores get mean 0 and deviation 1. So a leg with no or equal scores changes
no place, and cosines and sums of term weights need no common scale. MaxSim is added for the better
half; the other candidates count as the worst of that half.

Mean and deviation come from the first tier, and need at least `FEW` candidates. If a filter leaves
fewer, they come from a search without the filter. If the whole collection has fewer, `scale_of`
mixes them with the best score.

The first tier has `prefetch_limit` points of each leg. If a page needs more, further tiers follow,
each twice as deep. Their scores have the scale of the first: mean and deviation are the first
tier's, and places count on. A tier depends only on the query, not on the page, so no point is on
two pages; a page's points are in the order of their scores, whichever tier found them. With groups,
a tier excludes groups found before, so a document with thousands of chunks hides no other document.
A document is known by its source and its id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter_ns
from typing import Any, Literal

import numpy as np

from hybridtei.batch import runs
from hybridtei.inference.tasks.rerank import maxsim
from hybridtei.outputs import Floats
from hybridtei.retrieval.ingest.chunking import DOCUMENT_ID, SOURCE
from hybridtei.retrieval.search.fusion import (
    FEW,
    Column,
    Legs,
    complete,
    normalised,
    reciprocal_ranks,
    scale_of,
    weighted_sum,
)
from hybridtei.retrieval.search.options import CheckedOptions, Stage, StageScore
from hybridtei.retrieval.store.base import (
    MULTIVECTOR,
    NAMES,
    SPARSE,
    PayloadBudget,
    PointId,
    Selector,
    Store,
    Stored,
    best_points,
    sort_points,
)
from hybridtei.retrieval.store.plan import PACKED, PackedFormat
from hybridtei.retrieval.store.query import (
    MAX_LIMIT,
    Filter,
    Match,
    PayloadKey,
    Query,
    ValuesCount,
    of_ids,
)
from hybridtei.system.own_thread import OwnThreads

# The depth of a search made only for statistics
ENOUGH = 100
# Significant digits of a sum; further digits are float32 rounding, which differs between engines
DIGITS = {"rrf": 9}
DIGITS_OF_FLOATS = 5
# MaxSim scores the best 1 / MAXSIM_SHARE of the candidates; a larger share did not improve quality
MAXSIM_SHARE = 2
# Names in keys of the payload
GROUPS = {"document": (DOCUMENT_ID, SOURCE)}
# Candidates whose packed multi-vectors are in memory at a time
READ_AT_ONCE = 256
# Candidates whose payloads are read with their packed multi-vectors: one call instead of two.
READ_WHOLE = 32
# Of packed multi-vectors that are scored on the event loop: less work than handing it to a thread.
INLINE_CHARACTERS = 10_000
# Of their vectors as floats; a single candidate may have more
MAX_FLOAT_BYTES = 64_000_000

# The values of a group's keys; only the first is there in any case
Group = tuple[int | str | None, ...]


@dataclass(slots=True)
class Candidate:
    """A point, its score, its legs' scores, and the parts of it that were read.

    `legs`: score and place by name. `more`: the number of further points of its group in the tier.
    `is_read`: the payload, and vectors if they are needed, are there.
    """

    id: PointId
    score: float = 0.0
    legs: dict[str, StageScore] = field(default_factory=dict)
    group: Group | None = None
    more: int | None = None
    probability: float | None = None
    payload: dict[str, Any] = field(default_factory=dict)
    vectors: Mapping[str, Any] = field(default_factory=dict)
    is_read: bool = False

    def take(self, record: Stored) -> None:
        """Keep what was read of the point."""
        self.payload, self.vectors, self.is_read = record.payload, record.vector, True


@dataclass(slots=True)
class Candidates:
    """The candidates of one query, found as pages need them.

    `options`: with a mode, as `Searcher` sets it. `packed`: the format of multi-vectors stored as
    bytes, if any. `max_points`: the bound of all tiers' depths when points are grouped. `budget`:
    of the group keys' values. `payload`: what the page needs of payloads, if it needs nothing else.
    `keys`: of the groups; none without groups.
    """

    store: Store
    collection: str
    legs: Legs
    options: CheckedOptions
    packed: PackedFormat | None = None
    max_points: int = MAX_LIMIT
    budget: PayloadBudget | None = None
    payload: Selector = False
    # The collection's names of our kinds of vectors, where they differ
    names: Mapping[str, str] = field(default_factory=dict)
    keys: tuple[str, ...] = field(init=False)
    # True if a page may have candidates of several tiers
    has_tiers: bool = False
    # Leg -> (mean, deviation) in the first tier
    _scale: dict[str, tuple[float, float]] = field(default_factory=dict)
    # Leg -> places of the tiers before, if these are excluded from the next one
    _places: dict[str, int] = field(default_factory=dict)
    _stages: dict[str, Stage] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.keys, group_by = (), self.options.group_by
        if group_by is not None:
            self.keys = GROUPS.get(group_by, (group_by,))

    @property
    def stages(self) -> list[Stage]:
        """Each leg's time and number of points."""
        return list(self._stages.values())

    async def best(self, count: int) -> list[Candidate]:
        """The best `count` candidates, or all of them, tier by tier. Raises the errors of
        `Store.query`."""
        options = self.options
        best: list[Candidate] = []
        # Also those below the threshold
        seen: dict[PointId, Candidate] = {}
        depth, spent = options.prefetch_limit, 0
        while len(best) < count and self.legs.finders:
            query_filter = options.query_filter
            if self.keys and seen:
                query_filter = _without(self.keys, list(seen.values()), query_filter)
            tier, is_last = await self._tier(depth, query_filter, seen, keys=self.keys)
            for candidate in tier:
                seen[candidate.id] = candidate
            candidates, threshold = tier, options.score_threshold
            if threshold is not None:
                tier = [candidate for candidate in tier if candidate.score >= threshold]
            self.has_tiers = bool(best)
            best += _one_a_group(tier) if self.keys else tier
            # The legs may find only points of earlier tiers: go deeper
            is_last = is_last or (not candidates and depth == MAX_LIMIT)
            spent += depth
            depth = min(2 * depth, MAX_LIMIT)
            if is_last or (self.keys and spent + depth > self.max_points):
                break
            # No point of a tier reaches the threshold: deeper ones do not either
            if candidates and not tier:
                break
        return best[:count]

    async def _tier(
        self,
        depth: int,
        query_filter: Filter | None,
        before: Mapping[PointId, Candidate],
        *,
        keys: tuple[str, ...],
    ) -> tuple[list[Candidate], bool]:
        """(each leg's points that are not in `before`, nor of their groups, the best first; True if
        the store has no others)."""
        lists = await self._lists(depth, query_filter, keys)
        candidates = _gathered(lists, before, keys, self._places)
        is_last = max(map(len, lists.values())) < depth
        if keys:
            for leg, points in lists.items():
                self._places[leg] = self._places.get(leg, 0) + len(points)
        if not candidates:
            return [], is_last
        unfiltered = await self._unfiltered(candidates, depth, query_filter)
        totals = await self._totals(candidates, lists, depth)
        mode = self.options.mode or ""
        if mode not in NAMES and not self.options.rescore:
            totals = totals.round(DIGITS.get(mode, DIGITS_OF_FLOATS))
        for candidate, total in zip(candidates, totals.tolist(), strict=True):
            candidate.score = total
            if candidate.id in unfiltered:
                candidate.score = unfiltered[candidate.id].score
        return sort_points(candidates), is_last

    async def _lists(
        self, depth: int, query_filter: Filter | None, keys: tuple[str, ...]
    ) -> dict[str, list[Stored]]:
        """The best points of each finding leg."""

        async def find(leg: str) -> list[Stored]:
            query = Query(
                using=self.names.get(leg, leg),
                vector=self.legs.vectors[leg],
                limit=depth,
                filter=query_filter,
                exact=self.options.exact,
                oversampling=self.options.oversampling,
                with_payload=keys,
            )
            began = perf_counter_ns()
            points = await best_points(self.store, self.collection, query, budget=self.budget)
            self._note(leg, began, len(points))
            return points

        legs = self.legs.finders
        return dict(zip(legs, await asyncio.gather(*map(find, legs)), strict=True))

    async def _unfiltered(
        self, candidates: Sequence[Candidate], depth: int, query_filter: Filter | None
    ) -> dict[PointId, Candidate]:
        """For few candidates: search without the filter, deep enough for statistics, and set the
        scale by it."""
        is_normalised = self.options.mode == "zscore" and not self.options.rescore
        if (
            not is_normalised
            or self._scale
            or len(candidates) >= FEW
            or (query_filter is None and depth >= ENOUGH)
        ):
            return {}
        # Sets the scale
        tier, _ = await self._tier(max(depth, ENOUGH), None, {}, keys=())
        return {candidate.id: candidate for candidate in tier}

    async def _totals(
        self, candidates: list[Candidate], lists: Mapping[str, Sequence[Any]], depth: int
    ) -> Column:
        """Each candidate's score: MaxSim, one leg's score, or the fusion of all legs' places or
        scores."""
        mode, weights = self.options.mode, self.legs.weights
        if self.options.rescore:
            await self._score(MULTIVECTOR, candidates)
            return _column(candidates, MULTIVECTOR, "score")
        if mode in NAMES:
            return _column(candidates, mode, "score")
        if mode == "rrf":
            return reciprocal_ranks(
                {leg: _column(candidates, leg, "rank") for leg in lists},
                weights,
                self.options.rrf_k,
            )
        await self._complete(candidates, lists, depth)
        if mode == "zscore":
            return await self._normalised(candidates, depth)
        for leg in [leg for leg in weights if leg not in lists]:
            await self._score(leg, candidates)
        shares = dict(weights)
        if MULTIVECTOR in shares:
            # MaxSim is a sum over the query's rows: divide it to their mean
            shares[MULTIVECTOR] /= len(self.legs.vectors[MULTIVECTOR])
        return weighted_sum({leg: _column(candidates, leg, "score") for leg in weights}, shares)

    async def _complete(
        self, candidates: Sequence[Candidate], lists: Mapping[str, Sequence[Any]], depth: int
    ) -> None:
        """Score candidates also by the legs that did not find them."""
        scores = []
        for leg, points in lists.items():
            missing = [candidate for candidate in candidates if leg not in candidate.legs]
            if leg == SPARSE and len(points) < depth:
                # The sparse leg has found all points that share a term with the query
                for candidate in missing:
                    candidate.legs[SPARSE] = StageScore(0.0, None)
            elif missing:
                scores.append(self._score(leg, missing))
        if scores:
            await asyncio.gather(*scores)

    async def _normalised(self, candidates: list[Candidate], depth: int) -> Column:
        """The sum of normalised scores, with MaxSim for the better half."""
        weights = self.legs.weights
        # A multi-vector that scores what the other legs found
        has_maxsim = MULTIVECTOR in weights and MULTIVECTOR not in self.legs.finders
        legs = [*self.legs.finders]
        if has_maxsim:
            legs.append(MULTIVECTOR)
        total = np.zeros(len(candidates))
        for leg in legs:
            if leg not in self.legs.finders:
                best = np.argsort(-total, kind="stable")[: max(depth // MAXSIM_SHARE, 1)]
                await self._score(leg, [candidates[place] for place in best])
            column = complete(_column(candidates, leg, "score"))
            # The first tier sets the leg's scale
            if leg not in self._scale:
                self._scale[leg] = scale_of(column)
            total += normalised(column, *self._scale[leg], weights[leg])
        return total

    async def _score(self, leg: str, candidates: Sequence[Candidate]) -> None:
        """Give candidates a leg's exact score. Without its vector a candidate gets none; without a
        sparse vector, 0."""
        if not candidates:
            return
        ids = [candidate.id for candidate in candidates]
        vector = self.legs.vectors[leg]
        began = perf_counter_ns()
        if leg == MULTIVECTOR and self.packed is not None:
            scores = await self._packed_scores(candidates, vector, self.packed)
            self._note(leg, began, len(scores))
        else:
            query = Query(
                using=self.names.get(leg, leg),
                vector=vector,
                limit=len(ids),
                filter=of_ids(ids),
                exact=True,
            )
            points = await self.store.query(self.collection, query)
            self._note(leg, began, len(points))
            scores = {point.id: point.score for point in points}
            if leg == SPARSE:
                scores = dict.fromkeys(ids, 0.0) | scores
        for candidate in candidates:
            if candidate.id in scores:
                rank = candidate.legs.get(leg, NOT_FOUND).rank
                candidate.legs[leg] = StageScore(scores[candidate.id], rank)

    async def _packed_scores(
        self, candidates: Sequence[Candidate], rows: Floats, packed: PackedFormat
    ) -> dict[PointId, float]:
        """MaxSim of each candidate that has a multi-vector. Few candidates keep the payload that
        the same call reads."""
        by_id, payload = {candidate.id: candidate for candidate in candidates}, self.payload
        selector: Selector = [PACKED]
        is_whole = len(by_id) <= READ_WHOLE
        if isinstance(payload, bool) or PACKED in payload:
            is_whole = False
        elif is_whole:
            # A mapping excludes only the packed multi-vector
            selector = True if isinstance(payload, Mapping) else [PACKED, *payload]
        ids, scores = list(by_id), dict[PointId, float]()
        for begin in range(0, len(ids), READ_AT_ONCE):
            records = await self.store.retrieve(
                self.collection, ids[begin : begin + READ_AT_ONCE], with_payload=selector
            )
            work = partial(_maxsims, records, rows, packed)
            characters = sum([len(record.payload.get(PACKED, "")) for record in records])
            if characters <= INLINE_CHARACTERS:
                scores |= work()
            else:
                scores |= await _THREADS.run(work)
            if not is_whole:
                continue
            for record in records:
                by_id[record.id].take(record)
                record.payload.pop(PACKED, None)
        return scores

    def _note(self, leg: str, began_ns: int, points: int) -> None:
        """Add a call's time and points to its leg's."""
        before = self._stages.get(leg, Stage(leg, 0.0, 0))
        spent_ms = before.milliseconds + (perf_counter_ns() - began_ns) / 1e6
        self._stages[leg] = Stage(leg, round(spent_ms, 3), before.candidates + points)


def _gathered(
    lists: Mapping[str, Sequence[Stored]],
    before: Mapping[PointId, Candidate],
    keys: tuple[str, ...],
    places: Mapping[str, int],
) -> list[Candidate]:
    """One candidate for each point, with its score and place in each list. `places`: of each leg's
    points before the first of the list."""
    candidates: dict[PointId, Candidate] = {}
    # A store reads a value of another type otherwise than `group_of`
    groups: set[Group | None] = set()
    for candidate in before.values():
        groups.add(candidate.group)
    groups.discard(None)
    for leg, points in lists.items():
        for place, point in enumerate(points, places.get(leg, 0) + 1):
            if point.id in before:
                continue
            if point.id not in candidates:
                group = group_of(point, keys)
                if group in groups:
                    continue
                candidates[point.id] = Candidate(point.id, group=group)
            candidates[point.id].legs[leg] = StageScore(point.score, place)
    return list(candidates.values())


NOT_FOUND = StageScore(np.nan, None)


def _column(candidates: Sequence[Candidate], leg: str, part: Literal["score", "rank"]) -> Column:
    """Each candidate's score or place in a leg; NaN without one."""
    values = [getattr(each.legs.get(leg, NOT_FOUND), part) for each in candidates]
    return np.array(values, np.float64)


def _one_a_group(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The best candidate of each group, with the number of the others. A candidate without a group
    is its own group."""
    groups: dict[Any, list[Candidate]] = {}
    for candidate in candidates:
        # An id is no group, which is a tuple
        groups.setdefault(candidate.group or candidate.id, []).append(candidate)
    best: list[Candidate] = []
    for first, *others in groups.values():
        first.more = len(others)
        best.append(first)
    return best


def group_of(point: Stored, keys: Sequence[str]) -> Group | None:
    """The text or whole number under each dotted key, also in a list of one, else None; None
    without keys or a value of the first, and for a point whose number is its document's id: 1 is
    not "1"."""
    values: list[int | str | None] = []
    for key in keys:
        value: Any = point.payload
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if isinstance(value, list) and len(value) == 1:
            (value,) = value
        values.append(value if type(value) in (int, str) else None)
    is_own = len(keys) > 1 and isinstance(point.id, int) and values[0] == str(point.id)
    if not keys or values[0] is None or is_own:
        return None
    return tuple(values)


def _without(
    keys: Sequence[str], candidates: Sequence[Candidate], query_filter: Filter | None
) -> Filter:
    """The filter, excluding the candidates' groups, and candidates without a group."""
    first, *others = keys
    # A match also finds values in lists of several values, but such points have no group.
    has_one_value = Filter(key=first, values_count=ValuesCount(lt=2))
    # (is it a text?, the other keys' values) -> values of the first key
    values: dict[tuple[Any, ...], list[Any]] = {}
    ungrouped: list[int | str] = []
    for candidate in candidates:
        if candidate.group is None:
            ungrouped.append(candidate.id)
        else:
            value, *rest = candidate.group
            values.setdefault((isinstance(value, str), *rest), []).append(value)
    excluded = []
    for (_, *rest), group in values.items():
        of_others = map(_equal, others, rest)
        match = Match(any=list(dict.fromkeys(group)))
        excluded.append(Filter(must=[Filter(key=first, match=match), has_one_value, *of_others]))
    if ungrouped:
        excluded.append(Filter(has_id=ungrouped))
    return Filter(must=None if query_filter is None else [query_filter], must_not=excluded)


def _equal(key: str, value: int | str | None) -> Filter:
    """The condition that a key has a value, or none."""
    if value is None:
        return Filter(is_empty=PayloadKey(key=key))
    return Filter(key=key, match=Match(value=value))


# Few threads, so that many searches neither use much more than MAX_FLOAT_BYTES nor fill asyncio's
# own pool.
_THREADS = OwnThreads("maxsim", 2)


def _maxsims(records: Sequence[Stored], rows: Floats, packed: PackedFormat) -> dict[PointId, float]:
    """MaxSim of each point, in runs of points with at most `MAX_FLOAT_BYTES` of floats."""
    # Four characters of base64 are 3 bytes. A byte of bits becomes 8 floats, 32 bytes; a byte of
    # int8 becomes a float, 4 bytes
    bytes_a_character = 24 if packed.dtype == "binary" else 3
    packed_of = {
        record.id: str(record.payload[PACKED]) for record in records if PACKED in record.payload
    }
    texts = list(packed_of.values())
    scores: list[float] = []
    for begin, end in runs([bytes_a_character * len(text) for text in texts], MAX_FLOAT_BYTES):
        scores += maxsim(rows, packed.vectors(texts[begin:end]), mean=False).tolist()
    return dict(zip(packed_of, scores, strict=True))
