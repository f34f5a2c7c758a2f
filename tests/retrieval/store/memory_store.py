"""A store in this process's memory: the server's store over qdrant-client's local mode, exact and slow."""

import threading
import warnings
from typing import TypeVar

from qdrant_client import AsyncQdrantClient

from hybridtei.retrieval.store.nodes import CLIENT_ERRORS, store_error
from hybridtei.retrieval.store.server import ServerStore

T = TypeVar("T")


class MemoryStore(ServerStore):
    """Every instance is a database of its own. Local mode never waits, so a call may hold the lock of all threads."""

    kind = "memory"

    def __init__(self):
        self._client, self._lock = AsyncQdrantClient(":memory:"), threading.Lock()
        self.place, self._grpc, self._whole_timeout = "memory", False, 60
        self._indexed = set()

    async def _call(self, call):
        with self._lock, warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # it has no payload indexes, and no parameters of a search
            try:
                return await call(self._client)
            except (*CLIENT_ERRORS, IndexError, KeyError) as error:
                raise store_error(error, self.place) from error

    async def close(self):
        await self._client.close()
