"""Whether the vector store answers, and its errors by kind, in `/metrics`: none of the models shows that searches fail."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from hybridtei.errors import CollectionMismatch, InvalidPoint, StoreAtCapacity, StoreAway, StoreError, StoreUnavailable
from hybridtei.observability.metrics import Registry

if TYPE_CHECKING:
    from hybridtei.store.base import Store

CHECK_S = 10.0  # between two checks; alerts look at minutes
# Of errors, the narrower class first -> the label `kind`.
KINDS = {
    StoreAway: "away",
    StoreAtCapacity: "capacity",
    StoreUnavailable: "unavailable",
    CollectionMismatch: "mismatch",
    InvalidPoint: "point",
    StoreError: "refused",
}


class StoreHealth:
    """A server is checked every `CHECK_S` seconds; the embedded engine, whose process starts when it is first asked, only after
    an error."""

    def __init__(self, store: Store, registry: Registry) -> None:
        self._store = store
        self._errors = registry.counter("hybridtei_store_errors_total")
        for kind in KINDS.values():
            self._errors.add(0, kind=kind)
        self._reachable = registry.gauge("hybridtei_store_reachable")
        self._is_doubtful = store.kind == "server"
        self._reachable.set(0 if self._is_doubtful else 1)
        self._watching: asyncio.Task[None] | None = None

    def count(self, error: Exception) -> None:
        """Count an error of a request, if it is the store's."""
        kind = next((word for known, word in KINDS.items() if isinstance(error, known)), None)
        if kind is not None:
            self._errors.add(1, kind=kind)
            self._is_doubtful |= isinstance(error, StoreUnavailable)

    async def start(self) -> None:
        """Begin to check."""
        self._watching = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Check no more."""
        if self._watching is not None:
            self._watching.cancel()

    async def _watch(self) -> None:
        while True:
            if self._is_doubtful:
                reachable = await self._answers()
                self._reachable.set(reachable)
                self._is_doubtful = self._store.kind == "server" or not reachable
            await asyncio.sleep(CHECK_S)

    async def _answers(self) -> bool:
        try:
            await self._store.describe("-")
        except StoreUnavailable:
            return False
        except StoreError:
            pass  # an answer
        return True
