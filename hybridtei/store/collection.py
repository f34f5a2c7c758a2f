"""Schemas of collections: made for a model, described by a store, compared before a model searches."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from qdrant_client import models

from hybridtei.batch import Head
from hybridtei.checkpoint.spec import ModelSpec
from hybridtei.errors import CollectionMismatch, InvalidInput, StoreError, UnknownCollection
from hybridtei.store.base import DENSE, MULTIVECTOR, NAMES, SPARSE, CollectionSchema, Store
from hybridtei.store.migration import copies, migration_of
from hybridtei.store.packed import packed_format
from hybridtei.store.plan import FINGERPRINT, schema_for


def create_arguments(schema: CollectionSchema) -> dict[str, Any]:
    """The arguments of qdrant-client's `create_collection`."""
    return {
        "vectors_config": dict(schema.vectors),
        "sparse_vectors_config": dict(schema.sparse) or None,
        "shard_number": schema.shard_number,
        "replication_factor": schema.replication_factor,
        "on_disk_payload": schema.on_disk_payload,
        "metadata": dict(schema.metadata) or None,
    }


def query_arguments(request: models.QueryRequest) -> dict[str, Any]:
    """The arguments of `query_points`, where some fields have other names than in the request itself."""
    arguments = {
        "query": request.query,
        "using": request.using,
        "prefetch": request.prefetch,
        "query_filter": request.filter,
        "search_params": request.params,
        "offset": request.offset,
        "with_payload": request.with_payload if request.with_payload is not None else False,
        "with_vectors": request.with_vector if request.with_vector is not None else False,
        "score_threshold": request.score_threshold,
        "lookup_from": request.lookup_from,
        "shard_key_selector": request.shard_key,
    }
    if request.limit is not None:
        arguments["limit"] = request.limit
    return arguments


def schema_of(info: models.CollectionInfo) -> CollectionSchema:
    """The schema of an existing collection; a vector without a name has the empty name."""
    params = info.config.params
    vectors = params.vectors or {}
    if isinstance(vectors, models.VectorParams):
        vectors = {"": vectors}
    return CollectionSchema(
        vectors=vectors,
        sparse=params.sparse_vectors or {},
        metadata=info.config.metadata or {},
        shard_number=params.shard_number,
        replication_factor=params.replication_factor,
        on_disk_payload=params.on_disk_payload,
    )


MAX_NAME_BYTES = 200
FORBIDDEN_IN_NAMES = frozenset('<>:"/\\|?*') | {chr(code) for code in (*range(0x20), *range(0x7F, 0xA0))}  # and controls


def check_name(name: str, kind: str = "collection") -> None:
    """Raises InvalidInput unless every store takes a collection, or a vector, of this name."""
    if not name or len(name.encode(errors="replace")) > MAX_NAME_BYTES:
        raise InvalidInput(f"{kind} {name[:40]!r}: its name should have 1 to {MAX_NAME_BYTES} bytes")
    bad = sorted(FORBIDDEN_IN_NAMES & set(name))
    if bad:
        raise InvalidInput(f"{kind} {name!r}: its name may not hold {bad[0]!r}")
    if name.startswith("."):
        raise InvalidInput(f"{kind} {name!r}: its name may not begin with a dot")


def check_names(name: str, schema: CollectionSchema) -> None:
    """Raises InvalidInput unless every store takes the names of the collection and of its vectors."""
    check_name(name)
    for vector in (*schema.vectors, *schema.sparse):
        check_name(vector, "vector")


def check_fits(existing: CollectionSchema, wanted: CollectionSchema, name: str = "", *, unlabelled: bool = False) -> None:
    """Raises CollectionMismatch, field by field, unless the existing collection can store and search the wanted vectors.

    It may have more vectors, any index, quantisation and shards, and no fingerprint of its model's files. `unlabelled` accepts
    a collection without a model's label: made by other software, or by a server too old to keep labels.
    """
    there, here = dict(_facts(existing)), dict(_facts(wanted))
    if unlabelled and not any(key in existing.metadata for key in wanted.metadata):
        here = {field: value for field, value in here.items() if not field.startswith("metadata ")}
    if FINGERPRINT not in existing.metadata:
        here.pop(f"metadata {FINGERPRINT}", None)
    lines = [
        f"  {field}: there {_shown(there.get(field))}, wanted {_shown(value)}"
        for field, value in here.items()
        if there.get(field) != value
    ]
    if lines:
        title = f"collection {name!r}" if name else "the collection"
        if [line.split()[1] for line in lines] == [f"{FINGERPRINT}:"]:
            lines.append(
                "the model's files have changed, or this version reads texts otherwise (tokenizer settings, longest input, "
                f"default prompt); `hybridtei migrate {name or 'NAME'}` makes the vectors anew"
            )
        raise CollectionMismatch("\n".join([f"{title} is laid out for something else:", *lines]))


def _facts(schema: CollectionSchema) -> Iterator[tuple[str, Any]]:
    for name, params in schema.vectors.items():
        yield f"vector {name}, size", params.size
        yield f"vector {name}, distance", _word(params.distance)
        comparator = params.multivector_config.comparator if params.multivector_config else "none: one vector a point"
        yield f"vector {name}, comparator", _word(comparator)
    for name, sparse in schema.sparse.items():
        yield f"sparse vector {name}, modifier", _word(sparse.modifier or models.Modifier.NONE)
    for key, value in schema.metadata.items():
        yield f"metadata {key}", value


def _word(value: Any) -> str:
    return str(getattr(value, "value", value))


def _shown(value: Any) -> str:
    return "nothing" if value is None else str(value)


def schema_to_dict(schema: CollectionSchema) -> dict[str, Any]:
    """The schema as JSON has it, without fields that are None."""
    plain = {
        "vectors": {name: _plain(params) for name, params in schema.vectors.items()},
        "sparse": {name: _plain(params) for name, params in schema.sparse.items()},
        "metadata": dict(schema.metadata),
        "shard_number": schema.shard_number,
        "replication_factor": schema.replication_factor,
        "on_disk_payload": schema.on_disk_payload,
    }
    return {field: value for field, value in plain.items() if value is not None}


def schema_from_dict(plain: Mapping[str, Any]) -> CollectionSchema:
    """The schema that `schema_to_dict` wrote."""
    return CollectionSchema(
        vectors={name: models.VectorParams.model_validate(params) for name, params in plain["vectors"].items()},
        sparse={name: models.SparseVectorParams.model_validate(params) for name, params in plain["sparse"].items()},
        metadata=plain.get("metadata", {}),
        shard_number=plain.get("shard_number"),
        replication_factor=plain.get("replication_factor"),
        on_disk_payload=plain.get("on_disk_payload"),
    )


def _plain(params: Any) -> dict[str, Any]:
    return dict(params.model_dump(mode="json", by_alias=True, exclude_none=True, warnings=False))


MIGRATING_S = 0.5  # the same, while a collection changes its model
KEPT_S = 10.0  # until a search notices that another client dropped a collection and created it for another model


class CollectionSchemas:
    """The schemas of a store's collections, cached for `KEPT_S` seconds."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._cache: dict[str, tuple[float, list[CollectionSchema]]] = {}

    @classmethod
    def pinned(cls, store: Store, name: str, schema: CollectionSchema) -> CollectionSchemas:
        """The schemas of one collection, as one copy of it has them, whatever comes of it meanwhile."""
        schemas = cls(store)
        schemas._cache[name] = math.inf, [schema]
        return schemas

    async def of(self, name: str) -> CollectionSchema:
        """The schema of a collection: of the copy that answers. Raises what `copies` raises."""
        return (await self.copies(name))[0]

    async def copies(self, name: str) -> list[CollectionSchema]:
        """The schemas of a collection's copies, the one that answers first: two while it changes its model.

        Raises UnknownCollection, InvalidInput for an impossible name, StoreError.
        """
        check_name(name)
        cached = self._cache.get(name)
        if cached is not None and cached[0] > time.monotonic():
            return cached[1]
        found = await copies(self.store, name)
        if not found and cached is not None and cached[1][0].stored_as != name:
            found = cached[1]  # its old copy has gone, and its new one gets the name in a moment
        elif not found:
            self._cache.pop(name, None)
            raise UnknownCollection(f"there is no collection `{name}`")
        is_settled = len(found) == 1 and migration_of(found[0]) is None
        self._cache[name] = time.monotonic() + (KEPT_S if is_settled else MIGRATING_S), found
        return found

    async def create(self, name: str, schema: CollectionSchema) -> tuple[CollectionSchema, bool]:
        """Create a collection, unless another client does at the same moment: its schema, and whether it was created here.

        Raises StoreError.
        """
        self._cache.pop(name, None)
        try:
            await self.store.create(name, schema)
        except StoreError:
            if made := await copies(self.store, name):
                return made[0], False
            raise
        return schema, True


def heads_of(schema: CollectionSchema) -> frozenset[Head]:
    """The outputs that the collection stores."""
    names = {*schema.vectors, *schema.sparse, *([MULTIVECTOR] if packed_format(schema) is not None else [])}
    return frozenset(Head(name) for name in NAMES if name in names)


def common_heads(schema: CollectionSchema, spec: ModelSpec) -> frozenset[Head]:
    """The outputs that both the collection and the model have."""
    return heads_of(schema) & spec.heads


def check_searchable(
    schema: CollectionSchema,
    spec: ModelSpec,
    model_id: str,
    name: str,
    *,
    fingerprint: str | None = None,
    unlabelled: bool = False,
) -> None:
    """Raises CollectionMismatch unless this model's queries can be compared with the collection's vectors.

    `fingerprint`: of the model's files, which are not compared without it, nor where the collection has none.
    """
    heads = common_heads(schema, spec)
    if not heads:
        there = ", ".join([*schema.vectors, *schema.sparse]) or "none"
        raise CollectionMismatch(
            f"collection {name!r} has the vectors {there}; {model_id} makes {', '.join(sorted(spec.heads)) or 'none'}"
        )
    sparse, packed = schema.sparse.get(SPARSE), packed_format(schema)
    wanted = schema_for(
        spec,
        model_id,
        heads=heads,
        dense_dim=_narrower(schema, DENSE, spec.dense_width) if Head.DENSE in heads else None,
        multivector_dim=_narrower(schema, MULTIVECTOR, spec.multivector.dim)
        if Head.MULTIVECTOR in heads and spec.multivector
        else None,
        multivector_dtype=None if packed is None else packed.dtype,
        sparse_idf=sparse is not None and sparse.modifier == models.Modifier.IDF,
    )
    distances = {field: _with_distance(params, schema.vectors[field]) for field, params in wanted.vectors.items()}
    metadata = {**wanted.metadata, **({} if fingerprint is None else {FINGERPRINT: fingerprint})}
    check_fits(schema, replace(wanted, vectors=distances, metadata=metadata), name, unlabelled=unlabelled)


def _with_distance(wanted: models.VectorParams, there: models.VectorParams) -> models.VectorParams:
    """Accepts a collection compared by dot product, which for unit vectors is the cosine."""
    if there.distance == models.Distance.DOT:
        return wanted.model_copy(update={"distance": models.Distance.DOT})
    return wanted


def _narrower(schema: CollectionSchema, name: str, width: int) -> int | None:
    packed = packed_format(schema)
    size = schema.vectors[name].size if packed is None or name != MULTIVECTOR else packed.width
    return size if size < width else None
