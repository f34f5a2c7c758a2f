"""Ranked answers over a list of texts, without a server, a folder or Qdrant."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from itertools import count, islice
from operator import length_hint
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

from tqdm import tqdm

from hybridtei.batch import Head
from hybridtei.config import StoreConfig
from hybridtei.encoder import Encoder
from hybridtei.errors import InvalidInput, StoreError
from hybridtei.retrieval.search.options import LocalKeywords, SearchHit, SearchOptions
from hybridtei.retrieval.search.searcher import Searcher
from hybridtei.retrieval.store import open_store
from hybridtei.retrieval.store.base import CollectionSchema, PointId, Store
from hybridtei.retrieval.store.collection import heads_of
from hybridtei.retrieval.store.memory import MemoryStore
from hybridtei.retrieval.store.plan import (
    FINGERPRINT,
    budget_of_plan,
    new_schema,
    plan_of,
    signed,
)
from hybridtei.retrieval.store.points import point_id, to_points
from hybridtei.retrieval.store.query import CollectionPlan, filter_from
from hybridtei.system.forks import OfOneProcess
from hybridtei.system.own_loop import OwnLoop

# Records that are embedded and stored together
CHUNK = 1024
NAME = "index"


class Index(OfOneProcess):
    """Texts or records that a search ranks by dense, sparse and multi-vectors.

    A record is a mapping with the key `text`; its other keys are returned with the hit, and filters
    read them. `id`: a whole number or a text of its own [default: its place in the input].

    >>> index = Index(["the keys rotate monthly", "a cake with cherries"])        # doctest: +SKIP
    >>> index.search("how often do keys change", limit=1)[0].payload["text"]      # doctest: +SKIP
    'the keys rotate monthly'
    """

    _schema: CollectionSchema
    _loop: OwnLoop
    _model_id: str
    # The folder of an index that was opened
    _home: str | None = None

    def __init__(
        self,
        records: Iterable[str | Mapping[str, Any]] = (),
        encoder: Encoder | None = None,
        *,
        reranker: Encoder | None = None,
        show_progress: bool | None = None,
    ) -> None:
        """`records`: texts, mappings, or a DataFrame of pandas or polars; a generator is read as it
        comes. `encoder`: default: the embedded model. `reranker`: a model that orders the best hits
        again. `show_progress`: default: on a terminal.

        Raises InvalidInput, naming the record, and the errors of `Encoder.encode`.
        """
        self._open(MemoryStore(), NAME, encoder or Encoder.load(), reranker)
        # `save` adds the fingerprint
        self._schema = new_schema(self.encoder.spec, self._model_id, CollectionPlan(), None)
        try:
            self._loop.run(self._store.create(NAME, self._schema))
            self.add(records, show_progress=show_progress)
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(
        cls,
        folder: str | Path,
        name: str = NAME,
        encoder: Encoder | None = None,
        *,
        reranker: Encoder | None = None,
    ) -> Self:
        """Open a collection of the folder that `save` or `hybridtei ingest` has filled (extra
        `qdrant`). Raises UnknownCollection, CollectionMismatch, StoreError."""
        index = cls.__new__(cls)
        store = open_store(StoreConfig(qdrant_path=str(folder)))
        assert store is not None
        index._home = os.path.realpath(folder)
        index._open(store, name, encoder or Encoder.load(), reranker)
        try:
            fit = index._loop.run(index._searcher.fit(name))
            index._schema, index._may_sign = fit.schema, fit.is_proved
        except BaseException:
            index.close()
            raise
        return index

    def _open(self, store: Store, name: str, encoder: Encoder, reranker: Encoder | None) -> None:
        self.encoder = encoder
        self._store, self._name = store, name
        self._loop = OwnLoop()
        self._model_id = encoder.model_id or "encoder"
        self._searcher = Searcher(store, encoder.named(self._model_id))
        if reranker is not None and reranker.spec.role != "reranker":
            raise InvalidInput(
                f"`reranker` should be a reranker, is a model of the role {reranker.spec.role}; "
                "`rescore` ranks by multi-vectors"
            )
        self._ranker = reranker
        self._places = count()
        # The vectors are known to be this encoder's
        self._may_sign = True

    def add(
        self, records: Iterable[str | Mapping[str, Any]], *, show_progress: bool | None = None
    ) -> Self:
        """Embed and store more records. A record replaces the stored record of its `id`."""
        rows = _rows(records)
        iterator = iter(rows)
        if self._store.kind != "memory" and FINGERPRINT not in self._schema.metadata:
            self._schema = self._signed_schema()
            self._loop.run(self._store.annotate(self._name, self._schema.metadata))
        # None: shown on a terminal
        hidden = None if show_progress is None else not show_progress
        with tqdm(total=length_hint(rows) or None, unit="text", disable=hidden) as bar:
            while chunk := list(islice(iterator, CHUNK)):
                self._add(chunk)
                bar.update(len(chunk))
        return self

    def _add(self, records: list[Any]) -> None:
        ids: list[PointId] = []
        payloads = []
        for record in records:
            identity, payload = _record(record, next(self._places))
            ids.append(identity)
            payloads.append(payload)
        heads = heads_of(self._schema)
        budget = budget_of_plan(plan_of(self._schema)) if Head.MULTIVECTOR in heads else None
        embedded = self.encoder.encode(
            [payload["text"] for payload in payloads],
            sorted(heads),
            input_type="document",
            multivector=budget,
        )
        points = to_points(embedded, ids, payloads)
        self._loop.run(self._store.upsert(self._name, points, self._schema))

    def _signed_schema(self) -> CollectionSchema:
        """The schema with the encoder's fingerprint, if the collection has none."""
        if FINGERPRINT in self._schema.metadata or not self._may_sign:
            return self._schema
        return signed(self._schema, self._loop.run(self._searcher.model.fingerprint()))

    def search(
        self, query: str, limit: int = 10, *, filter: Any = None, **options: Unpack[LocalKeywords]
    ) -> list[SearchHit]:
        """Return the best `limit` records for a query, the best first.

        `filter`: as in `/search`, on the records' keys. `options`: fields of `SearchOptions`, such
        as `mode="dense"` or `explain=True`. Raises InvalidInput.
        """
        chosen = SearchOptions.given(
            "search()", options, limit=limit, query_filter=filter_from(filter)
        )
        searching = self._searcher.search(
            self._name,
            query,
            chosen,
            ranker=self._ranker,
        )
        return self._loop.run(searching).hits

    def save(self, folder: str | Path, name: str = NAME, *, overwrite: bool = False) -> None:
        """Write all records and vectors into a new collection of the embedded engine (extra
        `qdrant`), which `open`, `hybridtei search` and `hybridtei serve` read. `overwrite`: delete
        a collection of this name first. Raises StoreError if there is one, or it is this index.
        """
        store = open_store(StoreConfig(qdrant_path=str(folder)))
        assert store is not None
        schema = self._signed_schema()
        own_names = (self._name, self._schema.stored_as)
        if self._home == os.path.realpath(folder) and name in own_names:
            raise StoreError(f"{folder}: the collection {name!r} is this index, and saved already")
        self._loop.run(
            _copied(
                self._store,
                self._name,
                store,
                name,
                schema,
                overwrite=overwrite,
            )
        )

    def close(self) -> None:
        """Close the store and end the thread. The encoder stays open. A second call does
        nothing."""
        try:
            if self._loop.is_open:
                self._loop.run(self._store.close())
        finally:
            self._loop.close()

    def __len__(self) -> int:
        return self._loop.run(self._store.count(self._name))

    def __repr__(self) -> str:
        heads = ", ".join(sorted(heads_of(self._schema)))
        return f"Index({len(self):,} texts: {heads} by {self._model_id})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _rows(records: Any) -> Iterable[Any]:
    """The records of a list, a generator, or a DataFrame of polars or pandas."""
    if isinstance(records, str | bytes | Mapping) or not hasattr(records, "__iter__"):
        raise InvalidInput(
            f"`records` is {type(records).__name__}: should be a list of texts or of mappings"
        )
    if hasattr(records, "to_dicts"):
        return list(records.to_dicts())
    if hasattr(records, "columns"):
        return list(records.to_dict("records"))
    rows: Iterable[Any] = records
    return rows


def _record(record: Any, place: int) -> tuple[PointId, dict[str, Any]]:
    """A record's id and payload. Raises InvalidInput, naming the record."""
    if isinstance(record, str):
        return place, {"text": record}
    where = f"records[{place}]"
    if not isinstance(record, Mapping):
        raise InvalidInput(f"`{where}` is {type(record).__name__}: should be a text or a mapping")
    if not isinstance(record.get("text"), str):
        raise InvalidInput(f"`{where}.text` is {record.get('text')!r:.100}: should be a text")
    identity = record.get("id", place)
    if isinstance(identity, str):
        identity = point_id(identity, 0)
    return identity, dict(record)


async def _copied(
    source: Store,
    name: str,
    target: Store,
    new_name: str,
    schema: CollectionSchema,
    *,
    overwrite: bool,
) -> None:
    try:
        if overwrite:
            await target.drop(new_name)
        await target.create(new_name, schema)
        offset = None
        while True:
            points, offset = await source.scroll(
                name, limit=CHUNK, offset=offset, with_vectors=True
            )
            await target.upsert(new_name, points, schema)
            if offset is None:
                break
        await target.optimize(new_name)
    finally:
        await target.close()
