"""The lanes of one device: threads that take batches from the engines of all models on it, fairly by tokens.

Among models with work it is the turn of the one that was served the fewest tokens; who rides is its `EngineCore`'s to say. A
failed pass fails its own riders; a lane that dies of anything else fails every waiter of every model, and flips health.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns

from hybridtei.backends.base import Backend
from hybridtei.engine.core import Batch, EngineCore, Ticket
from hybridtei.errors import BackendError
from hybridtei.lanes import LaneKind, lower_priority

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Member:
    """One model on a device, and what lanes tell it: a batch was looked for; requests are complete; no lane is left."""

    core: EngineCore
    backend: Backend
    looked: Callable[[Batch | None], None]
    finished: Callable[[Sequence[Ticket]], None]
    died: Callable[[BackendError], None]
    healthy: bool = True
    served_tokens: int = 0  # virtual: what an idle model did not use is not owed to it
    running: int = 0
    entered: set[int] = field(default_factory=set)  # lanes that its backend knows

    def enter(self, kind: LaneKind) -> None:
        """Make the calling lane known to the backend, once."""
        lane = threading.get_ident()
        if lane not in self.entered:
            self.backend.enter_lane(kind)
            self.entered.add(lane)


class Device:
    """Lanes for the models that join. `lanes`: what their backends have in common."""

    def __init__(self, lanes: Sequence[LaneKind], *, bulk_niceness: int = 0) -> None:
        self.lock = threading.Lock()
        self.dead: BackendError | None = None
        self._niceness = bulk_niceness if LaneKind.EXPRESS in lanes else 0
        self._work = {kind: threading.Condition(self.lock) for kind in set(lanes)}
        self._members: list[Member] = []
        self._left = threading.Condition(self.lock)
        self._closing = False
        self._threads = [
            threading.Thread(target=self._lane, args=(kind,), name=f"{kind}-{i}", daemon=True) for i, kind in enumerate(lanes)
        ]

    @property
    def alive(self) -> bool:
        """Whether any lane runs."""
        return any(thread.is_alive() for thread in self._threads)

    def start(self) -> None:
        """Start the lanes, unless they run."""
        for thread in self._threads:
            if thread.ident is None:
                thread.start()

    def stop(self) -> None:
        """Let running batches end, then the lanes. Whoever still waits should have been failed by then."""
        with self.lock:
            self._closing = True
            self._wake_all()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def join(self, member: Member) -> None:
        """A model whose queue is served from now on."""
        with self.lock:
            member.served_tokens = min((other.served_tokens for other in self._members), default=0)
            self._members.append(member)

    def leave(self, member: Member) -> None:
        """Waits until no batch of it runs; its queue is not served any more."""
        with self.lock:
            if member in self._members:
                self._members.remove(member)
            while member.running and self.dead is None:
                self._left.wait()

    def added(self, member: Member) -> None:
        """Something was added to a model's queue; the caller holds the lock."""
        for kind, condition in self._work.items():
            if member.core.waiting(kind):
                condition.notify()

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

    def _run(self, member: Member, batch: Batch) -> list[Ticket]:
        try:
            parts = batch.split(member.backend.forward(batch.packed, wide=batch.wide))
        except Exception as error:  # whatever a backend raises is this batch's misfortune only
            log.error("a batch of %d failed: %s", len(batch.packed), error)
            failure = error if isinstance(error, BackendError) else BackendError(f"{type(error).__name__}: {error}")
            with self.lock:
                self._ended(member, healthy=False)
                return member.core.fail(batch, failure)
        with self.lock:
            self._ended(member, healthy=True)
            return member.core.settle(batch, parts, perf_counter_ns())

    def _ended(self, member: Member, *, healthy: bool) -> None:
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
