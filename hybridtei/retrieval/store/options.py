"""Options of a new collection, for flags too, and what an import answers: nothing here imports qdrant-client."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from hybridtei.config import MultivectorDtype

Quantization = Literal["scalar", "binary", "binary-2bit", "product", "turbo"]
Datatype = Literal["float32", "float16"]


class CollectionPlan(Struct, frozen=True, kw_only=True):
    """Options of a new collection; None: the default, from `store.plan.settled`."""

    dense_dim: Annotated[int | None, Meta(description="dimensions to keep of dense vectors [default: all]")] = None
    multivector_dim: Annotated[
        int | None, Meta(description="dimensions to keep of each vector of a multi-vector [default: all]")
    ] = None
    multivector_tokens: int | None = None  # these two are settings of the model: 0 for all tokens
    multivector_dtype: MultivectorDtype | None = None
    datatype: Annotated[
        Datatype | None, Meta(description="numbers of vectors that Qdrant keeps, sparse ones too [default: float32]")
    ] = None
    quantization: Annotated[
        Quantization | None, Meta(description="a compressed copy of dense vectors in memory, beside the originals")
    ] = None
    on_disk: Annotated[bool, Meta(description="dense and sparse vectors are read from disk, not kept in memory")] = False
    on_disk_payload: Annotated[
        bool, Meta(description="texts are read from disk, not kept in memory; default on a server: its own setting")
    ] = False
    shards: Annotated[int | None, Meta(description="of a collection on a Qdrant cluster [default: one for each node]")] = None
    replicas: Annotated[int | None, Meta(description="copies of each shard [default: 2 on a cluster]")] = None


class Imported(Struct, frozen=True):
    """What an import did. `points`: of the stream; `written`: those whose ids were not there."""

    collection: str
    created: bool
    points: int
    written: int
