"""Defers a Qdrant server's indexing until a large ingest has ended, and shows its progress.

During an ingest a server builds graphs of segments that it soon merges and indexes again. So a large run sets the indexing
threshold to 0 (never), and restores it at its end, even after an error. The old value is saved in the collection's metadata
first: after a kill, or if the server is away, the next ingest restores it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from hybridtei.errors import StoreError

log = logging.getLogger(__name__)
THRESHOLD = "ingest_indexing_threshold"  # key of a collection's metadata: the threshold in kB to restore
DEFAULT_THRESHOLD = 10_000  # kB, Qdrant's own
NEVER = 0
POLL_S, STALLED_S = 0.5, 600.0
Tell = Callable[[str], None]


@asynccontextmanager
async def deferred_indexing(store: Any, name: str, *, is_large: bool) -> AsyncIterator[None]:
    """A context without indexing, if the run `is_large`. Restores the saved threshold at its end."""
    if store.kind != "server":
        yield
        return
    if is_large:
        await _defer(store, name)
    try:
        yield
    finally:
        try:
            await _restore(store, name)
        except StoreError as error:
            log.warning("collection %r: the next ingest restores its indexing threshold; this one could not: %s", name, error)


async def _defer(server: Any, name: str) -> None:
    config = (await server.info(name)).config
    threshold = config.optimizer_config.indexing_threshold
    if (config.metadata or {}).get(THRESHOLD) is None:
        if threshold == NEVER:
            return  # the user's own choice
        await server.annotate(name, {THRESHOLD: DEFAULT_THRESHOLD if threshold is None else threshold})
    await server.set_indexing_threshold(name, NEVER)


async def _restore(server: Any, name: str) -> None:
    schema = await server.describe(name)
    threshold = None if schema is None else schema.metadata.get(THRESHOLD)
    if threshold is None:
        return
    is_valid = isinstance(threshold, int) and not isinstance(threshold, bool) and threshold > 0
    await server.set_indexing_threshold(name, threshold if is_valid else DEFAULT_THRESHOLD)
    await server.annotate(name, {THRESHOLD: None})


async def wait_indexed(
    server: Any,
    name: str,
    stop: asyncio.Event,
    tell: Tell,
    *,
    quiet: bool = True,
    clock: Callable[[], float] = time.monotonic,
    poll_s: float = POLL_S,
) -> None:
    """Show progress until the server has indexed the collection, `stop` is set, or nothing has changed for `STALLED_S`. The
    server continues to index in any case.
    """
    from tqdm.auto import tqdm

    last, since_s = -1, clock()
    with tqdm(disable=quiet, desc="indexing", unit=" vectors", mininterval=0.5) as bar:
        while True:
            info = await server.info(name)
            indexed = info.indexed_vectors_count or 0
            bar.update(max(0, indexed - bar.n))
            if info.status in ("green", "red"):
                tell(f"indexed   {indexed:,} vectors, the collection is {info.status.value}")
                return
            if indexed != last:
                last, since_s = indexed, clock()
            if stop.is_set() or clock() - since_s > STALLED_S:
                tell(f"indexing  goes on in the server: {indexed:,} vectors so far, the collection is {info.status.value}")
                return
            try:
                await asyncio.wait_for(stop.wait(), poll_s)
            except TimeoutError:
                continue
