"""The lanes of one device: threads that take batches from the engines of all its models, fairly by
tokens.

The model with work that was served the fewest tokens is next; its `EngineCore` chooses the
sequences of a pass. A failed pass fails its own callers. A lane that dies of any other error fails
all waiting requests of all models, and /health.

A pass that takes longer than `pass_timeout` fails its callers, and /health until it returns. It
keeps its lane, since nothing can interrupt it. While overdue passes keep all lanes, every waiting
request fails.

A GPU's backend takes one or more batches beyond its lanes: one is packed and launched while another
runs.

`run_all` is an engine without lanes, for a caller that blocks. It starts threads that end with the
queue. The threads of one pass over all cores meet after each operation, which costs too much for
short texts, so `run_all` runs several passes of one thread each. A few short texts are the
exception: they are one pass.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from time import monotonic, perf_counter_ns

from threadpoolctl import threadpool_limits

from hybridtei.errors import BackendError, DeviceLost, PartlyFailed, PassOverdue
from hybridtei.inference.backends.base import Backend
from hybridtei.inference.engine.core import EngineBatch, EngineCore
from hybridtei.inference.engine.scheduler import EngineRequest
from hybridtei.system import own_thread
from hybridtei.system.machine import LaneKind, lower_priority

# Between checks of whether a lane will end
JOIN_SECONDS = 0.5
# The longest time between checks for overdue passes
LOOK_SECONDS = 1.0
# The least number of checks within a pass's bound
LOOKS = 4
# The time that a stopping process waits for passes without callers
STOP_SECONDS = 2.0

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class ModelInstance:
    """One model on a device, and the callbacks of its lanes.

    `on_take`: a lane took a batch (called under the device's lock). `on_complete`: requests are
    complete. `on_death`: the last lane has died.
    """

    core: EngineCore
    backend: Backend
    on_take: Callable[[EngineBatch], None]
    on_complete: Callable[[Sequence[EngineRequest]], None]
    on_death: Callable[[BackendError], None]
    healthy: bool = True
    # Virtual tokens: a model gains no credit while it is idle
    served_tokens: int = 0
    # The running batches, and those of them that are overdue
    running: int = 0
    overdue: int = 0
    # Threads that have called the backend's `enter_lane`
    entered: set[int] = field(default_factory=set)

    def enter(self, kind: LaneKind) -> None:
        """Call `Backend.enter_lane` once for each thread."""
        lane = threading.get_ident()
        if lane not in self.entered:
            self.backend.enter_lane(kind)
            self.entered.add(lane)


@dataclass(eq=False, slots=True)
class _InFlightBatch:
    """A batch in a lane."""

    instance: ModelInstance
    batch: EngineBatch
    began_ns: int = field(default_factory=perf_counter_ns)
    abandoned: bool = False
    ended: bool = False

    def describe(self) -> str:
        backend, packed = self.instance.backend, self.batch.packed
        seconds = (perf_counter_ns() - self.began_ns) / 1e9
        return (
            f"a pass of {len(packed)} inputs, {len(packed.input_ids)} tokens, the longest "
            f"{packed.max_seqlen}, for {', '.join(sorted(packed.heads))}, on {backend.name} in "
            f"{backend.dtype}, runs for {seconds:.1f} seconds"
        )


class Device:
    """Lanes for the models that join. `lanes`: the same for all their backends. `pass_timeout`: the
    bound of a pass in seconds of `clock`; 0: no bound."""

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
        self._instances: list[ModelInstance] = []
        self._left = threading.Condition(self.lock)
        self._closing = False
        self._pass_timeout = pass_timeout
        self._watchdog = Watchdog(pass_timeout, clock=clock)
        # Lanes with an overdue pass
        self.overdue = 0
        # Lanes in addition to `lanes`
        self._ahead = 0
        self._threads = [self._thread(kind, f"{kind}-{i}") for i, kind in enumerate(lanes)]

    @property
    def alive(self) -> bool:
        """True if any lane runs."""
        return any(thread.is_alive() for thread in self._threads)

    @property
    def stuck(self) -> bool:
        """True if every lane has an overdue pass."""
        return self.overdue >= len(self._threads)

    def start(self) -> None:
        """Start the lanes, unless they run."""
        if not self.alive:
            self._watchdog.start()
        for thread in self._threads:
            if thread.ident is None:
                thread.start()

    def stop(self, seconds: float = inf) -> None:
        """End the lanes after their running batches. Do not wait for overdue batches, or for longer
        than `seconds`.

        The caller must fail waiting requests first.
        """
        end = monotonic() + seconds
        with self.lock:
            self._closing = True
            self._wake_all()
        for thread in self._threads:
            while thread.is_alive() and not self.overdue and monotonic() < end:
                thread.join(JOIN_SECONDS)
        self._watchdog.stop()

    def join(self, instance: ModelInstance) -> None:
        """Begin to serve a model's queue."""
        with self.lock:
            instance.served_tokens = min(
                (other.served_tokens for other in self._instances), default=0
            )
            self._instances.append(instance)
            running = self.alive
            while self._ahead < instance.backend.ahead:
                self._ahead += 1
                self._threads.append(self._thread(LaneKind.BULK, f"ahead-{self._ahead}"))
                if running:
                    self._threads[-1].start()

    def leave(self, instance: ModelInstance, seconds: float | None = None) -> None:
        """Stop serving a model's queue. Wait up to `seconds` for its running batches, except
        overdue ones."""
        with self.lock:
            if instance in self._instances:
                self._instances.remove(instance)
            self._left.wait_for(
                lambda: instance.running <= instance.overdue or self.dead is not None, seconds
            )

    def added(self, instance: ModelInstance) -> None:
        """Wake a lane for sequences added to a model's queue. The caller holds the lock."""
        for kind, condition in self._work.items():
            if instance.core.waiting(kind):
                condition.notify()

    def _thread(self, kind: LaneKind, name: str) -> threading.Thread:
        return threading.Thread(target=self._lane, args=(kind,), name=name, daemon=True)

    def _lane(self, kind: LaneKind) -> None:
        try:
            if kind is LaneKind.BULK and self._niceness and not lower_priority(self._niceness):
                log.warning(
                    "the operating system refuses a lower priority to bulk work; it runs at the "
                    "same as the rest"
                )
            for instance in [*self._instances]:
                instance.enter(kind)
            while (work := self._next(kind)) is not None:
                instance, batch = work
                instance.enter(kind)
                instance.on_complete(self._run(instance, batch))
        except BaseException as error:
            # After a defect in this package, requests must not wait for ever
            log.critical("a lane died; every waiting request fails", exc_info=True)
            self._die(BackendError(f"the engine stopped: {error}"))

    def _next(self, kind: LaneKind) -> tuple[ModelInstance, EngineBatch] | None:
        """Wait for a batch. Return None when the device closes."""
        with self.lock:
            while True:
                now = perf_counter_ns()
                waiting = [instance for instance in self._instances if instance.core.waiting_tokens]
                if len(waiting) > 1:
                    waiting.sort(key=lambda instance: instance.served_tokens)
                for instance in waiting:
                    is_idle = len(self._instances) == 1 or self._others_idle(instance)
                    batch = instance.core.take(now, kind, device_idle=is_idle)
                    if batch is not None:
                        instance.on_take(batch)
                        self._account(instance, batch)
                        return instance, batch
                if self._closing:
                    return None
                seconds = None
                if waiting:
                    self._wake_others(kind, waiting)
                    if any(instance.core.waiting(kind) for instance in waiting):
                        seconds = LOOK_SECONDS
                self._work[kind].wait(seconds)

    def _wake_others(self, kind: LaneKind, waiting: Sequence[ModelInstance]) -> None:
        """Wake the other lanes: the request that blocked them may have been cancelled."""
        for other, condition in self._work.items():
            if other is not kind and any(instance.core.waiting(other) for instance in waiting):
                condition.notify()

    def _others_idle(self, instance: ModelInstance) -> bool:
        others = (other for other in self._instances if other is not instance)
        return not any(other.running or len(other.core) for other in others)

    def _account(self, instance: ModelInstance, batch: EngineBatch) -> None:
        if len(self._instances) > 1:
            others = [other for other in self._instances if other is not instance]
            busy = [other.served_tokens for other in others if other.running or len(other.core)]
            instance.served_tokens = max(instance.served_tokens, min(busy, default=0))
        instance.served_tokens += batch.tokens
        instance.running += 1
        # One request may fill many batches, and lanes of another kind may have waited for this one.
        # A batch over all cores leaves nothing that waits.
        if not batch.use_all_cores:
            self.added(instance)

    def _run(self, instance: ModelInstance, batch: EngineBatch) -> list[EngineRequest]:
        run = _InFlightBatch(instance, batch)
        watched = self._watchdog.begin(partial(self._abandon, run))
        try:
            parts = batch.split(
                instance.backend.forward(batch.packed, use_all_cores=batch.use_all_cores)
            )
        except DeviceLost:
            # No other pass will succeed either
            raise
        except PartlyFailed as error:
            return self._settle_partly(run, error)
        except Exception as error:
            # Any exception of a backend fails only this batch
            log.error("a batch of %d failed: %s", len(batch.rows), error)
            failure = error
            if not isinstance(error, BackendError):
                failure = BackendError(f"{type(error).__name__}: {error}")
            with self.lock:
                self._ended(run, healthy=False)
                return [] if run.abandoned else instance.core.fail(batch, failure)
        finally:
            self._watchdog.end(watched)
        with self.lock:
            self._ended(run, healthy=True)
            return [] if run.abandoned else instance.core.give(batch, parts, perf_counter_ns())

    def _settle_partly(self, run: _InFlightBatch, error: PartlyFailed) -> list[EngineRequest]:
        """Complete the computed sequences. Only the other requests fail."""
        batch, instance = run.batch, run.instance
        computed = set(error.rows)
        log.error(
            "%d sequences of a batch of %d failed: %s",
            len(batch.rows) - len(computed),
            len(batch.rows),
            error,
        )
        parts = replace(batch, rows=[batch.rows[row] for row in error.rows]).split(error.outputs)
        failed = replace(
            batch, rows=[callers for row, callers in enumerate(batch.rows) if row not in computed]
        ).callers
        with self.lock:
            self._ended(run, healthy=True)
            if run.abandoned:
                return []
            for request, _ in failed:
                request.error = BackendError(str(error))
            complete = instance.core.give(batch, parts, perf_counter_ns())
            return [*dict.fromkeys([*complete, *(request for request, _ in failed)])]

    def _abandon(self, run: _InFlightBatch) -> None:
        """Fail the requests of an overdue pass, and all others if no lane is free to serve them."""
        instance = run.instance
        failed = dict[ModelInstance, list[EngineRequest]]()
        with self.lock:
            if run.ended:
                return
            failure = PassOverdue(
                f"{run.describe()}, more than {self._pass_timeout:g} (pass-timeout)"
            )
            log.critical("%s; its requests fail, and so does /health until it returns", failure)
            run.abandoned = True
            instance.healthy = False
            instance.overdue += 1
            self.overdue += 1
            failed[instance] = instance.core.fail(run.batch, failure)
            if self.stuck:
                for other in self._instances:
                    failed[other] = [*failed.get(other, ()), *other.core.fail_all(failure)]
            self._left.notify_all()
        for failed_instance, requests in failed.items():
            failed_instance.on_complete(requests)

    def _ended(self, run: _InFlightBatch, *, healthy: bool) -> None:
        instance = run.instance
        run.ended = True
        if run.abandoned:
            # Logged before /health reports it
            log.warning("%s, and has ended", run.describe())
            instance.overdue -= 1
            self.overdue -= 1
        instance.healthy = healthy
        instance.running -= 1
        if not instance.running:
            self._left.notify_all()

    def _die(self, failure: BackendError) -> None:
        with self.lock:
            self.dead = failure
            self._closing = True
            instances = [*self._instances]
            for instance in instances:
                instance.core.fail_all(failure)
            self._wake_all()
            self._left.notify_all()
        for instance in instances:
            instance.on_death(failure)

    def _wake_all(self) -> None:
        for condition in self._work.values():
            condition.notify_all()


class Watchdog:
    """Watches work in other threads, each piece for `seconds` of `clock`; 0: does not watch."""

    def __init__(self, seconds: float, *, clock: Callable[[], float] = monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._closed = threading.Event()
        # The oldest first
        self._watched: dict[int, tuple[float, Callable[[], object]]] = {}
        self._next = 0
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        if self._seconds:
            self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._closed.set()

    def begin(self, overdue: Callable[[], object]) -> int:
        """Begin a piece of work. Return its number for `end`. `overdue`: called from the watchdog's
        thread, at most once."""
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._watched[number] = (self._clock() + self._seconds, overdue)
            return number

    def end(self, number: int) -> None:
        """End a piece of work. From now on `overdue` is not called."""
        with self._lock:
            self._watched.pop(number, None)

    def _watch(self) -> None:
        while not self._closed.wait(min(LOOK_SECONDS, self._seconds / LOOKS)):
            now = self._clock()
            with self._lock:
                late = [
                    number for number, (deadline, _) in self._watched.items() if deadline <= now
                ]
                calls = [self._watched.pop(number)[1] for number in late]
            for call in calls:
                call()


def run_all(
    core: EngineCore, backend: Backend, callers: int, advance: Callable[[int], object]
) -> None:
    """Take, run, give, until nothing waits: an engine without clocks and deadlines, with the
    answers of `Engine`.

    `callers` passes run at once. `advance`: called with each pass's number of sequences, equal ones
    included.
    After an error, an interrupt, or the end of the coroutine that awaits the work, no further pass
    begins. Raises the error when the running passes have ended; CancelledError if nothing awaits
    the work.
    """
    alone = callers == 1 or core.is_one_pass
    lock, stopped, unawaited = threading.Lock(), threading.Event(), own_thread.unawaited()

    def loop() -> None:
        while not (stopped.is_set() or unawaited.is_set()):
            with lock:
                # Several callers: a batch must not depend on which of them ends first
                batch = core.take(device_idle=alone)
            if batch is None:
                return
            parts = batch.split(backend.forward(batch.packed, use_all_cores=alone))
            with lock:
                core.give(batch, parts)
                advance(len(batch.callers))

    def lane() -> None:
        try:
            loop()
        except BaseException:
            stopped.set()
            raise

    if alone:
        loop()
    else:
        with threadpool_limits(limits=1, user_api="blas"), ThreadPoolExecutor(callers) as pool:
            try:
                for done in [pool.submit(lane) for _ in range(callers)]:
                    done.result()
            finally:
                # Ctrl-C interrupts the wait. The pool then waits for the running passes.
                stopped.set()
    own_thread.check_awaited()
