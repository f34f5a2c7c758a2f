"""Schemas of collections: making one for a model, and comparing a stored one before a model
searches it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Protocol, TypeVar

import msgspec

from hybridtei.batch import Head
from hybridtei.errors import (
    CollectionMismatch,
    InvalidInput,
    StoreError,
    StoreUnavailable,
    UnknownCollection,
)
from hybridtei.models.checkpoint.spec import ModelSpec
from hybridtei.options import EmbedOptions
from hybridtei.outputs import Embeddings
from hybridtei.retrieval.store.base import (
    MULTIVECTOR,
    NAMES,
    CollectionSchema,
    Selector,
    Store,
    Stored,
)
from hybridtei.retrieval.store.own import OUR_NAMES, OURS, Own, view_of
from hybridtei.retrieval.store.plan import (
    CALIBRATION,
    FINGERPRINT,
    MODEL_ID,
    RECORDS,
    PackedFormat,
    budget_of_plan,
    fit_to_schema,
    layout_of,
    packed_format,
    payload_of,
    plan_of,
)
from hybridtei.retrieval.store.proof import proof_of

T = TypeVar("T")


class VectorModel(Protocol):
    """A model that makes a collection's vectors: an `Encoder`, or a server's as one request asks
    it. `fingerprint`: the hash of the files that it was loaded from."""

    @property
    def model_id(self) -> str: ...

    @property
    def spec(self) -> ModelSpec: ...

    async def embed(
        self, texts: Sequence[str], heads: frozenset[Head], options: EmbedOptions
    ) -> Embeddings: ...

    async def fingerprint(self) -> str | None: ...


OF_OTHERS = "if other software made it, `unlabelled` (--unlabelled) searches it"
MAX_NAME_BYTES = 200
# Fits to models that are kept: a request chooses a part of their keys
MAX_FITS = 1_000
# And controls
FORBIDDEN_IN_NAMES = frozenset('<>:"/\\|?*') | {
    chr(code) for code in (*range(0x20), *range(0x7F, 0xA0))
}


def check_name(name: str, kind: str = "collection") -> None:
    """Raises InvalidInput unless every store accepts this name of a collection or a vector."""
    if not name or len(name.encode(errors="replace")) > MAX_NAME_BYTES:
        raise InvalidInput(
            f"{kind} {name[:40]!r}: its name should have 1 to {MAX_NAME_BYTES} bytes"
        )
    bad = sorted(FORBIDDEN_IN_NAMES & set(name))
    if bad:
        raise InvalidInput(f"{kind} {name!r}: its name may not hold {bad[0]!r}")
    if name.startswith("."):
        raise InvalidInput(f"{kind} {name!r}: its name may not begin with a dot")


def check_names(name: str, schema: CollectionSchema) -> None:
    """Raises InvalidInput unless every store accepts the names of the collection and its
    vectors."""
    check_name(name)
    for vector in (*schema.vectors, *schema.sparse):
        check_name(vector, "vector")


def check_fits(
    existing: CollectionSchema,
    wanted: CollectionSchema,
    name: str = "",
    *,
    unlabelled: bool = False,
) -> None:
    """Raises CollectionMismatch, field by field, unless the existing collection can store and
    search the wanted vectors.

    It may have more vectors, any index, quantisation and shards, and may lack the fingerprint of
    its model's files.
    `unlabelled`: accept a collection without a model's label, made by other software or by a server
    too old for labels.
    """
    existing_facts = dict(_facts(existing))
    facts = dict(_facts(wanted))
    if unlabelled and not any(key in existing.metadata for key in wanted.metadata):
        facts = {
            field: value for field, value in facts.items() if not field.startswith("metadata ")
        }
    if FINGERPRINT not in existing.metadata:
        facts.pop(f"metadata {FINGERPRINT}", None)
    # Of an export; the collection keeps its own curves, and what its points are
    for key in (CALIBRATION, RECORDS):
        facts.pop(f"metadata {key}", None)
    lines = [
        f"  {field}: there {existing_facts.get(field, 'nothing')}, wanted {value}"
        for field, value in facts.items()
        if existing_facts.get(field) != value
    ]
    if lines:
        title = f"collection {name!r}" if name else "the collection"
        if not existing.metadata:
            lines.append(OF_OTHERS)
        elif [line.split()[1] for line in lines] == [f"{FINGERPRINT}:"]:
            # The fingerprint alone differs
            lines.append(
                "the model's files have changed, or this version reads texts otherwise "
                "(tokenizer settings, longest input, default prompt); `hybridtei migrate "
                f"{name or 'NAME'}` makes the vectors anew"
            )
        raise CollectionMismatch("\n".join([f"{title} is laid out for something else:", *lines]))


def _facts(schema: CollectionSchema) -> Iterator[tuple[str, Any]]:
    for name, params in schema.vectors.items():
        yield f"vector {name}, size", params.size
        yield f"vector {name}, distance", params.distance
        multivector = params.multivector_config or {}
        yield (
            f"vector {name}, comparator",
            multivector.get("comparator", "none: one vector a point"),
        )
    for name, sparse in schema.sparse.items():
        yield f"sparse vector {name}, modifier", sparse.modifier or "none"
    for key, value in schema.metadata.items():
        yield f"metadata {key}", value


def schema_to_dict(schema: CollectionSchema) -> dict[str, Any]:
    """The schema as JSON types, without fields that are None. `msgspec.convert` reads it."""
    plain = msgspec.to_builtins(replace(schema, stored_as=None))
    return {name: value for name, value in plain.items() if value is not None}


# Until a search notices that an alias has moved
KEPT_S = 2.0
# A mark further in the future is not a migration's
MAX_HOLD_S = 3_600.0
# How long a writer waits for a migration to switch the name
SWITCH_WAIT_S = 30.0
LOOK_S = 0.05
# Names in an error
MAX_LISTED = 20
# Keys of a collection's metadata, which `hybridtei migrate` writes and describes.
MIGRATION_OF, SWITCHING, STAND_IN = "migration_of", "switching_until", "stand_in"
# Keys of migrations and of a running ingest, which mean nothing in another store.
OF_ONE_STORE = frozenset({MIGRATION_OF, SWITCHING, STAND_IN, "previous"})


@dataclass(frozen=True, slots=True, eq=False)
class Searchable:
    """A collection that fits a model: what its searches and writes need of both."""

    schema: CollectionSchema
    spec: ModelSpec
    # The collection's own name, behind an alias
    name: str
    # The outputs of both
    heads: frozenset[Head]
    # The format of multi-vectors as bytes in the payload, and the payload without them
    packed: PackedFormat | None
    payload: Selector
    # True if the collection has fewer numbers of a vector than the model makes
    is_cut: bool
    # The collection's names of our kinds of vectors, where they differ
    names: Mapping[str, str]
    # False if each point stands for itself, also with a document's keys in its payload
    has_documents: bool
    # True if the collection has no fingerprint, but the model makes its texts' vectors
    is_proved: bool = False

    @classmethod
    def of(
        cls,
        schema: CollectionSchema,
        spec: ModelSpec,
        name: str,
        *,
        names: Mapping[str, str] = OUR_NAMES,
        is_proved: bool = False,
    ) -> Searchable:
        """The facts of a schema that `check_searchable` has accepted."""
        plan = plan_of(schema)
        return cls(
            schema,
            spec,
            schema.stored_as or name,
            common_heads(schema, spec),
            packed_format(schema),
            payload_of(schema),
            plan.dense_dim != spec.dense_width
            or (plan.multivector_dim or 0) != spec.multivector_width,
            names,
            MODEL_ID in schema.metadata and RECORDS not in schema.metadata,
            is_proved,
        )

    def fitted(self, embeddings: Embeddings) -> Embeddings:
        """Vectors of the collection's widths."""
        return fit_to_schema(embeddings, self.schema) if self.is_cut else embeddings


class CollectionSchemas:
    """The schemas of a store's collections, cached for `KEPT_S` seconds, and their fits to models,
    cached until the schema changes. `stored_as`: the collection behind an alias."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._cache: dict[str, tuple[float, CollectionSchema]] = {}
        self._fits: dict[tuple[str, str, Own], tuple[CollectionSchema, Searchable]] = {}

    async def of(self, name: str, *, writing: bool = False) -> CollectionSchema:
        """The schema of the collection behind a name. `writing`: the uncached schema, after waiting
        for a migration's switch.

        Raises UnknownCollection, InvalidInput for an impossible name, StoreUnavailable if a switch
        takes longer than `SWITCH_WAIT_S`, StoreError.
        """
        kept_until, cached = self._cache.get(name, (0.0, None))
        if cached is not None and kept_until > time.monotonic() and not writing:
            return cached
        check_name(name)
        began = time.monotonic()
        while True:
            schema = await self._read(name)
            if schema is not None:
                is_switching = _is_held(schema)
            else:
                is_switching = cached is not None and await self._has_copy(name)
            # The switch may have ended between the two calls: read again
            if schema is None and not is_switching:
                schema = await self._read(name)
            if schema is not None and not (writing and is_switching):
                # The same object, so that fits to models stay valid
                if schema == cached:
                    schema = cached
                self._cache[name] = time.monotonic() + KEPT_S, schema
                return schema
            if not is_switching:
                self._cache.pop(name, None)
                # Those of other names stay: any client may ask for a name that does not exist
                for key in [key for key in self._fits if key[0] == name]:
                    del self._fits[key]
                named = "" if writing else await others(self.store, name)
                raise UnknownCollection(f"there is no collection `{name}`{named}")
            if time.monotonic() > began + SWITCH_WAIT_S:
                raise StoreUnavailable(
                    f"collection {name!r} is about to change its model: try again"
                )
            await asyncio.sleep(LOOK_S)

    async def fit(
        self, name: str, schema: CollectionSchema, model: VectorModel, own: Own = OURS
    ) -> Searchable:
        """The collection and the model, compared when the schema is new: by the fingerprint of the
        model's files, or by stored texts if one of both has none. Raises CollectionMismatch."""
        spec, model_id = model.spec, model.model_id
        key = name, model_id, own
        before, fit = self._fits.get(key, (None, None))
        if fit is None or before is not schema or fit.spec is not spec:
            names = own.names(schema)
            plain = view_of(schema, names)
            files = await model.fingerprint() if FINGERPRINT in schema.metadata else None
            check_searchable(
                plain, spec, model_id, name, fingerprint=files, unlabelled=own.unlabelled
            )
            is_proved = False
            if files is None:
                is_proved, plain = await self._proof(plain, name, model, own, names)
            fit = Searchable.of(plain, spec, name, names=names, is_proved=is_proved)
            if len(self._fits) >= MAX_FITS:
                self._fits.clear()
            self._fits[key] = schema, fit
        return fit

    async def _proof(
        self,
        schema: CollectionSchema,
        name: str,
        model: VectorModel,
        own: Own,
        names: Mapping[str, str],
    ) -> tuple[bool, CollectionSchema]:
        heads = common_heads(schema, model.spec)
        options = EmbedOptions(
            truncate=True,
            input_type="document",
            multivector=budget_of_plan(plan_of(schema)),
        )

        async def embed(texts: Sequence[str]) -> Embeddings:
            return await model.embed(texts, heads, options)

        name = schema.stored_as or name
        return await proof_of(
            self.store,
            name,
            schema,
            embed,
            model.model_id,
            own=own,
            names=names,
        )

    async def _read(self, name: str) -> CollectionSchema | None:
        """The schema of the collection that answers for a name, or None."""
        target = (await self.store.aliases()).get(name, name)
        schema = await self.store.describe(target)
        if schema is None:
            return None
        stand_in = schema.metadata.get(STAND_IN)
        if stand_in and _is_held(schema):
            target = stand_in
        return replace(schema, stored_as=target)

    async def _has_copy(self, gone: str) -> bool:
        """True if a migration has just deleted a collection, and is about to give its name to the
        copy."""
        for collection in await self.store.collections():
            schema = await self.store.describe(collection)
            if schema is not None and schema.metadata.get(MIGRATION_OF) == gone:
                return True
        return False

    async def collection(
        self, name: str, schema: CollectionSchema
    ) -> tuple[CollectionSchema, bool]:
        """Get the collection of a name, for writing, or make it. Return its schema, and True if it
        was made here: another client may do so at the same time.

        Raises CollectionMismatch if it cannot store `schema`; StoreError.
        """
        try:
            current = await self.of(name, writing=True)
        except UnknownCollection:
            try:
                await self.store.create(name, schema)
                return replace(schema, stored_as=name), True
            except StoreError:
                if (other := await self._read(name)) is None:
                    raise
                current = other
        check_fits(current, schema, name)
        return current, False

    async def sign(self, fit: Searchable, model: VectorModel) -> None:
        """At a write, give a collection without a fingerprint that of the model that was proved to
        make its vectors."""
        is_unsigned = FINGERPRINT not in fit.schema.metadata
        if is_unsigned and fit.is_proved and (files := await model.fingerprint()) is not None:
            await self.store.annotate(fit.name, {FINGERPRINT: files})

    async def upsert(self, name: str, schema: CollectionSchema, points: Sequence[Stored]) -> bool:
        """Store points. Return False if a migration switches the name meanwhile: make the points
        again for the new schema.

        Raises StoreError, InvalidPoint.
        """
        try:
            await self.store.upsert(schema.stored_as or name, points, schema)
        except StoreError:
            if await self.is_current(name, schema):
                raise
            return False
        return await self.is_current(name, schema)

    async def reading(self, name: str, work: Callable[[CollectionSchema], Awaitable[T]]) -> T:
        """Return the result of `work` on a collection. Repeat it if a migration switched the name
        meanwhile."""
        schema = await self.of(name)
        try:
            return await work(schema)
        except StoreError:
            if await self.is_current(name, schema):
                raise
        return await work(await self.of(name))

    async def is_current(self, name: str, schema: CollectionSchema) -> bool:
        """True if a name still means this collection, and no migration is about to switch it."""
        current = await self._read(name)
        if current is None or _is_held(current) or current.stored_as != schema.stored_as:
            self._cache.pop(name, None)
            return False
        return True


def _is_held(schema: CollectionSchema) -> bool:
    """True if a migration is about to switch the collection's name to its copy."""
    until = schema.metadata.get(SWITCHING)
    return isinstance(until, float | int) and 0 < until - time.time() <= MAX_HOLD_S


def heads_of(schema: CollectionSchema) -> frozenset[Head]:
    """The outputs that the collection stores."""
    names = {*schema.vectors, *schema.sparse}
    if packed_format(schema) is not None:
        names.add(MULTIVECTOR)
    return frozenset(Head(name) for name in NAMES if name in names)


def common_heads(schema: CollectionSchema, spec: ModelSpec) -> frozenset[Head]:
    """The outputs of both the collection and the model."""
    return heads_of(schema) & spec.heads


async def others(store: Store, name: str) -> str:
    """The end of an error's message: the store, the most similar name, and all names."""
    names = sorted({*await store.collections(), *await store.aliases()})
    nearest = "".join(f"; did you mean `{near}`?" for near in get_close_matches(name, names, 1))
    listed = ", ".join(names[:MAX_LISTED]) + (", …" if len(names) > MAX_LISTED else "")
    return f" in {store.place}{nearest} ({listed or 'no collections'})"


def check_searchable(
    schema: CollectionSchema,
    spec: ModelSpec,
    model_id: str,
    name: str,
    *,
    fingerprint: str | None = None,
    unlabelled: bool = False,
) -> None:
    """Raises CollectionMismatch unless this model's queries fit the collection's vectors.

    `fingerprint`: of the model's files. It is compared only if both sides have one.
    """
    heads = common_heads(schema, spec)
    if not heads:
        fields = ", ".join([*schema.vectors, *schema.sparse]) or "none"
        raise CollectionMismatch(
            f"collection {name!r} has the named vectors {fields}; {model_id} makes "
            f"{', '.join(sorted(spec.heads)) or 'none'}; {OF_OTHERS}"
        )
    wanted = layout_of(spec, model_id, plan_of(schema), heads, is_there=True)
    vectors = dict(wanted.vectors)
    for field, params in vectors.items():
        # For unit vectors the dot product equals the cosine
        if schema.vectors[field].distance == "Dot":
            vectors[field] = msgspec.structs.replace(params, distance="Dot")
    # A sparse vector fits with idf or without: take the collection's setting
    sparse = {field: schema.sparse[field] for field in wanted.sparse}
    metadata = dict(wanted.metadata)
    if fingerprint is not None:
        metadata[FINGERPRINT] = fingerprint
    check_fits(
        schema,
        replace(wanted, vectors=vectors, sparse=sparse, metadata=metadata),
        name,
        unlabelled=unlabelled,
    )
