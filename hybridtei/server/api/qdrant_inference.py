"""Embeddings for an open-source Qdrant server that calls a service to embed its documents and
queries.

The Qdrant server has `inference: {address, timeout, token}` in its configuration. It sends every
`Document` of an upsert (`inference` is "update") or of a query ("search"). It matches answers to
inputs by place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args

import numpy as np
from msgspec import Meta, Struct

from hybridtei.batch import Head
from hybridtei.errors import (
    InvalidDimensions,
    InvalidInput,
    NoKey,
    RequestError,
    RoleNeeded,
    UnknownModel,
    UnsupportedHead,
)
from hybridtei.inference.tasks.embed import Embed
from hybridtei.options import EmbedOptions, InputType, MultivectorBudget, Size
from hybridtei.outputs import Embeddings, Load, cut, unit
from hybridtei.server.answers import sparse_qdrant
from hybridtei.server.api.tei import FullText
from hybridtei.server.context import Context, Reply
from hybridtei.server.http.body import BodyError
from hybridtei.server.models import EMBED_HYBRID, NO_NAMES, Models
from hybridtei.server.routing import post
from hybridtei.server.wires import Wire, facts_of

Vector = Literal["dense", "sparse", "multivector"]
VECTORS: tuple[Vector, ...] = get_args(Vector)


class InferenceOptions(Struct, frozen=True):
    """Options of one document."""

    vector: Annotated[Vector | None, Meta(description="[default: from the model's name.]")] = None
    dimensions: Annotated[Size | None, Meta(description="Keep this many leading dimensions.")] = (
        None
    )
    input_type: Annotated[InputType | None, Meta(description="[default: from `inference`.]")] = None
    prompt_name: str | None = None


class InferenceInput(Struct, frozen=True, kw_only=True):
    """One document and its model."""

    data: FullText
    data_type: Literal["text"] = "text"
    model: Annotated[
        str,
        Meta(
            description=(
                "ALIAS/dense, ALIAS/sparse, ALIAS/multivector; ALIAS: its only or its dense vector."
            )
        ),
    ] = ""
    options: InferenceOptions | None = None


class InferenceRequest(Struct, frozen=True, kw_only=True):
    """Request of `/qdrant/inference`."""

    inputs: Annotated[list[InferenceInput], Meta(max_length=10_000)]
    inference: Annotated[
        str | None, Meta(description="update: the inputs are documents; search: they are queries.")
    ] = None
    token: Annotated[str | None, Meta(description="The API key, if no header carries it.")] = None


class InferenceTokens(Struct, frozen=True):
    """The number of tokens that one model read."""

    tokens: int


class InferenceUsage(Struct, frozen=True):
    """Usage by model."""

    models: dict[str, InferenceTokens]


class InferenceResponse(Struct, frozen=True):
    """One embedding an input: a list of numbers, `{"indices", "values"}`, or a list of lists."""

    embeddings: list[Any]
    usage: InferenceUsage


class InferenceError(Struct, frozen=True):
    """The field of an error that Qdrant reads."""

    takes_body_errors: ClassVar[bool] = True

    error: str

    @classmethod
    def of(cls, error: Exception) -> tuple[int, Struct]:
        """(status, body). Qdrant reads only the error of a 400, so every error that the caller can
        fix has that status."""
        if isinstance(error, BodyError):
            status = 400 if error.status == 422 else error.status
        elif isinstance(error, RequestError) and not isinstance(error, NoKey | RoleNeeded):
            status = 400
        else:
            status, _, _ = facts_of(error)
        return status, cls(str(error))


SIDES: dict[str | None, InputType | None] = {"update": "document", "search": "query"}
# Model, query or document, prompt
Reading = tuple[Context, InputType | None, str | None]
# And a text
Read = tuple[Reading, str]
Pass = tuple[Reading, frozenset[Head]]


@dataclass(frozen=True, slots=True)
class _Target:
    """The checked request of one input. `name`: the model's name in it."""

    reading: Reading
    name: str
    head: Head
    dimensions: int | None


@post(
    "/qdrant/inference",
    InferenceRequest,
    InferenceResponse,
    source="models",
    wire=Wire(tried="Qdrant 1.18's inference, qdrant-client", error=InferenceError),
    key_in_body=True,
)
async def qdrant_inference(models: Models, request: InferenceRequest) -> Reply:
    """Embeddings for a Qdrant server. One pass gives all requested vectors of a text. Below the
    path of one model, inputs name only vectors. Errors name the input."""
    targets = _targets(models, models.alias, request)
    reads = [
        (target.reading, item.data) for target, item in zip(targets, request.inputs, strict=True)
    ]
    heads: dict[Read, frozenset[Head]] = {}
    for target, read in zip(targets, reads, strict=True):
        heads[read] = heads.get(read, frozenset()) | {target.head}
    # The texts of each group, and their rows
    passes: dict[Pass, dict[str, int]] = {}
    for (reading, text), heads_of_text in heads.items():
        rows = passes.setdefault((reading, heads_of_text), {})
        rows[text] = len(rows)
    embedded = [_embedded(work, [*rows], reads) for work, rows in passes.items()]
    results = dict(zip(passes, await asyncio.gather(*embedded), strict=True))
    answer, numbers = await asyncio.to_thread(_answer, targets, reads, heads, passes, results)
    return Reply(answer, numbers=numbers)


def _answer(
    targets: Sequence[_Target],
    reads: Sequence[Read],
    heads: Mapping[Read, frozenset[Head]],
    passes: Mapping[Pass, Mapping[str, int]],
    results: Mapping[Pass, tuple[Embeddings, list[int]]],
) -> tuple[dict[str, Any], int]:
    """The answer, and the count of its numbers. Inputs choose how often a text's vectors are cut,
    so do not call it on the event loop. Raises AnswerTooLarge."""
    embeddings, numbers = [], 0
    tokens: dict[str, int] = {}
    # Equal inputs share their vectors
    vectors: dict[tuple[Any, ...], Any] = {}
    for place, (target, read) in enumerate(zip(targets, reads, strict=True)):
        work = (target.reading, heads[read])
        key = (*read, target.head, target.dimensions)
        row = passes[work][read[1]]
        answer, uncounted_tokens = results[work]
        if key not in vectors:
            vectors[key] = _written(answer, row, target, place)
        embeddings.append(vectors[key])
        numbers += _size(vectors[key])
        # Checked for each input, since any number of them may want the same text
        target.reading[0].service.check_answer(numbers)
        tokens[target.name] = tokens.get(target.name, 0) + uncounted_tokens[row]
        # The tokens of a text that is read once count once
        uncounted_tokens[row] = 0
    usage = {"models": {name: {"tokens": count} for name, count in tokens.items()}}
    return {"embeddings": embeddings, "usage": usage}, numbers


def _targets(models: Models, alias: str | None, request: InferenceRequest) -> list[_Target]:
    targets_of: dict[tuple[str, InferenceOptions | None], _Target] = {}
    targets = []
    for place, item in enumerate(request.inputs):
        key = (item.model, item.options)
        if key not in targets_of:
            targets_of[key] = _target(
                models, alias, f"inputs[{place}]", item, SIDES.get(request.inference)
            )
        targets.append(targets_of[key])
    return targets


def _target(
    models: Models, alias: str | None, where: str, item: InferenceInput, side: InputType | None
) -> _Target:
    options = item.options or InferenceOptions()
    name, vector = split_model(item.model)
    context = _named(models, alias, name, where)
    spec = context.service.model.spec
    vectors = [known for known in VECTORS if Head(known) in context.heads]
    head = Head(options.vector or vector or next(iter(vectors), "dense"))
    if spec.role != "embedding" or head not in spec.heads:
        has = ", ".join(vectors) or "no vectors"
        raise UnsupportedHead(
            f"`{where}.model`: {context.served_name} has no {head.value} output. It has: {has}"
        )
    if options.dimensions is not None:
        if head is Head.SPARSE:
            raise InvalidInput(f"`{where}.options.dimensions` means nothing for sparse vectors")
        width = spec.dense_width
        if head is Head.MULTIVECTOR:
            width = spec.multivector_width
        if not 1 <= options.dimensions <= width:
            raise InvalidDimensions(
                f"`{where}.options.dimensions` is {options.dimensions}, should be between 1 and "
                f"{width}"
            )
    if options.prompt_name not in (None, *(context.service.reader.prompts.table or ())):
        raise InvalidInput(f"`{where}.options.prompt_name` is no prompt of {context.served_name}")
    reading = (context, options.input_type or context.side or side, options.prompt_name)
    return _Target(reading, item.model, head, options.dimensions)


def _named(models: Models, alias: str | None, name: str, where: str) -> Context:
    """The model that an input names. Raises UnknownModel even if the server has one model: a name
    must not get its vectors."""
    context = models.choose(alias, name, EMBED_HYBRID)
    if name in NO_NAMES:
        return context
    try:
        if models.named(name) is context:
            return context
    except UnknownModel as error:
        raise UnknownModel(
            f"`{where}.model`: {error}; name one, or one of its vectors, as in NAME/sparse"
        ) from None
    raise UnknownModel(f"`{where}.model` names `{name}`, and the path `{alias}`")


def split_model(name: str) -> tuple[str, Vector | None]:
    """`ALIAS/sparse` -> ("ALIAS", "sparse"). Any other ending belongs to the name, since hub ids
    contain slashes."""
    front, _, last = name.rpartition("/")
    if last not in VECTORS:
        return name, None
    return front, last


async def _embedded(
    work: Pass, texts: Sequence[str], reads: Sequence[Read]
) -> tuple[Embeddings, list[int]]:
    """The vectors of a pass, and the number of tokens of each text. `reads`: what each input
    reads."""
    (context, side, prompt_name), heads = work
    # Qdrant accepts only floats
    budget = MultivectorBudget(max_tokens=context.model.multivector_tokens or None)
    options = EmbedOptions(
        prompt_name=prompt_name,
        input_type=side,
        multivector=budget,
    )
    task = Embed(texts, heads, context.settled(options))
    answer, usage = await context.embed_in_chunks(
        task,
        Load(len(texts), sum(map(len, texts)), is_batch=True),
        lambda place: f"inputs[{reads.index((work[0], texts[place]))}].data",
    )
    return answer, [*usage.lengths]


def _written(embedded: Embeddings, row: int, target: _Target, place: int) -> Any:
    if target.head is Head.SPARSE and embedded.sparse is not None:
        return sparse_qdrant(embedded.sparse, row)
    vectors = None
    if target.head is Head.DENSE and embedded.dense is not None:
        vectors = embedded.dense[row : row + 1]
    if target.head is Head.MULTIVECTOR and embedded.multivector is not None:
        vectors = embedded.multivector.row(row)
        if not len(vectors):
            raise InvalidInput(f"`inputs[{place}].data` becomes no token, and so no multi-vector")
    if vectors is None:
        name = target.reading[0].served_name
        raise UnsupportedHead(
            f"`inputs[{place}].model`: {name} makes no {target.head.value} vector of a query"
        )
    if target.dimensions is not None:
        vectors = unit(cut(vectors, target.dimensions))
    if target.head is Head.DENSE:
        return vectors[0]
    return np.ascontiguousarray(vectors)


def _size(vector: Any) -> int:
    if isinstance(vector, dict):
        return 2 * len(vector["indices"])
    return int(np.size(vector))
