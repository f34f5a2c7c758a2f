"""What the dialects that embed share: fields, heads, and `output_dtype` with the ranges that some of its values need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Annotated, Any, Literal

from msgspec import Meta

from hybridtei.batch import Head, Ragged
from hybridtei.errors import InvalidInput
from hybridtei.outputs import Embeddings, Floats
from hybridtei.server.context import Context
from hybridtei.tasks.embed import RANGED, Precision, quantized, read_ranges

Kind = Literal["dense", "multivector"]
Quantise = Callable[[Floats], Any]


def quantiser(context: Context, precision: Precision | None, kind: Kind, width: int) -> Quantise:
    """What makes such numbers of vectors of this width. Raises InvalidInput where the server has no ranges for them."""
    if precision is None or precision == "float":
        return _as_they_are
    ranges = _ranges(context, precision, kind, width) if precision in RANGED else None
    return lambda rows: quantized(rows, precision, ranges)


def smaller_vectors(
    context: Context, heads: frozenset[Head], precision: Precision | None, dimensions: int | None, *, is_small: bool = False
) -> Callable[[Embeddings], Embeddings]:
    """What makes all dense and multi-vectors of an answer so; `is_small`: multi-vectors are already, by their own `dtype`.

    Raises InvalidInput, before anything is computed.
    """
    heads = heads - {Head.MULTIVECTOR} if is_small else heads
    if precision is None or precision == "float":
        return _unchanged
    spec = context.service.model.spec
    with context.counting_failures():
        dense = _maker(context, heads, Head.DENSE, precision, min(dimensions or spec.dense_width, spec.dense_width))
        width = 0 if spec.multivector is None else spec.multivector.dim
        multivector = _maker(context, heads, Head.MULTIVECTOR, precision, min(dimensions or width, width))

    def smaller(answer: Embeddings) -> Embeddings:
        rows = answer.multivector
        return replace(
            answer,
            dense=None if answer.dense is None else dense(answer.dense),
            multivector=None if rows is None else Ragged(multivector(rows.values), rows.offsets),
        )

    return smaller


def _maker(context: Context, heads: frozenset[Head], head: Head, precision: Precision, width: int) -> Quantise:
    kind: Kind = "dense" if head is Head.DENSE else "multivector"
    return quantiser(context, precision, kind, width) if head in heads & context.heads else _as_they_are


def _unchanged(answer: Embeddings) -> Embeddings:
    return answer


def _as_they_are(rows: Floats) -> Floats:
    return rows


def _ranges(context: Context, precision: str, kind: Kind, width: int) -> Floats:
    path = context.model.quantization_ranges
    known = {} if path is None else ranges_in(path)
    for name in (f"{kind}_{width}", kind):
        if name in known and known[name].shape[1] == width:
            return known[name]
    raise InvalidInput(
        f"`{precision}` needs the range of each of {width} {kind} dimensions, which this server was not given "
        f"(quantization-ranges); without it there are float, float16, binary and ubinary"
    )


@lru_cache(maxsize=32)
def ranges_in(path: str) -> dict[str, Floats]:
    """A file of ranges, read once. Raises LoadError."""
    return read_ranges(path)


Output = Literal["dense", "sparse", "multivector"]


Outputs = Annotated[list[Output], Meta(min_length=1)]


SparseFormat = Literal["tei", "qdrant", "tokens"]


OutputDtype = Annotated[
    Precision | None,
    Meta(description="What numbers vectors are made of; binary: one bit each, eight in an int8, ubinary: in a uint8."),
]


SPLADE_NORMALIZE = "`normalize` is not available for SPLADE models"


def pooled_head(context: Context) -> Head:
    """The head whose output is one vector a text."""
    return Head.SPARSE if context.is_splade else Head.DENSE


def pooled(answer: Embeddings) -> Floats:
    """float32[n, d] of `pooled_head`."""
    return splade_rows(answer) if answer.dense is None else answer.dense


def heads_of(context: Context, outputs: Sequence[str] | None) -> frozenset[Head]:
    """The heads of `outputs`; all that the model has where none are named."""
    return context.heads - {Head.TOKENS} if outputs is None else frozenset(Head(output) for output in outputs)


def splade_rows(answer: Embeddings) -> Floats:
    assert answer.sparse is not None
    return answer.sparse.to_dense()
