"""Embeddings for an open-source Qdrant server, which asks a service to embed its documents and queries.

Such a server has `inference: {address, timeout, token}` in its configuration, and asks for every `Document` in an upsert (then
`inference` is "update") or a query ("search"). Answers are matched to inputs by place.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

import numpy as np
from litestar.params import JSONBody
from msgspec import Meta, Struct

from hybridtei.batch import Head
from hybridtei.errors import InvalidDimensions, InvalidInput, NoKey, RequestError, RoleNeeded, UnknownModel, UnsupportedHead
from hybridtei.observability.tracing import handler
from hybridtei.outputs import Embeddings, Load, cut, unit
from hybridtei.server.context import Context, Reply
from hybridtei.server.endpoint import AllModels, Answer, ApiRequest, Dialect, post
from hybridtei.server.http.body import BodyError
from hybridtei.server.http.writers import sparse_qdrant
from hybridtei.server.registry import EMBED_HYBRID, NO_NAMES, Models
from hybridtei.server.routing import row_of
from hybridtei.tasks.embed import Embed, InputType
from hybridtei.tasks.pooling import MultivectorBudget

T = TypeVar("T")
Vector = Literal["dense", "sparse", "multivector"]
VECTORS: tuple[Vector, ...] = ("dense", "sparse", "multivector")


class InferenceInput(Struct, frozen=True, kw_only=True):
    """One document, and the model it is for."""

    data: Any
    data_type: str = "text"
    model: Annotated[
        str, Meta(description="A model, its only or its dense vector: ALIAS; or ALIAS/dense, ALIAS/sparse, ALIAS/multivector.")
    ] = ""
    options: Annotated[
        dict[str, Any] | None,
        Meta(description="`vector`: dense, sparse, multivector; `dimensions`; `input_type`: query, document; `prompt_name`."),
    ] = None


class InferenceRequest(Struct, frozen=True, kw_only=True):
    """`/qdrant/inference`."""

    inputs: Annotated[list[InferenceInput], Meta(max_length=100_000)]
    inference: Annotated[str | None, Meta(description="update: the inputs are documents; search: they are queries.")] = None
    token: Annotated[str | None, Meta(description="The API key, for lack of a header.")] = None


class InferenceTokens(Struct, frozen=True):
    """What one model read."""

    tokens: int


class InferenceUsage(Struct, frozen=True):
    """By model."""

    models: dict[str, InferenceTokens]


class InferenceResponse(Struct, frozen=True):
    """One embedding an input: a list of numbers, `{"indices", "values"}`, or a list of lists."""

    embeddings: list[Any]
    usage: InferenceUsage


class InferenceError(Struct, frozen=True):
    """All that such a server reads of an error."""

    takes_body_errors: ClassVar[bool] = True

    error: str

    @classmethod
    def of(cls, error: Exception) -> tuple[int, Struct]:
        """(status, body). Such a server reads the error of a 400 only, so all that the caller could mend is one."""
        if isinstance(error, BodyError):
            return (400 if error.status == 422 else error.status), cls(str(error))
        mendable = isinstance(error, RequestError) and not isinstance(error, NoKey | RoleNeeded)
        return (400 if mendable else row_of(error).status), cls(str(error))


NO_HEADS: frozenset[Head] = frozenset()
SIDES: dict[str | None, InputType | None] = {"update": "document", "search": "query", None: None}
Reading = tuple[int, InputType | None, str | None]  # of a model, by identity; side; prompt
READ_AT_ONCE = 1_000  # inputs that are read, or answered, before other clients have their turn


@dataclass(frozen=True, slots=True)
class _Target:
    """What an input asks for, checked."""

    context: Context
    name: str
    head: Head
    side: InputType | None
    prompt_name: str | None
    dimensions: int | None

    @property
    def reading(self) -> Reading:
        return id(self.context), self.side, self.prompt_name


@dataclass(frozen=True, slots=True)
class _Item:
    """One input, checked."""

    target: _Target
    reading: Reading
    text: str


@dataclass(frozen=True, slots=True, eq=False)
class _Pass:
    """Texts that are read alike by one model, for the same vectors; each once."""

    context: Context
    side: InputType | None
    prompt_name: str | None
    heads: frozenset[Head]
    texts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _PassResult:
    """What came of a pass, and how many tokens each of its texts has."""

    embedded: Embeddings
    lengths: Sequence[int]


@handler("qdrant_inference")
async def inference(models: Models, alias: str | None, request: InferenceRequest) -> Reply:
    """`/qdrant/inference`. `alias`: of the model that the path names; then inputs name only vectors.

    Raises InvalidInput, UnsupportedHead, UnknownModel, naming the input; what embedding raises.
    """
    items = await _items(models, alias, request)
    passes = await _passes(items)
    works = dict.fromkeys(passes.values())
    results = dict(zip(works, await asyncio.gather(*map(_embedded, works)), strict=True))
    embeddings = []
    vectors: dict[tuple[Any, ...], Any] = {}  # inputs that are alike share their vectors
    numbers = 0
    tokens: dict[str, int] = {}
    counted: set[tuple[Reading, str]] = set()
    async for place, item in _in_turns(items):
        target, read = item.target, (item.reading, item.text)
        work = passes[read]
        result, row = results[work], work.texts[item.text]
        alike = (work, row, target.head, target.dimensions)
        if alike not in vectors:
            vectors[alike] = _written(result.embedded, row, target, place)
        embeddings.append(vectors[alike])
        numbers += _size(vectors[alike])
        target.context.service.check_answer(numbers)  # a text may be wanted any number of times
        if read not in counted:  # a text that was read once is paid once
            counted.add(read)
            tokens[target.name] = tokens.get(target.name, 0) + result.lengths[row]
        else:
            tokens.setdefault(target.name, 0)
    usage = {"models": {name: {"tokens": count} for name, count in tokens.items()}}
    return Reply({"embeddings": embeddings, "usage": usage}, numbers=numbers)


async def _in_turns(things: Sequence[T]) -> AsyncIterator[tuple[int, T]]:
    """Yield places and things; between every `READ_AT_ONCE` of them the event loop does what else waits."""
    for start in range(0, len(things), READ_AT_ONCE):
        if start:
            await asyncio.sleep(0)
        for place in range(start, min(start + READ_AT_ONCE, len(things))):
            yield place, things[place]


async def _items(models: Models, alias: str | None, request: InferenceRequest) -> list[_Item]:
    side = SIDES.get(request.inference)
    plain: dict[str, tuple[_Target, Reading]] = {}  # by model, of inputs without options
    items = []
    async for place, one in _in_turns(request.inputs):
        where = f"inputs[{place}]"
        if one.data_type != "text":
            raise InvalidInput(f"`{where}.data_type` is {one.data_type[:40]!r}; this server embeds text")
        if not isinstance(one.data, str):
            raise InvalidInput(f"`{where}.data` should be a text, not {type(one.data).__name__}")
        known = plain.get(one.model) if not one.options else None
        if known is None:
            target = _target(models, alias, where, one, side)
            known = target, target.reading
            if not one.options:
                plain[one.model] = known
        items.append(_Item(*known, one.data))
    return items


def _target(models: Models, alias: str | None, where: str, one: InferenceInput, side: InputType | None) -> _Target:
    options = one.options or {}
    name, vector = split_model(one.model)
    vector = _option(options, "vector", VECTORS, where) or vector
    context = _named(models, alias, name, where)
    spec = context.service.model.spec
    head = Head(vector) if vector is not None else _first_head(context)
    if spec.kind != "embedding" or head not in spec.heads:
        raise UnsupportedHead(f"`{where}.model`: {context.served_name} has no {head.value} output. It has: {_has(context)}")
    prompt_name = options.get("prompt_name")
    if prompt_name is not None and not isinstance(prompt_name, str):
        raise InvalidInput(f"`{where}.options.prompt_name` should be a string")
    own_side = cast("InputType | None", _option(options, "input_type", ("query", "document"), where))
    return _Target(context, one.model, head, own_side or side, prompt_name, _dimensions(options, context, head, where))


def _named(models: Models, alias: str | None, name: str, where: str) -> Context:
    """The model that an input names. Raises UnknownModel even where there is only one: its vectors would pass for another's."""
    context = models.choose(alias, name, EMBED_HYBRID)
    if name in NO_NAMES:
        return context
    try:
        if models.named(name) is context:
            return context
    except UnknownModel as error:
        raise UnknownModel(f"`{where}.model`: {error}; name one, or one of its vectors, as in NAME/sparse") from None
    raise UnknownModel(f"`{where}.model` names `{name}`, and the path `{alias}`")


def split_model(name: str) -> tuple[str, Vector | None]:
    """`ALIAS/sparse` -> ("ALIAS", "sparse"); a name without such an end as it is: hub ids hold slashes too."""
    front, _, last = name.rpartition("/")
    return (front, last) if last in VECTORS else (name, None)


def _first_head(context: Context) -> Head:
    """Of a model that is named without a vector: dense, or what there is."""
    return next((Head(vector) for vector in VECTORS if Head(vector) in context.heads), Head.DENSE)


def _has(context: Context) -> str:
    return ", ".join(vector for vector in VECTORS if Head(vector) in context.heads) or "no vectors"


def _option(options: dict[str, Any], name: str, known: Sequence[str], where: str) -> Any:
    value = options.get(name)
    if value is not None and value not in known:
        raise InvalidInput(f"`{where}.options.{name}` is {str(value)[:40]!r}, should be one of {', '.join(known)}")
    return value


def _dimensions(options: dict[str, Any], context: Context, head: Head, where: str) -> int | None:
    value = options.get("dimensions")
    if value is None:
        return None
    spec = context.service.model.spec
    if head is Head.SPARSE:
        raise InvalidInput(f"`{where}.options.dimensions` means nothing for sparse vectors")
    width = spec.dense_width if head is Head.DENSE else spec.multivector.dim if spec.multivector is not None else 0
    if type(value) is not int or not 1 <= value <= width:
        raise InvalidDimensions(f"`{where}.options.dimensions` is {value!r}, should be between 1 and {width}")
    return value


async def _passes(items: Sequence[_Item]) -> dict[tuple[Reading, str], _Pass]:
    """Return the pass that every text is in, as it is read: all vectors that somebody wants of it come from one."""
    heads: dict[tuple[Reading, str], frozenset[Head]] = {}
    async for _, item in _in_turns(items):
        read = (item.reading, item.text)
        if item.target.head not in (wanted := heads.get(read, NO_HEADS)):
            heads[read] = wanted | {item.target.head}
    alike: dict[tuple[Reading, frozenset[Head]], _Pass] = {}
    passes: dict[tuple[Reading, str], _Pass] = {}
    async for _, item in _in_turns(items):
        read = (item.reading, item.text)
        if read not in passes:
            target, key = item.target, (item.reading, heads[read])
            if key not in alike:
                alike[key] = _Pass(target.context, target.side, target.prompt_name, heads[read])
            work = passes[read] = alike[key]
            work.texts[item.text] = len(work.texts)
    return passes


async def _embedded(work: _Pass) -> _PassResult:
    context, texts = work.context, list(work.texts)
    budget = MultivectorBudget(max_tokens=context.model.multivector_tokens or None)  # Qdrant takes floats
    task = Embed(
        texts, work.heads, context.truncate(None), prompt_name=work.prompt_name, input_type=work.side, multivector=budget
    )
    load = Load(len(texts), sum(map(len, texts)), is_batch=True)
    answer, usage = await context.embed_in_chunks(task, load)
    return _PassResult(answer, usage.lengths)


def _written(embedded: Embeddings, row: int, target: _Target, place: int) -> Any:
    if target.head is Head.DENSE and embedded.dense is not None:
        vector = embedded.dense[row : row + 1]
        return (vector if target.dimensions is None else unit(cut(vector, target.dimensions)))[0]
    if target.head is Head.SPARSE and embedded.sparse is not None:
        return sparse_qdrant(embedded.sparse, row)
    if target.head is Head.MULTIVECTOR and embedded.multivector is not None:
        rows = embedded.multivector.row(row)
        if not len(rows):
            raise InvalidInput(f"`inputs[{place}].data` becomes no token, and so no multi-vector")
        return np.ascontiguousarray(rows if target.dimensions is None else unit(cut(rows, target.dimensions)))
    raise UnsupportedHead(
        f"`inputs[{place}].model`: {target.context.served_name} makes no {target.head.value} vector of a query"
    )


def _size(vector: Any) -> int:
    return int(np.size(vector["indices"]) * 2 if isinstance(vector, dict) else np.size(vector))


class InferenceController(Dialect):
    """Embeddings as a Qdrant server asks for them."""

    @post("/qdrant/inference", error=InferenceError, needs_content_type=False, key_in_body=True)
    async def inference(
        self, request: ApiRequest, data: JSONBody[InferenceRequest], models: AllModels
    ) -> Answer[InferenceResponse]:
        """Embeddings for a Qdrant server"""
        return await request.answer(inference(models, request.alias, data))
