"""All passes that a queue needs, by threads that end with it: what `Encoder` has instead of lanes that wait for work.

A pass over all cores has little to share out where its texts are short, and its threads meet after each operation; as
many one-threaded passes at once do not. A few short texts are the exception: there is only one pass to be had.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from threadpoolctl import threadpool_limits

from hybridtei.backends.base import Backend
from hybridtei.engine.core import EngineCore
from hybridtei.engine.scheduler import LEAST_SHARE_TOKENS


def run_all(core: EngineCore, backend: Backend, callers: int, advance: Callable[[int], object]) -> None:
    """Until nobody waits; `callers` passes at once, of which `advance` is told how many sequences each did. Raises what a pass
    raised, once the others have ended."""
    if callers == 1 or core.waiting_tokens <= LEAST_SHARE_TOKENS:
        while (batch := core.take()) is not None:
            core.give(batch, backend.forward(batch.packed, wide=True))
            advance(len(batch.packed))
        return
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                batch = core.take()
            if batch is None:
                return
            try:
                parts = batch.split(backend.forward(batch.packed))
            except BaseException as error:
                with lock:
                    core.fail(batch, error)
                    core.fail_all(error)
                raise
            with lock:
                core.settle(batch, parts)
                advance(len(batch.packed))

    with threadpool_limits(limits=1, user_api="blas"), ThreadPoolExecutor(callers) as pool:
        for done in [pool.submit(work) for _ in range(callers)]:
            done.result()
