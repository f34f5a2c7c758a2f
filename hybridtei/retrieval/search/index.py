"""Ranked answers over a list of texts, without a server, a folder or Qdrant."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from operator import length_hint
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

import orjson
from tqdm import tqdm

from hybridtei.batch import Head
from hybridtei.config import StoreConfig
from hybridtei.encoder import Encoder
from hybridtei.errors import InvalidInput, InvalidPoint, RequestError, StoreError
from hybridtei.keywords import check_value
from hybridtei.retrieval.documents import Selection, changed, deleted, fetched
from hybridtei.retrieval.search.options import (
    LocalKeywords,
    SearchHit,
    SearchOptions,
    StoredPoint,
)
from hybridtei.retrieval.search.searcher import Searcher
from hybridtei.retrieval.store import open_store
from hybridtei.retrieval.store.base import CollectionSchema, PointId, Store, Stored, pages_of
from hybridtei.retrieval.store.collection import heads_of
from hybridtei.retrieval.store.memory import MemoryStore
from hybridtei.retrieval.store.plan import (
    FINGERPRINT,
    RECORDS,
    budget_of_plan,
    new_schema,
    plan_of,
    signed,
)
from hybridtei.retrieval.store.points import MAX_ID, check_points, point_id, to_points
from hybridtei.retrieval.store.query import CollectionPlan, filter_from
from hybridtei.system.forks import OfOneProcess
from hybridtei.system.own_loop import OwnLoop

# Records that are embedded and stored together
CHUNK = 1024
NAME = "index"


class Index(OfOneProcess):
    """Texts or records that a search ranks by dense, sparse and multi-vectors.

    A record is a mapping with the key `text`; its other keys are returned with the hit, and filters
    read them. `id`: a whole number or a text of its own; a record with the id of a stored one
    replaces it [default: the next whole number above all stored ones]. Each record is a hit of its
    own, also if several have the same `document_id`.

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
        schema = new_schema(self.encoder.spec, self._model_id, CollectionPlan(), None)
        self._schema = replace(schema, metadata={**schema.metadata, RECORDS: True})
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
        **options: Unpack[LocalKeywords],
    ) -> Self:
        """Open a collection of the folder that `save` or `hybridtei ingest` has filled (extra
        `qdrant`). `options`: defaults of `search`. Raises UnknownCollection, CollectionMismatch,
        StoreError."""
        chosen = SearchOptions.given("open()", options)
        index = cls.__new__(cls)
        store = open_store(StoreConfig(qdrant_path=str(folder)))
        index._home = os.path.realpath(folder)
        index._open(store, name, encoder or Encoder.load(), reranker)
        try:
            fit = index._loop.run(index._searcher.fit(name, chosen))
            index._options = options
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
        self._next = 0
        self._options: LocalKeywords = {}
        # The vectors are known to be this encoder's
        self._may_sign = True

    def add(
        self, records: Iterable[str | Mapping[str, Any]], *, show_progress: bool | None = None
    ) -> Self:
        """Embed and store more records. A record replaces the stored record of its `id`. NaN is
        stored as null, and times as texts, as `Client.upsert` sends them. Raises InvalidInput,
        naming the record, also if two records have one id; records before it may be stored."""
        rows = _rows(records)
        iterator = iter(enumerate(rows))
        ids = _Ids(self._next_id)
        if self._store.kind != "memory" and FINGERPRINT not in self._schema.metadata:
            self._schema = self._signed_schema()
            self._loop.run(self._store.annotate(self._name, self._schema.metadata))
        # None: shown on a terminal
        hidden = None if show_progress is None else not show_progress
        with tqdm(total=length_hint(rows) or None, unit="text", disable=hidden) as bar:
            while chunk := list(islice(iterator, CHUNK)):
                self._add(chunk, ids)
                bar.update(len(chunk))
        return self

    def _add(self, records: list[tuple[int, Any]], ids: _Ids) -> None:
        payloads = [_payload(record, place) for place, record in records]
        begin, heads = records[0][0], heads_of(self._schema)
        moved = ids.take([payload.get("id") for payload in payloads], begin)
        budget = budget_of_plan(plan_of(self._schema)) if Head.MULTIVECTOR in heads else None
        try:
            embedded = self.encoder.encode(
                [payload["text"] for payload in payloads],
                sorted(heads),
                input_type="document",
                multivector=budget,
            )
        except RequestError as error:
            raise error.named("records", begin, of=f"`texts[{error.place}]`") from None
        points = to_points(embedded, ids.of_chunk, payloads)
        for (place, _), point in zip(records, points, strict=True):
            try:
                check_points([point], self._schema)
            except InvalidPoint as error:
                raise InvalidPoint(f"`records[{place}]`: {error}") from None
        if moved:
            reading = self._store.retrieve(
                self._name,
                list(moved),
                with_vectors=True,
            )
            before = self._loop.run(reading)
            points += [Stored(moved[point.id], point.payload, point.vector) for point in before]
        self._loop.run(self._store.upsert(self._name, points, self._schema))
        if self._store.kind == "memory":
            self._next = ids.next

    def _next_id(self) -> int:
        """The first whole number above all ids. Another process may have added to a folder."""
        if self._store.kind == "memory":
            return self._next
        return self._loop.run(_largest_id(self._store, self._name)) + 1

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
        check_value("query", query, str)
        if not query:
            raise InvalidInput("`query` is empty")
        options = {**self._options, **options}
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

    def get(
        self,
        id: int | str,
        *,
        source: str | None = None,
    ) -> list[StoredPoint]:
        """Return the record with this id, or the chunks of the document with it, in order.
        Raises UnknownDocument."""
        return self._loop.run(
            fetched(
                self._store,
                self._name,
                id,
                source,
            )
        )

    def delete(
        self,
        ids: Sequence[int | str] | None = None,
        *,
        filter: Any = None,
        source: str | None = None,
    ) -> int:
        """Delete records by id, or by a filter as in `search`; a document with all its chunks.
        Return the number of records. `source`: the file of the documents, if
        several files have documents with one id. Raises InvalidInput for an empty filter."""
        selection = Selection(
            ids,
            filter,
            source,
        )
        return self._loop.run(deleted(self._store, self._name, selection))

    def set_payload(
        self,
        values: Mapping[str, Any],
        ids: Sequence[int | str] | None = None,
        *,
        filter: Any = None,
        source: str | None = None,
    ) -> int:
        """Set keys of records; None removes a key. Return the number of records. `ids`, `filter`,
        `source`: as for `delete`."""
        selection = Selection(
            ids,
            filter,
            source,
        )
        return self._loop.run(changed(self._store, self._name, selection, values))

    def save(self, folder: str | Path, name: str = NAME, *, overwrite: bool = False) -> None:
        """Write all records and vectors into a new collection of the embedded engine (extra
        `qdrant`), which `open`, `hybridtei search` and `hybridtei serve` read. `overwrite`: delete
        a collection of this name first. Raises StoreError if there is one, or it is this index.
        """
        store = open_store(StoreConfig(qdrant_path=str(folder)))
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


def _payload(record: Any, place: int) -> dict[str, Any]:
    """A record as JSON's types. Raises InvalidInput, naming the record."""
    where = f"records[{place}]"
    if isinstance(record, str):
        record = {"text": record}
    if not isinstance(record, Mapping):
        raise InvalidInput(f"`{where}` is {type(record).__name__}: should be a text or a mapping")
    if not isinstance(record.get("text"), str):
        raise InvalidInput(f"`{where}.text` is {record.get('text')!r:.100}: should be a text")
    try:
        encoded = orjson.dumps(
            dict(record),
            default=_plain,
            option=orjson.OPT_SERIALIZE_NUMPY,
        )
    except TypeError as error:
        raise InvalidInput(f"`{where}` should be what JSON has: {error}") from None
    payload: dict[str, Any] = orjson.loads(encoded)
    return payload


def _plain(value: Any) -> Any:
    """Values of data frames as JSON: a missing one is null, a time is a text."""
    if str(value) in ("NaT", "<NA>"):
        return None
    if hasattr(value, "isoformat"):
        return value.isoformat()
    raise TypeError(f"it has a value of {type(value).__name__}")


class _Ids:
    """The ids of one call of `add`. `first`: gives the first whole number above all stored ones;
    asked for when a record has no id."""

    def __init__(self, first: Callable[[], int]) -> None:
        self.of_chunk: list[PointId] = []
        self._first = first
        # Above the ids of this call; None until the stored ids are known
        self._next: int | None = None
        self._largest = -1
        # The records of ids that the caller gave, and ids that were made here
        self._places: dict[PointId, int] = {}
        self._made: set[PointId] = set()

    @property
    def next(self) -> int:
        """The first whole number above all ids."""
        if self._next is None:
            self._next = self._first()
        return max(self._next, self._largest + 1)

    def take(self, values: Sequence[Any], begin: int) -> dict[PointId, PointId]:
        """Set the ids of a chunk, whose first record is at `begin`. Return new ids of records
        before it, whose made ids are given here. Raises InvalidInput."""
        ids = [_id(value, place) for place, value in enumerate(values, begin)]
        for place, identity in enumerate(ids, begin):
            if identity is None:
                continue
            if identity in self._places:
                raise InvalidInput(
                    f"`records[{self._places[identity]}]` and `records[{place}]` have one id, "
                    f"{values[place - begin]!r}: give each its own"
                )
            self._places[identity] = place
            if isinstance(identity, int):
                self._largest = max(self._largest, identity)
        clashes = [identity for identity in ids if identity in self._made]
        moved: dict[PointId, PointId] = {
            identity: self._new() for identity in clashes if identity is not None
        }
        self._made.difference_update(moved)
        self.of_chunk = [self._new() if identity is None else identity for identity in ids]
        return moved

    def _new(self) -> int:
        identity = self.next
        self._next = identity + 1
        self._made.add(identity)
        return identity


def _id(value: Any, place: int) -> PointId | None:
    """The point's id of a record's `id`; None without one. Raises InvalidInput."""
    if isinstance(value, str):
        return point_id(value, 0)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value <= MAX_ID:
        raise InvalidInput(
            f"`records[{place}].id` is {value!r:.100}: should be a text, or a whole number from 0 "
            f"to {MAX_ID}"
        )
    return value


async def _largest_id(store: Store, name: str) -> int:
    """The largest whole number among a collection's ids; -1 without one. A store lists numbers in
    their order, before UUIDs."""
    low, high = -1, MAX_ID
    while low < high:
        records, _ = await store.scroll(
            name,
            limit=1,
            offset=low + (high - low + 1) // 2,
            with_payload=False,
        )
        if records and isinstance(records[0].id, int):
            low = records[0].id
        else:
            high = low + (high - low + 1) // 2 - 1
    return low


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
        async for points in pages_of(source, name, CHUNK, with_vectors=True):
            await target.upsert(new_name, points, schema)
        await target.optimize(new_name)
    finally:
        await target.close()
