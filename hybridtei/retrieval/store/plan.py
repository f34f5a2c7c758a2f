"""The plan of a collection for a model's outputs: widths, budgets, indexes, quantisation, memory or
disk.

The plan is chosen when the collection is created, and later read from the collection, so all
documents follow it. Qdrant has no vectors of bits or signed bytes, so such multi-vectors are base64
in the payload. They rank candidates found by other vectors, but find none.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from hybridtei.batch import VECTORS, Head, Ragged, offsets_of
from hybridtei.config import MultivectorDtype
from hybridtei.errors import CollectionMismatch, InvalidInput, MissingArtifact
from hybridtei.inference.tasks.pooling import budgeted, unpacked
from hybridtei.models.checkpoint.spec import ModelSpec
from hybridtei.models.fingerprint import fingerprint_of_loaded, model_of
from hybridtei.options import MultivectorBudget
from hybridtei.outputs import Embeddings, cut, unit
from hybridtei.retrieval.store.base import (
    DENSE,
    MULTIVECTOR,
    SPARSE,
    CollectionSchema,
    Selector,
    SparseVectorParams,
    VectorParams,
)
from hybridtei.retrieval.store.query import (
    CollectionPlan,
    Datatype,
    Quantization,
    indexes_of,
)

MODEL_ID, TOKENIZER = "model_id", "tokenizer_sha256"
# `model` of `models.fingerprint`; collections of older versions have none
FINGERPRINT = "model_fingerprint"
# Keys of a collection's metadata
TOKENS, DTYPE, WIDTH = ("multivector_tokens", "multivector_dtype", "multivector_dim")
# Of an `Index`: each point is a record, also one with a document's keys
RECORDS = "has_records"
# Curves of scores, by the way of searching (`search.calibration`)
CALIBRATION = "calibration"
# Key of the payload
PACKED = "multivector_base64"
# Keys of metadata from the model and the plan
MODEL_KEYS = frozenset({MODEL_ID, TOKENIZER, FINGERPRINT, TOKENS, DTYPE, WIDTH, CALIBRATION})


def budget_of_plan(plan: CollectionPlan) -> MultivectorBudget:
    """The budget of documents' multi-vectors."""
    return MultivectorBudget(
        max_tokens=plan.multivector_tokens or None, dtype=plan.multivector_dtype or "float"
    )


def with_budget(
    plan: CollectionPlan, tokens: int | None, dtype: MultivectorDtype | None
) -> CollectionPlan:
    """The plan, with a default budget of multi-vectors."""
    if plan.multivector_tokens is not None:
        tokens = plan.multivector_tokens
    dtype = plan.multivector_dtype or dtype
    return structs.replace(plan, multivector_tokens=tokens, multivector_dtype=dtype)


# Chosen by conformance/quality/budgets.py: 64 binary vectors keep 99 % of the quality of all tokens
# in float32, in 2 kB.
SMALL_TOKENS = 64
SMALL_DTYPE: MultivectorDtype = "binary"


def settled(chosen: CollectionPlan, heads: frozenset[Head], width: int = 0) -> CollectionPlan:
    """The plan of a new collection, with defaults for missing fields.

    `width`: of the model's multi-vectors. A width that is no multiple of 8, whole or cut, is stored
    as int8. Raises InvalidInput for multi-vectors of bytes as the only vectors.
    """
    # Only a multi-vector of floats finds points
    is_alone = heads & VECTORS == {Head.MULTIVECTOR}
    dtype = SMALL_DTYPE
    if is_alone:
        dtype = "float"
    elif (chosen.multivector_dim or width) % 8:
        dtype = "int8"
    plan = with_budget(chosen, SMALL_TOKENS, dtype)
    if is_alone and plan.multivector_dtype != "float":
        raise InvalidInput(
            f"`multivector_dtype` is {plan.multivector_dtype}: multi-vectors have to be float if "
            "they are the only vectors"
        )
    return plan


def kept(chosen: CollectionPlan, existing: CollectionSchema, name: str) -> CollectionPlan:
    """The plan of an existing collection. Raises CollectionMismatch, field by field, if the chosen
    plan differs from it."""
    current = plan_of(existing)
    lines = [
        f"  {field}: there {getattr(current, field) or 'nothing'}, asked for {value or 'nothing'}"
        for field, value in structs.asdict(chosen).items()
        if value is not None
        and value is not False
        # Indexes are added
        and field != "index"
        and (getattr(current, field) or None) != (value or None)
    ]
    if lines:
        title = (
            f"collection {name!r} keeps its plan; `hybridtei migrate {name}` changes "
            "multi-vectors and widths; for other changes ingest into a new collection:"
        )
        raise CollectionMismatch("\n".join([title, *lines]))
    return current


# Needed to survive the loss of a node
MIN_REPLICAS = 2


def spread(plan: CollectionPlan, nodes: int) -> CollectionPlan:
    """The plan of a new collection on `nodes` nodes. Defaults: one shard for each node, and two
    copies."""
    if nodes < 2:
        return plan
    shards, replicas = plan.shards or nodes, plan.replicas or MIN_REPLICAS
    return structs.replace(plan, shards=shards, replicas=replicas)


def plan_of(schema: CollectionSchema) -> CollectionPlan:
    """The plan of an existing collection, as far as its schema tells."""
    nothing = VectorParams(size=0, distance="Cosine")
    dense = schema.vectors.get(DENSE, nothing)
    multivector = schema.vectors.get(MULTIVECTOR, nothing)
    sparse = schema.sparse.get(SPARSE, SparseVectorParams())
    datatypes = {dense.datatype, multivector.datatype}
    datatype: Datatype = "float32"
    for kind in get_args(Datatype):
        if kind in datatypes:
            datatype = kind
    return CollectionPlan(
        dense_dim=dense.size or None,
        multivector_dim=multivector.size or schema.metadata.get(WIDTH),
        multivector_tokens=schema.metadata.get(TOKENS),
        multivector_dtype=schema.metadata.get(DTYPE, "float"),
        datatype=datatype,
        quantization=_kind_of(dense.quantization_config or {}),
        on_disk=bool(dense.on_disk or (sparse.index or {}).get("on_disk")),
        on_disk_payload=bool(schema.on_disk_payload),
        shards=schema.shard_number,
        replicas=schema.replication_factor,
        index=tuple(f"{key}:{kind}" for key, kind in (schema.indexes or {}).items()),
    )


def _kind_of(config: Mapping[str, Any]) -> Quantization | None:
    """The kind of a quantisation by name and encoding: gRPC gives its numbers as float32, so they
    are not compared."""
    for kind, quantization in QUANTIZATIONS.items():
        if _encodings(quantization) == _encodings(config):
            return kind
    return None


def _encodings(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: fields.get("encoding") for name, fields in config.items()}


def schema_for(
    spec: ModelSpec,
    model_id: str,
    plan: CollectionPlan | None = None,
    *,
    heads: frozenset[Head] | None = None,
    sparse_idf: bool | None = None,
    **options: Any,
) -> CollectionSchema:
    """The schema of a new collection of a model's outputs: those of `dense`, `sparse` and
    `multivector` that the model and `heads` have. `hybridtei ingest`, the server and `Index.save`
    make the same one.

    Dense and multi-vectors are compared by cosine: for unit vectors it is the dot product, and a
    vector that was cut without normalising still ranks correctly. In exchange, stores keep and
    return unit vectors. A multi-vector has no graph and is on disk, since it only rescores
    candidates, unless it is the only vector. `sparse_idf`: default: the sparse head's declaration;
    a SPLADE head never improves by it. `options`: the fields of a plan, instead of one.
    `dense_dim`, `multivector_dim`: widths to cut vectors to. `multivector_tokens`,
    `multivector_dtype`: the budget of documents' multi-vectors, stored in the metadata; numbers
    other than floats are in the payload, where `to_points` puts them if it gets the schema.
    Default: 64 vectors of bits. `datatype`: of the vectors in Qdrant. `quantization`, `on_disk`,
    `on_disk_payload`, `shards`, `replicas`: Qdrant's. The metadata have the fingerprint of the
    files that were loaded, unless these have changed since. Raises InvalidInput if the model has
    none of the outputs, MissingArtifact without its tokenizer.
    """
    return new_schema(
        spec,
        model_id,
        plan or CollectionPlan(**options),
        model_of(fingerprint_of_loaded(spec)),
        heads,
        sparse_idf=sparse_idf,
    )


def new_schema(
    spec: ModelSpec,
    model_id: str,
    plan: CollectionPlan,
    fingerprint: str | None,
    heads: frozenset[Head] | None = None,
    *,
    sparse_idf: bool | None = None,
) -> CollectionSchema:
    """`schema_for` with a fingerprint that the caller has; None: of a model whose files have
    changed since it was loaded."""
    outputs = spec.heads if heads is None else spec.heads & heads
    chosen = settled(plan, outputs, spec.multivector_width)
    schema = layout_of(spec, model_id, chosen, outputs, sparse_idf=sparse_idf)
    return signed(schema, fingerprint)


def layout_of(
    spec: ModelSpec,
    model_id: str,
    plan: CollectionPlan,
    heads: frozenset[Head],
    *,
    sparse_idf: bool | None = None,
    is_there: bool = False,
) -> CollectionSchema:
    """The schema of a settled plan, without a fingerprint. `is_there`: of an existing collection;
    leave a width above the model's to `check_fits`, which names both. Raises the errors of
    `schema_for`."""
    outputs = spec.heads & VECTORS & heads
    if not outputs:
        raise InvalidInput(
            f"{model_id}: makes no vectors for a collection: dense, sparse or multivector"
        )
    vectors: dict[str, VectorParams] = {}
    sparse: dict[str, SparseVectorParams] = {}
    if spec.tokenizer_sha256 is None:
        raise MissingArtifact(f"{spec.folder / 'tokenizer.json'}: missing")
    metadata: dict[str, Any] = {MODEL_ID: model_id, TOKENIZER: spec.tokenizer_sha256}
    # Qdrant's default is float32
    stored = None if plan.datatype == "float32" else plan.datatype
    on_disk = plan.on_disk or None
    if Head.DENSE in outputs:
        vectors[DENSE] = VectorParams(
            size=_width(plan.dense_dim, spec.dense_width, "dense_dim", is_there=is_there),
            distance="Cosine",
            on_disk=on_disk,
            quantization_config=_quantization(plan.quantization),
            datatype=stored,
        )
    if Head.MULTIVECTOR in outputs:
        width = _width(
            plan.multivector_dim, spec.multivector_width, "multivector_dim", is_there=is_there
        )
        if plan.multivector_tokens:
            metadata[TOKENS] = plan.multivector_tokens
        if plan.multivector_dtype in (None, "float"):
            vectors[MULTIVECTOR] = VectorParams(
                size=width,
                distance="Cosine",
                multivector_config={"comparator": "max_sim"},
                hnsw_config=None if outputs == {Head.MULTIVECTOR} else NO_GRAPH,
                on_disk=True,
                datatype=stored,
            )
        else:
            if plan.multivector_dtype == "binary" and width % 8:
                raise InvalidInput(
                    f"`multivector_dim` is {width}: binary vectors take a multiple of 8"
                )
            metadata |= {DTYPE: plan.multivector_dtype, WIDTH: width}
    if Head.SPARSE in outputs:
        if sparse_idf is None:
            sparse_idf = spec.sparse_idf
        fields = {"on_disk": on_disk, "datatype": stored}
        # Sparse vectors take no other numbers of fewer bits
        if stored != "float16":
            del fields["datatype"]
        index = {name: value for name, value in fields.items() if value is not None}
        sparse[SPARSE] = SparseVectorParams(
            modifier="idf" if sparse_idf else None, index=index or None
        )
    return CollectionSchema(
        vectors,
        sparse,
        metadata,
        plan.shards,
        plan.replicas,
        plan.on_disk_payload or None,
        indexes=indexes_of(plan.index) or None,
    )


def signed(schema: CollectionSchema, fingerprint: str | None) -> CollectionSchema:
    """Add the model's fingerprint, if there is one, to the schema's metadata."""
    if fingerprint is None:
        return schema
    return replace(schema, metadata={**schema.metadata, FINGERPRINT: fingerprint})


def _width(width: int | None, full: int, field: str, *, is_there: bool) -> int:
    if width is None or (is_there and width > full):
        return full
    if not 1 <= width <= full:
        raise InvalidInput(f"`{field}` is {width}, should be between 1 and the model's {full}")
    return width


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """The format of packed multi-vectors: `width` numbers a vector, "int8" or "binary"."""

    dtype: MultivectorDtype
    width: int

    @property
    def row_bytes(self) -> int:
        """The bytes of a vector."""
        return self.width // 8 if self.dtype == "binary" else self.width

    def vectors(self, texts: Sequence[str]) -> Ragged:
        """Decode n points' base64 to unit vectors: n × float32[k_i, width]."""
        contents = [base64.b64decode(text) for text in texts]
        rows = np.frombuffer(b"".join(contents), np.uint8).reshape(-1, self.row_bytes)
        offsets = offsets_of([len(content) // self.row_bytes for content in contents])
        if self.dtype == "binary":
            return Ragged(unpacked(rows, self.width), offsets)
        return Ragged(unit(rows.view(np.int8).astype(np.float32)), offsets)


def packed_format(schema: CollectionSchema) -> PackedFormat | None:
    """The format of a collection with multi-vectors in payloads; None for other collections."""
    dtype, width = schema.metadata.get(DTYPE), schema.metadata.get(WIDTH)
    if dtype not in ("int8", "binary") or not isinstance(width, int):
        return None
    return PackedFormat(dtype, width)


def packed_text(rows: NDArray[Any]) -> str:
    """Base64 of int8 or uint8[k, bytes]."""
    return base64.b64encode(np.ascontiguousarray(rows).tobytes()).decode()


def document_rows(rows: Ragged, schema: CollectionSchema) -> Ragged:
    """Documents' multi-vectors as the collection keeps them: those of floats are merged and
    quantised if it keeps bytes."""
    if rows.values.dtype != np.float32 or packed_format(schema) is None:
        return rows
    return budgeted(rows, budget_of_plan(plan_of(schema)))


def without_packed(payload: Mapping[str, Any]) -> dict[str, Any]:
    """The payload without a packed multi-vector, as the user gave it."""
    return {key: value for key, value in payload.items() if key != PACKED}


def payload_of(schema: CollectionSchema) -> Selector:
    """A selector of the payload without a packed multi-vector."""
    return True if packed_format(schema) is None else {"exclude": [PACKED]}


def fit_to_schema(embeddings: Embeddings, schema: CollectionSchema) -> Embeddings:
    """Cut dense and multi-vectors to the collection's widths, and scale floats to length 1."""
    dense, multivector, packed = embeddings.dense, embeddings.multivector, packed_format(schema)
    plan = plan_of(schema)
    if dense is not None and plan.dense_dim and plan.dense_dim < dense.shape[1]:
        dense = unit(cut(dense, plan.dense_dim))
    if multivector is not None:
        values, width = multivector.values, plan.multivector_dim
        if values.dtype != np.float32 and packed is not None:
            values = values[:, : packed.row_bytes]
        elif values.dtype == np.float32 and width and width < values.shape[1]:
            values = unit(cut(values, width))
        multivector = Ragged(values, multivector.offsets)
    return replace(embeddings, dense=dense, multivector=multivector)


# m=0 alone would still link points whose payload is indexed
NO_GRAPH = {"m": 0, "payload_m": 0}
# Qdrant's settings of compressed copies of vectors in memory.
QUANTIZATIONS: Mapping[Quantization, dict[str, Any]] = {
    "scalar": {"scalar": {"type": "int8", "quantile": 0.99, "always_ram": True}},
    "binary": {"binary": {"always_ram": True}},
    "binary-2bit": {"binary": {"always_ram": True, "encoding": "two_bits"}},
    "product": {"product": {"compression": "x16", "always_ram": True}},
    "turbo": {"turbo": {"always_ram": True}},
}


def _quantization(kind: Quantization | None) -> dict[str, Any] | None:
    if kind is None:
        return None
    if kind not in QUANTIZATIONS:
        raise InvalidInput(
            f"`quantization` is {kind!r}, should be scalar, binary, binary-2bit, product or turbo"
        )
    return QUANTIZATIONS[kind]
