"""The search for the most expensive request: every route in turn, then variants of the most
expensive ones."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from random import Random

import msgspec

from conformance.amplify.request import Request, route_of
from conformance.amplify.shapes import Shapes
from conformance.amplify.target import Cost

MAX_BYTES = 64_000_000
# The clients of one request at once, and the bytes that they send together
MAX_CONNECTIONS, ALL_BYTES = 512, 64_000_000
# Ids, as many as the default --payload-limit takes
LONGEST_BODY = b"[" + b"5," * 999_999 + b"5]"
DECODINGS = 3
# Of the requests; the others are like the worst so far
FRESH_SHARE = 0.8
# Of each route, by each measure
ELITE = 8
# The same of those that many clients send
CROWDED = 3
# Of a request that is beyond a bound
REPEATS = 6
# Requests of different routes by each measure
TOLD = 6


def bound_seconds() -> float:
    """The bound of a stall: 0.1 s, or on a slow processor three times what decoding of the longest
    body takes, since a server cannot do less than decode it."""
    seconds = []
    for _ in range(DECODINGS):
        begin = time.process_time()
        msgspec.json.decode(LONGEST_BODY, type=list[int | list[int]])
        seconds.append(time.process_time() - begin)
    return max(0.100, DECODINGS * min(seconds))


MAX_SECONDS = bound_seconds()
# That another client waits for a small answer: 1 s, or more on a slow processor
MAX_WAIT_SECONDS = 10 * MAX_SECONDS
Measure = Callable[[Request], Cost]


@dataclass(frozen=True)
class Case:
    """A request and its cost."""

    request: Request
    cost: Cost

    @property
    def growth(self) -> float:
        """Memory as a multiple of its bound; 0 of several clients, whose bounds others measure."""
        return self.cost.growth_bytes / MAX_BYTES if self.request.connections == 1 else 0.0

    @property
    def stall(self) -> float:
        """The longest step of the event loop as a multiple of its bound; 0 of several clients."""
        return self.cost.stall_seconds / MAX_SECONDS if self.request.connections == 1 else 0.0

    @property
    def wait(self) -> float:
        """What another client waited, as a multiple of its bound."""
        return self.cost.wait_seconds / MAX_WAIT_SECONDS

    @property
    def excess(self) -> float:
        """The largest of its measures; above 1 is too much."""
        return max(measure(self) for measure in MEASURES)


MEASURES = (attrgetter("growth"), attrgetter("stall"), attrgetter("wait"))


@dataclass
class Found:
    """All requests that were sent, by route, and the most expensive, which were repeated if beyond
    a bound."""

    tried: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    cases: list[Case] = field(default_factory=list)
    worst: list[Case] = field(default_factory=list)

    def add(self, case: Case) -> None:
        self.tried[route_of(case.request)] += 1
        self.statuses[case.cost.status] += 1
        self.cases.append(case)


def search(
    measure: Measure,
    shapes: Shapes,
    draw: Random,
    *,
    seconds: float,
    kept: Sequence[Request],
    calls: Callable[[], Request] | None,
    clients: int = MAX_CONNECTIONS,
) -> Found:
    """Send the stored requests, then random ones for `seconds`; then the most expensive from
    `clients` at once, or fewer; then repeat what is beyond a bound. `calls` draws gRPC calls."""
    found = Found()
    for request in kept:
        found.add(Case(request, measure(request)))
    end = time.monotonic() + seconds
    for request in _drawn(shapes, draw, found, calls):
        if time.monotonic() > end:
            break
        found.add(Case(request, measure(request)))
    rpcs = [case for case in found.cases if case.request.method == "RPC"]
    dear = [*_elite(found.cases, CROWDED), *_by_measure(rpcs, CROWDED)]
    for request in {case.request.told(): case.request for case in dear}.values():
        crowd = crowded(request, clients)
        found.add(Case(crowd, measure(crowd)))
    found.worst = [
        _again(measure, case) if case.excess > 1 else case for case in worst_of(found.cases)
    ]
    return found


def _drawn(
    shapes: Shapes, draw: Random, found: Found, calls: Callable[[], Request] | None
) -> Iterator[Request]:
    while True:
        for route in draw.sample(shapes.routes, len(shapes.routes)):
            yield shapes.fresh(route)
            if calls is not None and draw.random() < 0.2:
                yield calls()
            if draw.random() > FRESH_SHARE and (elite := _elite(found.cases)):
                yield shapes.changed(draw.choice(elite).request)


def _elite(cases: Sequence[Case], number: int = ELITE) -> list[Case]:
    """Return the most expensive HTTP requests by each measure, of different routes."""
    return _by_measure([case for case in cases if case.request.method != "RPC"], number)


def _by_measure(cases: Sequence[Case], number: int) -> list[Case]:
    return [case for of in MEASURES for case in _worst(cases, of, number)]


def crowded(request: Request, clients: int) -> Request:
    """The same request from `clients`, or from as many as send `ALL_BYTES` together."""
    sent = max(sum(map(len, request.pieces())), 1)
    return replace(request, connections=min(max(ALL_BYTES // sent, 2), clients))


def _worst(cases: Sequence[Case], of: Callable[[Case], float], number: int) -> list[Case]:
    worst: dict[str, Case] = {}
    for case in cases:
        known = worst.get(route_of(case.request))
        if known is None or of(case) > of(known):
            worst[route_of(case.request)] = case
    return sorted(worst.values(), key=of, reverse=True)[:number]


def worst_of(cases: Sequence[Case]) -> list[Case]:
    """Return the most expensive request of every route above a bound, and some of other routes."""
    chosen: dict[str, Case] = {}
    for of in MEASURES:
        for place, case in enumerate(_worst(cases, of, len(cases))):
            if place < TOLD or of(case) > 1:
                chosen[case.request.told()] = case
    return [*chosen.values()]


def _again(measure: Measure, case: Case) -> Case:
    """Return it with the least cost of its repetitions, as many as it takes to get below the
    bounds: other programs and earlier requests also cost."""
    again = Case(case.request, measure(case.request))
    for _ in range(REPEATS - 1):
        if again.excess <= 1:
            break
        again = Case(case.request, again.cost.least(measure(case.request)))
    return again
