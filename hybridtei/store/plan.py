"""The schema of a collection for a model's outputs: widths, indexes, quantisation, where each lies."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Literal

from qdrant_client import models

from hybridtei.batch import Head
from hybridtei.checkpoint.files import require
from hybridtei.checkpoint.spec import ModelSpec
from hybridtei.errors import InvalidInput
from hybridtei.store.base import DENSE, MULTIVECTOR, SPARSE, CollectionSchema

Quantization = Literal["scalar", "binary", "binary-2bit", "product", "turbo"]

MODEL_ID, TOKENIZER = "model_id", "tokenizer_sha256"


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
