"""Shared by the tests of stores: stores with points, an event loop for their calls, and small
data."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar
from uuid import uuid4

import numpy as np

from hybridtei.batch import Ragged
from hybridtei.config import StoreConfig
from hybridtei.outputs import Embeddings, SparseVectors
from hybridtei.retrieval.store.base import CollectionSchema, SparseVectorParams, Store, VectorParams
from hybridtei.retrieval.store.embedded import EmbeddedStore
from hybridtei.retrieval.store.memory import MemoryStore
from hybridtei.retrieval.store.query import Query
from tests.retrieval.store.speaking import speaking

T = TypeVar("T")
WIDTH, ROW_WIDTH, VOCABULARY = 16, 8, 50
STAND_INS = ("grpc", "rest")
SERVER = os.environ.get("QDRANT_TEST_URL")
KINDS = ("embedded", "memory", *STAND_INS, *(["server"] if SERVER else []))
# Engines add in float32, Python in float64
TOLERANCE = 1e-5


@dataclass
class Asked:
    """A store, and `run` to wait for what it is asked. `count()`, `query(…)` and so on ask it about
    the collection of this name."""

    store: Store
    run: Callable[[Awaitable[T]], T]
    name: str

    def __getattr__(self, call):
        method = getattr(self.store, call)

        def ask(*arguments, **options):
            return self.run(method(self.name, *arguments, **options))

        return ask

    def fill(self, points, schema=None):
        """Make the collection of these points."""
        self.create(schema or plan())
        self.upsert(points)


@contextmanager
def asked(kind, folder):
    """An open store of the kind, with a collection's name that no other test uses."""
    with asyncio.Runner() as runner, ExitStack() as stack:
        store = (
            stack.enter_context(standing_in(kind)) if kind in STAND_INS else opened(kind, folder)
        )
        name = new_name()

        async def waited(call):
            async with asyncio.timeout(60):
                return await call

        try:
            yield Asked(store, lambda call: runner.run(waited(call)), name)
        finally:
            if kind == "server":
                runner.run(store.drop(name))
            runner.run(store.close())


@contextmanager
def standing_in(kind):
    """The store of a server, whose other end is the stand-in."""
    from hybridtei.retrieval.store.server import ServerStore

    with speaking() as state:
        yield ServerStore(StoreConfig(qdrant_url=state.url(kind)))


@contextmanager
def emptied(shared):
    """A store that others ask too, with a name of its own, which is dropped in the end."""
    own = replace(shared, name=new_name())
    try:
        yield own
    finally:
        own.drop()


def new_name():
    return f"tests-{uuid4().hex}"


def opened(kind, folder):
    if kind == "memory":
        return MemoryStore()
    if kind == "embedded":
        return EmbeddedStore(str(folder))
    from hybridtei.retrieval.store.server import ServerStore

    return ServerStore(StoreConfig(qdrant_url=SERVER))


def plan(*, idf=False, **metadata):
    return CollectionSchema(
        vectors={
            "dense": VectorParams(size=WIDTH, distance="Cosine"),
            "multivector": VectorParams(
                size=ROW_WIDTH,
                distance="Cosine",
                multivector_config={"comparator": "max_sim"},
                hnsw_config={"m": 0, "payload_m": 0},
                on_disk=True,
            ),
        },
        sparse={"sparse": SparseVectorParams(modifier="idf" if idf else None)},
        metadata=metadata,
    )


def embeddings(count, seed=0):
    """Random vectors: unit rows, a few sparse entries each, and one to six rows in a
    multi-vector."""
    random = np.random.default_rng(seed)
    sparse = np.where(
        random.random((count, VOCABULARY)) < 0.15, random.random((count, VOCABULARY)), 0
    ).astype(np.float32)
    rows = [unit(random.normal(size=(random.integers(1, 7), ROW_WIDTH))) for _ in range(count)]
    return Embeddings(
        dense=unit(random.normal(size=(count, WIDTH))),
        sparse=SparseVectors.from_dense(sparse),
        multivector=Ragged.from_rows(rows),
    )


def leg(query, using="dense", limit=10, *, row=0, **fields):
    """The best points by one vector of a row."""
    return Query(using=using, vector=query.row(row)[using], limit=limit, **fields)


def unit(rows):
    return (rows / np.linalg.norm(rows, axis=-1, keepdims=True)).astype(np.float32)
