"""Schemas of collections: made for a model, described by a store, compared before a model searches."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from qdrant_client import models

from hybridtei.batch import Head
from hybridtei.checkpoint.files import require
from hybridtei.checkpoint.spec import ModelSpec
from hybridtei.errors import CollectionMismatch, InvalidInput, UnknownCollection
from hybridtei.store.base import DENSE, MULTIVECTOR, NAMES, SPARSE, CollectionSchema, Store


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


Quantization = Literal["scalar", "binary", "binary-2bit", "product", "turbo"]

MODEL_ID, TOKENIZER = "model_id", "tokenizer_sha256"
MAX_NAME_BYTES = 200
FORBIDDEN_IN_NAMES = frozenset('<>:"/\\|?*\0\x1f')


def schema_for(
    spec: ModelSpec,
    model_id: str,
    *,
    heads: frozenset[Head] | None = None,
    dense_dim: int | None = None,
    multivector_dim: int | None = None,
    multivector_index: bool | None = None,
    sparse_idf: bool | None = None,
    quantization: Quantization | None = None,
    multivector_quantization: Quantization | None = None,
    on_disk: bool | None = None,
    on_disk_payload: bool | None = None,
    shards: int | None = None,
    replicas: int | None = None,
) -> CollectionSchema:
    """The schema of a model's outputs: `dense`, `sparse` and `multivector`, as far as the model and `heads` have them.

    Both dense kinds are compared by cosine: for unit vectors it is the dot product, and a vector that was cut and not
    normalised again still ranks right; the price is that stores keep, and return, unit vectors. A multi-vector has no graph
    and lies on disk, since it rescores candidates, unless it is the only vector (`multivector_index`). `sparse_idf`: by
    default as the sparse head declares; a SPLADE head never profits. `dense_dim`, `multivector_dim`: widths to which vectors
    are cut. Raises InvalidInput if the model has none of the outputs, MissingArtifact without its tokenizer.
    """
    outputs = spec.heads & (heads if heads is not None else spec.heads) & {Head.DENSE, Head.SPARSE, Head.MULTIVECTOR}
    if not outputs:
        raise InvalidInput(f"{model_id}: makes none of the vectors that a collection holds: dense, sparse, multivector")
    vectors: dict[str, models.VectorParams] = {}
    sparse: dict[str, models.SparseVectorParams] = {}
    if Head.DENSE in outputs:
        width = _width(dense_dim, spec.dense_width, "dense_dim")
        vectors[DENSE] = models.VectorParams(
            size=width, distance=models.Distance.COSINE, on_disk=on_disk, quantization_config=_quantization(quantization)
        )
    if Head.MULTIVECTOR in outputs and spec.multivector is not None:
        index = outputs == {Head.MULTIVECTOR} if multivector_index is None else multivector_index
        width = _width(multivector_dim, spec.multivector.dim, "multivector_dim")
        vectors[MULTIVECTOR] = _multivector(width, index, multivector_quantization)
    if Head.SPARSE in outputs and spec.sparse is not None:
        idf = spec.sparse.idf and not spec.is_splade if sparse_idf is None else sparse_idf
        sparse[SPARSE] = models.SparseVectorParams(
            modifier=models.Modifier.IDF if idf else None,
            index=None if on_disk is None else models.SparseIndexParams(on_disk=on_disk),
        )
    metadata = {MODEL_ID: model_id, TOKENIZER: tokenizer_sha256(spec)}
    return CollectionSchema(vectors, sparse, metadata, shards, replicas, on_disk_payload)


def tokenizer_sha256(spec: ModelSpec) -> str:
    """The hash of the tokenizer's file: equal hashes mean equal token ids, which are the dimensions of sparse vectors."""
    file = spec.folder / "tokenizer.json"
    return _file_sha256(file, file.stat().st_mtime_ns if file.is_file() else 0)


@lru_cache
def _file_sha256(file: Path, modified_ns: int) -> str:
    """Cached while the file is unchanged: every search compares it."""
    require(file)
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _width(width: int | None, full: int, field: str) -> int:
    if width is None:
        return full
    if not 1 <= width <= full:
        raise InvalidInput(f"`{field}` is {width}, should be between 1 and the model's {full}")
    return width


def _multivector(width: int, index: bool, quantization: Quantization | None) -> models.VectorParams:
    # m=0 alone would still link points whose payload is indexed
    graph = None if index else models.HnswConfigDiff(m=0, payload_m=0)
    return models.VectorParams(
        size=width,
        distance=models.Distance.COSINE,
        multivector_config=models.MultiVectorConfig(comparator=models.MultiVectorComparator.MAX_SIM),
        hnsw_config=graph,
        on_disk=True,
        quantization_config=_quantization(quantization),
    )


def _quantization(kind: Quantization | None) -> models.QuantizationConfig | None:
    """A compressed copy of the vectors, kept in memory."""
    if kind is None:
        return None
    if kind == "scalar":
        return models.ScalarQuantization(
            scalar=models.ScalarQuantizationConfig(type=models.ScalarType.INT8, quantile=0.99, always_ram=True)
        )
    if kind == "product":
        return models.ProductQuantization(
            product=models.ProductQuantizationConfig(compression=models.CompressionRatio.X16, always_ram=True)
        )
    if kind == "binary":
        return models.BinaryQuantization(binary=models.BinaryQuantizationConfig(always_ram=True))
    if kind == "binary-2bit":
        encoding = models.BinaryQuantizationEncoding.TWO_BITS
        return models.BinaryQuantization(binary=models.BinaryQuantizationConfig(always_ram=True, encoding=encoding))
    if kind == "turbo":
        return models.TurboQuantization(turbo=models.TurboQuantQuantizationConfig(always_ram=True))
    raise InvalidInput(f"`quantization` is {kind!r}, should be scalar, binary, binary-2bit, product or turbo")


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

    It may have more vectors, and any index, quantisation and shards. `unlabelled` accepts a collection without a model's label:
    made by other software, or by a server too old to keep labels.
    """
    there, here = dict(_facts(existing)), dict(_facts(wanted))
    if unlabelled and not any(key in existing.metadata for key in wanted.metadata):
        here = {field: value for field, value in here.items() if not field.startswith("metadata ")}
    lines = [
        f"  {field}: there {_shown(there.get(field))}, wanted {_shown(value)}"
        for field, value in here.items()
        if there.get(field) != value
    ]
    if lines:
        title = f"collection {name!r}" if name else "the collection"
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


KEPT_S = 10.0  # until a search notices that another client dropped a collection and created it for another model


class CollectionSchemas:
    """The schemas of a store's collections, cached for `KEPT_S` seconds."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._cache: dict[str, tuple[float, CollectionSchema]] = {}

    async def of(self, name: str) -> CollectionSchema:
        """The schema of a collection. Raises UnknownCollection, InvalidInput for an impossible name, StoreError."""
        check_name(name)
        cached = self._cache.get(name)
        if cached is not None and cached[0] > time.monotonic():
            return cached[1]
        schema = await self.store.describe(name)
        if schema is None:
            self._cache.pop(name, None)
            raise UnknownCollection(f"there is no collection `{name}`")
        self._cache[name] = time.monotonic() + KEPT_S, schema
        return schema

    def forget(self, name: str) -> None:
        """Drops the cached schema of a collection that was created or dropped."""
        self._cache.pop(name, None)


def heads_of(schema: CollectionSchema) -> frozenset[Head]:
    """The outputs that the collection stores."""
    return frozenset(Head(name) for name in NAMES if name in schema.vectors or name in schema.sparse)


def common_heads(schema: CollectionSchema, spec: ModelSpec) -> frozenset[Head]:
    """The outputs that both the collection and the model have."""
    return heads_of(schema) & spec.heads


def check_searchable(schema: CollectionSchema, spec: ModelSpec, model_id: str, name: str, *, unlabelled: bool = False) -> None:
    """Raises CollectionMismatch unless this model's queries can be compared with the collection's vectors."""
    heads = common_heads(schema, spec)
    if not heads:
        there = ", ".join([*schema.vectors, *schema.sparse]) or "none"
        raise CollectionMismatch(
            f"collection {name!r} has the vectors {there}; {model_id} makes {', '.join(sorted(spec.heads)) or 'none'}"
        )
    sparse = schema.sparse.get(SPARSE)
    wanted = schema_for(
        spec,
        model_id,
        heads=heads,
        dense_dim=_narrower(schema, DENSE, spec.dense_width) if Head.DENSE in heads else None,
        multivector_dim=_narrower(schema, MULTIVECTOR, spec.multivector.dim)
        if Head.MULTIVECTOR in heads and spec.multivector
        else None,
        sparse_idf=sparse is not None and sparse.modifier == models.Modifier.IDF,
    )
    distances = {field: _with_distance(params, schema.vectors[field]) for field, params in wanted.vectors.items()}
    check_fits(schema, replace(wanted, vectors=distances), name, unlabelled=unlabelled)


def _with_distance(wanted: models.VectorParams, there: models.VectorParams) -> models.VectorParams:
    """Accepts a collection compared by dot product, which for unit vectors is the cosine."""
    if there.distance == models.Distance.DOT:
        return wanted.model_copy(update={"distance": models.Distance.DOT})
    return wanted


def _narrower(schema: CollectionSchema, name: str, width: int) -> int | None:
    size = schema.vectors[name].size
    return size if size < width else None
