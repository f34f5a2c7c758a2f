"""The lanes of one device: threads that take batches from the engines of all models on it, fairly by tokens.

Among models with work it is the turn of the one that was served the fewest tokens; its `EngineCore` says what a pass computes.
A failed pass fails its own callers; a lane that dies of anything else fails every waiter of every model, and flips health.

A pass that takes longer than it may fails its callers and flips health until it returns. It keeps its lane, since nothing can
interrupt it; while all lanes are kept so, nobody is let wait for them.

A GPU's backend takes a batch or more ahead of its lanes: one is packed and launched while another runs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from time import monotonic, perf_counter_ns

from hybridtei.backends.base import Backend
from hybridtei.engine.core import Batch, EngineCore, EngineRequest
from hybridtei.errors import BackendError, DeviceLost, PartlyFailed, PassOverdue
from hybridtei.system.cpu import LaneKind, lower_priority

JOIN_SECONDS = 0.5  # between looks at whether a lane will end at all
LOOK_SECONDS = 1.0  # at most, between looks at overdue passes
LOOKS = 4  # within a bound, at least
STOP_SECONDS = 2.0  # that the end of a process waits for passes that nobody waits for any more

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Member:
    """One model on a device, and what lanes tell it: a batch was looked for; requests are complete; no lane is left."""

    core: EngineCore
    backend: Backend
    looked: Callable[[Batch | None], None]
    finished: Callable[[Sequence[EngineRequest]], None]
    died: Callable[[BackendError], None]
    healthy: bool = True
    served_tokens: int = 0  # virtual: what an idle model did not use is not owed to it
    running: int = 0
    overdue: int = 0  # of those that run
    entered: set[int] = field(default_factory=set)  # lanes that its backend knows

    def enter(self, kind: LaneKind) -> None:
        """Make the calling lane known to the backend, once."""
        lane = threading.get_ident()
        if lane not in self.entered:
            self.backend.enter_lane(kind)
            self.entered.add(lane)


@dataclass(eq=False, slots=True)
class _Pass:
    """A batch on a lane."""

    member: Member
    batch: Batch
    began_ns: int = field(default_factory=perf_counter_ns)
    given_up: bool = False
    ended: bool = False

    def told(self) -> str:
        """What it is doing."""
        backend, packed = self.member.backend, self.batch.packed
        seconds = (perf_counter_ns() - self.began_ns) / 1e9
        return (
            f"a pass of {len(packed)} inputs, {len(packed.input_ids)} tokens, the longest {packed.max_seqlen}, for "
            f"{', '.join(sorted(packed.heads))}, on {backend.name} in {backend.dtype}, runs for {seconds:.1f} seconds"
        )


class Device:
    """Lanes for the models that join. `lanes`: what their backends have in common. `pass_timeout`: seconds of `clock` that a
    pass may take; 0: as long as it likes."""

    def __init__(
        self,
        lanes: Sequence[LaneKind],
        *,
        bulk_niceness: int = 0,
        pass_timeout: float = 0,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.lock = threading.Lock()
        self.dead: BackendError | None = None
        self._niceness = bulk_niceness if LaneKind.EXPRESS in lanes else 0
        self._work = {kind: threading.Condition(self.lock) for kind in set(lanes)}
        self._members: list[Member] = []
        self._left = threading.Condition(self.lock)
        self._closing = False
        self._pass_timeout = pass_timeout
        self._watchdog = Watchdog(pass_timeout, clock=clock)
        self.overdue = 0  # lanes that a pass keeps for longer than it may
        self._ahead = 0  # lanes beyond those of `lanes`
        self._threads = [self._thread(kind, f"{kind}-{i}") for i, kind in enumerate(lanes)]

    @property
    def alive(self) -> bool:
        """Whether any lane runs."""
        return any(thread.is_alive() for thread in self._threads)

    @property
    def stuck(self) -> bool:
        """Whether every lane is kept by a pass that should have ended."""
        return self.overdue >= len(self._threads)

    def start(self) -> None:
        """Start the lanes, unless they run."""
        if not self.alive:
            self._watchdog.start()
        for thread in self._threads:
            if thread.ident is None:
                thread.start()

    def stop(self, seconds: float = inf) -> None:
        """Let running batches end, then the lanes; not those that should have ended long ago, nor those that take longer than
        `seconds`. Whoever still waits should have been failed by then."""
        end = monotonic() + seconds
        with self.lock:
            self._closing = True
            self._wake_all()
        for thread in self._threads:
            while thread.is_alive() and not self.overdue and monotonic() < end:
                thread.join(JOIN_SECONDS)
        self._watchdog.stop()

    def join(self, member: Member) -> None:
        """A model whose queue is served from now on."""
        with self.lock:
            member.served_tokens = min((other.served_tokens for other in self._members), default=0)
            self._members.append(member)
            running = self.alive
            while self._ahead < getattr(member.backend, "ahead", 0):
                self._ahead += 1
                self._threads.append(self._thread(LaneKind.BULK, f"ahead-{self._ahead}"))
                if running:
                    self._threads[-1].start()

    def leave(self, member: Member, seconds: float | None = None) -> None:
        """Waits until no batch of it runs, but for those that should have ended, at most so long; its queue is not served any
        more."""
        with self.lock:
            if member in self._members:
                self._members.remove(member)
            self._left.wait_for(lambda: member.running <= member.overdue or self.dead is not None, seconds)

    def added(self, member: Member) -> None:
        """Something was added to a model's queue; the caller holds the lock."""
        for kind, condition in self._work.items():
            if member.core.waiting(kind):
                condition.notify()

    def _thread(self, kind: LaneKind, name: str) -> threading.Thread:
        return threading.Thread(target=self._lane, args=(kind,), name=name, daemon=True)

    def _lane(self, kind: LaneKind) -> None:
        try:
            if kind is LaneKind.BULK and self._niceness and not lower_priority(self._niceness):
                log.warning("the operating system refuses a lower priority to bulk work; it runs at the same as the rest")
            for member in [*self._members]:
                member.enter(kind)
            while (work := self._next(kind)) is not None:
                member, batch = work
                member.enter(kind)
                member.finished(self._run(member, batch))
        except BaseException as error:  # a defect of ours: nobody may wait for ever because of it
            log.critical("a lane died; every waiting request fails", exc_info=True)
            self._die(BackendError(f"the engine stopped: {error}"))

    def _next(self, kind: LaneKind) -> tuple[Member, Batch] | None:
        """Waits for work; None when the device closes."""
        with self.lock:
            while True:
                now = perf_counter_ns()
                for member in sorted(self._members, key=lambda member: member.served_tokens):
                    batch = member.core.take(now, kind)
                    member.looked(batch)
                    if batch is not None:
                        self._account(member, batch)
                        return member, batch
                if self._closing:
                    return None
                self._work[kind].wait()

    def _account(self, member: Member, batch: Batch) -> None:
        busy = [other.served_tokens for other in self._members if other is not member and (other.running or len(other.core))]
        member.served_tokens = max(member.served_tokens, min(busy, default=0)) + len(batch.packed.input_ids)
        member.running += 1
        if member.core.waiting(batch.kind):  # one request may fill many batches: wake the next lane too
            self._work[batch.kind].notify()

    def _run(self, member: Member, batch: Batch) -> list[EngineRequest]:
        one = _Pass(member, batch)
        watched = self._watchdog.begin(partial(self._give_up, one))
        try:
            parts = batch.split(member.backend.forward(batch.packed, use_all_cores=batch.use_all_cores))
        except DeviceLost:  # nor will any other pass succeed
            raise
        except PartlyFailed as error:
            return self._settle_partly(one, error)
        except Exception as error:  # whatever a backend raises is this batch's misfortune only
            log.error("a batch of %d failed: %s", len(batch.packed), error)
            failure = error if isinstance(error, BackendError) else BackendError(f"{type(error).__name__}: {error}")
            with self.lock:
                self._ended(one, healthy=False)
                return [] if one.given_up else member.core.fail(batch, failure)
        finally:
            self._watchdog.end(watched)
        with self.lock:
            self._ended(one, healthy=True)
            return [] if one.given_up else member.core.settle(batch, parts, perf_counter_ns())

    def _settle_partly(self, one: _Pass, error: PartlyFailed) -> list[EngineRequest]:
        """Those whose sequences were computed get them; only the others fail."""
        batch, member = one.batch, one.member
        computed = set(error.rows)
        log.error("%d sequences of a batch of %d failed: %s", len(batch.rows) - len(computed), len(batch.packed), error)
        parts = replace(batch, rows=[batch.rows[row] for row in error.rows]).split(error.outputs)
        failed = replace(batch, rows=[callers for row, callers in enumerate(batch.rows) if row not in computed]).callers
        with self.lock:
            self._ended(one, healthy=True)
            if one.given_up:
                return []
            for request, _ in failed:
                request.error = BackendError(str(error))
            complete = member.core.settle(batch, parts, perf_counter_ns())
            return [*dict.fromkeys([*complete, *(request for request, _ in failed)])]

    def _give_up(self, one: _Pass) -> None:
        """A pass has not ended in time: nobody is left waiting for it, nor for lanes that will not come."""
        member, failed = one.member, dict[Member, list[EngineRequest]]()
        with self.lock:
            if one.ended:
                return
            failure = PassOverdue(f"{one.told()}, more than {self._pass_timeout:g} (pass-timeout)")
            log.critical("%s; its requests fail, and so does /health until it returns", failure)
            one.given_up, member.healthy = True, False
            member.overdue += 1
            self.overdue += 1
            failed[member] = member.core.fail(one.batch, failure)
            if self.stuck:
                for other in self._members:
                    failed[other] = [*failed.get(other, ()), *other.core.fail_all(failure)]
            self._left.notify_all()
        for each, requests in failed.items():
            each.finished(requests)

    def _ended(self, one: _Pass, *, healthy: bool) -> None:
        member = one.member
        one.ended = True
        if one.given_up:
            member.overdue -= 1
            self.overdue -= 1
            log.warning("%s, and has ended", one.told())
        member.healthy = healthy
        member.running -= 1
        if not member.running:
            self._left.notify_all()

    def _die(self, failure: BackendError) -> None:
        with self.lock:
            self.dead = failure
            self._closing = True
            members = [*self._members]
            for member in members:
                member.core.fail_all(failure)
            self._wake_all()
            self._left.notify_all()
        for member in members:
            member.died(failure)

    def _wake_all(self) -> None:
        for condition in self._work.values():
            condition.notify_all()


class Watchdog:
    """Watches what runs in other threads, for `seconds` of `clock` each; 0: nothing."""

    def __init__(self, seconds: float, *, clock: Callable[[], float] = monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._watched: dict[int, tuple[float, Callable[[], object]]] = {}  # the oldest first
        self._next = 0
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Watch from now on."""
        if self._seconds:
            self._thread.start()

    def stop(self) -> None:
        """Watch no more."""
        self._closed.set()

    def begin(self, overdue: Callable[[], object]) -> int:
        """Something begins; the number that `end` wants. `overdue`: called from the watchdog's thread, at most once."""
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._watched[number] = (self._clock() + self._seconds, overdue)
            return number

    def end(self, number: int) -> None:
        """It has ended; no call begins from now on."""
        with self._lock:
            self._watched.pop(number, None)

    def _watch(self) -> None:
        while not self._closed.wait(min(LOOK_SECONDS, self._seconds / LOOKS)):
            now = self._clock()
            with self._lock:
                late = [number for number, (deadline, _) in self._watched.items() if deadline <= now]
                calls = [self._watched.pop(number)[1] for number in late]
            for call in calls:
                call()
