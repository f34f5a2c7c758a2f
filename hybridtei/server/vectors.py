"""Shared by the dialects that embed: fields, heads, and `output_dtype` with the ranges that int8
and uint8 need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from hybridtei.batch import Head, Ragged
from hybridtei.config import EMBEDDED_MODEL
from hybridtei.errors import InvalidInput
from hybridtei.inference.tasks.embed import Embed, check_spelled
from hybridtei.inference.tasks.pooling import RANGED, Precision, quantized, read_ranges
from hybridtei.inference.tasks.spans import EmbedSpans, SpanText
from hybridtei.models import heads
from hybridtei.outputs import Embeddings, Floats, Load, Usage
from hybridtei.server.api.tei import NOT_EMPTY, FullText, Id, Ids
from hybridtei.server.context import Check, Context, Reply, Write

Quantise = Callable[[Floats], Any]


def quantiser(context: Context, precision: Precision | None, head: Head, width: int) -> Quantise:
    """A function that converts vectors of `width` to `precision`. Raises InvalidInput if the server
    lacks the ranges."""
    if precision is None or precision == "float":
        return as_given
    ranges = _ranges(context, precision, head, width) if precision in RANGED else None
    return lambda rows: quantized(rows, precision, ranges)


def smaller_vectors(
    context: Context, task: Embed, precision: Precision | None
) -> Callable[[Embeddings], Embeddings]:
    """A function that converts a task's dense and multi-vectors to `precision`, but not
    multi-vectors that their own `dtype` has converted. Raises InvalidInput before anything is
    computed."""
    if precision is None or precision == "float":
        return lambda answer: answer
    spec = context.service.model.spec
    widths = {Head.DENSE: spec.dense_width}
    if not task.is_small:
        widths[Head.MULTIVECTOR] = spec.multivector_width
    with context.counting_failures():
        makers = {
            head: quantiser(
                context,
                precision,
                head,
                min(task.options.dimensions or width, width),
            )
            for head, width in widths.items()
            if head in task.heads & context.heads
        }

    def smaller(answer: Embeddings) -> Embeddings:
        dense, rows = answer.dense, answer.multivector
        if dense is not None and Head.DENSE in makers:
            dense = makers[Head.DENSE](dense)
        if rows is not None and Head.MULTIVECTOR in makers:
            rows = Ragged(makers[Head.MULTIVECTOR](rows.values), rows.offsets)
        return replace(answer, dense=dense, multivector=rows)

    return smaller


def as_given(rows: Any) -> Any:
    """Return the rows unchanged."""
    return rows


def _ranges(context: Context, precision: str, head: Head, width: int) -> Floats:
    path = context.model.quantization_ranges
    if path is None and context.model.model_id == EMBEDDED_MODEL:
        path = EMBEDDED_RANGES
    ranges: dict[str, Floats] = {}
    if path is not None:
        ranges = ranges_in(path)
    for name in (f"{head.value}_{width}", head.value):
        if name in ranges and ranges[name].shape[1] == width:
            return ranges[name]
    raise InvalidInput(
        f"`{precision}` needs the range of each of {width} {head.value} dimensions, which this "
        "server lacks (quantization-ranges); without ranges there are float, float16, binary and "
        "ubinary"
    )


@lru_cache(maxsize=32)
def ranges_in(path: str) -> dict[str, Floats]:
    """A file of ranges, read once. Raises LoadError."""
    return read_ranges(path)


# Measured by `conformance.quality.ranges`
EMBEDDED_RANGES = str(Path(heads.__file__).with_name("minilm_ranges.npz"))
Output = Literal["dense", "sparse", "multivector"]
Outputs = Annotated[list[Output], Meta(min_length=1)]
SparseFormat = Literal["tei", "qdrant", "tokens", "ids"]
OutputDtype = Annotated[
    Precision | None,
    Meta(
        description=(
            "Type of the numbers in vectors; binary: one bit each, eight bits in an int8; ubinary: "
            "in a uint8."
        )
    ),
]
SPLADE_NORMALIZE = "`normalize` is not available for SPLADE models"


def pooled_head(context: Context) -> Head:
    """The head whose output is one vector a text."""
    return Head.SPARSE if context.is_splade else Head.DENSE


def pooled(answer: Embeddings) -> Floats:
    """float32[n, d] of `pooled_head`."""
    return splade_rows(answer) if answer.dense is None else answer.dense


def check_vectors(
    context: Context, task: Embed | EmbedSpans, heads: frozenset[Head], form: SparseFormat
) -> None:
    """Check the task. Raises UnsupportedHead also if the model cannot give `sparse_format`
    tokens."""
    spec = context.service.model.spec
    if form == "tokens" and Head.SPARSE in heads:
        check_spelled(spec)
    task.check(spec)


def heads_of(context: Context, outputs: Sequence[str] | None) -> frozenset[Head]:
    """The heads of `outputs`; None: all heads of the model."""
    if outputs is None:
        return context.heads - {Head.TOKENS}
    return frozenset(map(Head, outputs))


def splade_rows(answer: Embeddings) -> Floats:
    assert answer.sparse is not None
    return answer.sparse.to_dense()


class SpannedText(Struct, frozen=True, forbid_unknown_fields=True):
    """A text, and the spans of it to embed. One pass reads the whole text."""

    text: FullText
    spans: Annotated[
        list[tuple[Id, Id]],
        Meta(
            min_length=1,
            description=(
                "For each span, the first code point and the one after the last; spans may overlap."
            ),
        ),
    ]


SpannedInputs = Annotated[
    FullText | SpannedText | Annotated[list[FullText | Id | Ids | SpannedText], NOT_EMPTY],
    Meta(
        description=(
            "As for `/embed_all`; or texts with spans: the answer has a list for each text, an "
            "item for each span."
        )
    ),
]


async def embed_spanned(
    context: Context,
    task: Embed,
    write: Write[Embeddings],
    form: SparseFormat = "tei",
    *,
    is_batch: bool,
) -> Reply:
    """Embed the task's inputs. For texts with spans the answer has one list an input, one item a
    span."""
    items: Sequence[Any] = task.inputs
    spanned = [item for item in items if isinstance(item, SpannedText)]
    if not spanned:
        check = partial(check_vectors, context, task, task.heads, form)
        return await context.embed(task, write, is_batch=is_batch, check=check, field="inputs")
    with context.counting_failures():
        if len(spanned) < len(items):
            raise InvalidInput(
                "`inputs` holds texts with spans and texts without: send them in separate requests"
            )
    texts = [SpanText(item.text, item.spans) for item in spanned]

    def nested(answer: Embeddings, usage: Usage) -> list[Any]:
        return by_text(texts, write(answer, usage))

    spans = EmbedSpans(texts, task)
    check = partial(check_vectors, context, spans, task.heads, form)
    return await embed_spans(context, spans, nested, check, is_batch=is_batch)


def by_text(texts: Sequence[SpanText], rows: Iterable[Any]) -> list[list[Any]]:
    """Group the rows of spans into one list for each text."""
    remaining = iter(rows)
    return [[*islice(remaining, len(item.spans))] for item in texts]


async def embed_spans(
    context: Context,
    task: EmbedSpans,
    write: Write[Embeddings],
    check: Check | None = None,
    *,
    is_batch: bool = True,
    field: str = "inputs",
    numbers: int = 0,
) -> Reply:
    """Embed spans of texts. Each text counts as one input of the request. `numbers`: to write
    besides the vectors."""
    load = Load(len(task.inputs), sum(len(item.text) for item in task.inputs), is_batch)
    answer, usage = await context.run(task, load, check=check, field=field)
    return await context.reply(write, answer, usage, answer.numbers + numbers)
