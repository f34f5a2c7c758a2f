"""Tokens as vLLM's and llama.cpp's clients ask for them: on TEI's path, told apart by their keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from io import BytesIO
from typing import Annotated, Any, TypeVar

from msgspec import Meta, Raw, Struct

from hybridtei.engine.admission import MAX_ANSWER_NUMBERS
from hybridtei.engine.service import BYTES_PER_NUMBER, too_many_numbers
from hybridtei.errors import EmptyInput, InvalidInput, NoInputs
from hybridtei.observability.tracing import handler, passes_on
from hybridtei.server.api.tei import DecodeRequest, Id, ServedModel, SimpleToken, TokenizeRequest, parse_ids
from hybridtei.server.context import Context, Reply
from hybridtei.server.http.decoding import decode_by_field
from hybridtei.server.http.writers import FORM, Packed, Written, list_head, to_json, to_msgpack
from hybridtei.server.routing import Route
from hybridtei.text.tokenizer import Token


class VllmTokenizeRequest(Struct, frozen=True, kw_only=True):
    """`/tokenize` with `prompt`, vLLM's."""

    prompt: str
    model: ServedModel = None
    add_special_tokens: bool = True
    return_token_strs: Annotated[bool | None, Meta(description="Also give each token's text.")] = None


class VllmTokenizeResponse(Struct, frozen=True):
    """Answer to `prompt`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class LlamaTokenizeRequest(Struct, frozen=True, kw_only=True):
    """`/tokenize` with `content`, llama.cpp's."""

    content: str
    model: ServedModel = None
    add_special: bool = False
    with_pieces: Annotated[bool, Meta(description="Give objects with each token's id and text.")] = False


class LlamaPiece(Struct, frozen=True):
    """A token."""

    id: int
    piece: str


class LlamaTokenizeResponse(Struct, frozen=True):
    """Answer to `content`."""

    tokens: list[int] | list[LlamaPiece]


class DetokenizeRequest(Struct, frozen=True, kw_only=True):
    """`/detokenize`, vLLM's and llama.cpp's."""

    tokens: list[Id]
    model: ServedModel = None


class DetokenizeResponse(Struct, frozen=True):
    """The same text twice: vLLM's clients read `prompt`, llama.cpp's `content`."""

    prompt: str
    content: str


ANSWER_BYTES = 200_000_000

T = TypeVar("T")


@handler("tokenize")
async def tokenize(context: Context, request: TokenizeRequest) -> Reply:
    """`/tokenize`: every token with its place in the text; takes no permit."""
    texts = [request.inputs] if isinstance(request.inputs, str) else request.inputs
    with context.counting_failures():
        if not texts:
            raise NoInputs("`inputs` cannot be empty")
        context.check_batch(len(texts))
        read = partial(
            context.service.reader.tokens,
            add_special_tokens=request.add_special_tokens,
            prompt_name=request.prompt_name,
        )
        # Text by text, and written there too: the tokens of a long request are many times its size.
        return await _aside(context, texts, lambda text: read([text])[0])


@handler("decode")
async def decode_ids(context: Context, request: DecodeRequest) -> Reply:
    """`/decode`: ids back to text; takes no permit."""
    with context.counting_failures():
        sequences = parse_ids(request.ids)
        context.check_batch(len(sequences))
        if not all(sequences):
            raise EmptyInput("`input_ids` cannot be empty")
        for ids in sequences:
            context.service.reader.check_ids(ids, "ids")
        text_of = partial(context.service.tokenizer.decode, skip_special_tokens=request.skip_special_tokens)
        return await _aside(context, sequences, text_of)


async def _aside(context: Context, items: Sequence[T], make: Callable[[T], Any]) -> Reply:
    """What is made of each item, written in the form that the client wants: in parts, so that the thread for such work is free
    for others in between. Raises RequestRefused."""
    packs = FORM.get().msgpack
    part, written = context.server.max_client_batch_size, BytesIO()
    written.write(list_head(len(items)) if packs else b"[")
    for begin in range(0, len(items), part):
        append = _append_packed if packs else _append_json
        await context.service.aside(partial(append, written, items[begin : begin + part], make))
        if written.tell() > ANSWER_BYTES and len(items) > part:
            raise too_many_numbers(MAX_ANSWER_NUMBERS)
    written.write(b"" if packs else b"]")
    numbers = written.tell() // BYTES_PER_NUMBER
    return Reply((Packed if packs else Written)(written.getvalue()), numbers=numbers)


def _append_json(written: BytesIO, items: Sequence[T], make: Callable[[T], Any]) -> None:
    for item in items:
        written.write(b"," if written.tell() > 1 else b"")
        written.write(to_json(make(item)))


def _append_packed(written: BytesIO, items: Sequence[T], make: Callable[[T], Any]) -> None:
    for item in items:
        written.write(to_msgpack(make(item)))


class MessagesRequest(Struct, frozen=True):
    """`/tokenize` with `messages`, which is refused."""

    messages: Raw


@passes_on
async def tokenize_by_fields(context: Context, body: bytes) -> Reply:
    """`/tokenize`: `inputs` is TEI's, `prompt` vLLM's, `content` llama.cpp's."""
    others = {"prompt": VllmTokenizeRequest, "content": LlamaTokenizeRequest, "messages": MessagesRequest}
    request = decode_by_field(body, "inputs", TokenizeRequest, others)
    if isinstance(request, VllmTokenizeRequest):
        return await _vllm(context, request)
    if isinstance(request, LlamaTokenizeRequest):
        return await _llama(context, request)
    if isinstance(request, MessagesRequest):
        raise InvalidInput("`messages` need a chat's template, which models of this server have no use for; send `prompt`")
    return await tokenize(context, request)


async def detokenize(context: Context, request: DetokenizeRequest) -> Reply:
    """`/detokenize`: special tokens are spelled out."""
    with context.counting_failures():
        if not request.tokens:
            raise EmptyInput("`tokens` cannot be empty")
        context.service.reader.check_ids(request.tokens, "tokens")
        work = partial(context.service.tokenizer.text_of, request.tokens)
        text = await context.service.aside(work)
    return Reply({"prompt": text, "content": text})


async def _vllm(context: Context, request: VllmTokenizeRequest) -> Reply:
    def write(tokens: list[Token]) -> dict[str, Any]:
        return {
            "count": len(tokens),
            "max_model_len": context.service.reader.max_input_length,
            "tokens": [token.id for token in tokens],
            "token_strs": [token.text for token in tokens] if request.return_token_strs else None,
        }

    return await _tokenize(context, request.prompt, write, add_special_tokens=request.add_special_tokens)


async def _llama(context: Context, request: LlamaTokenizeRequest) -> Reply:
    def write(tokens: list[Token]) -> dict[str, Any]:
        return {"tokens": [{"id": token.id, "piece": token.text} if request.with_pieces else token.id for token in tokens]}

    return await _tokenize(context, request.content, write, add_special_tokens=request.add_special)


async def _tokenize(
    context: Context, text: str, write: Callable[[list[Token]], dict[str, Any]], *, add_special_tokens: bool
) -> Reply:
    """The answer is written beside the event loop, too: a long text has many tokens."""

    def work() -> Written:
        read = context.service.reader.tokens
        (tokens,) = read([text], add_special_tokens=add_special_tokens, prompt_name=None)
        return Written(to_json(write(tokens)))

    with context.counting_failures():
        written = await context.service.aside(work)
        return Reply(written, numbers=len(written.body) // BYTES_PER_NUMBER)


ROUTES = (
    Route(
        path="/tokenize",
        handler=tokenize_by_fields,
        request=(TokenizeRequest,),
        response=list[list[SimpleToken]],
        response_name="TokenizeResponse",
        summary="Tokens with their places",
        takes_permits=False,
        is_tei=True,
    ),
    Route(
        path="/decode",
        handler=decode_ids,
        request=DecodeRequest,
        response=list[str],
        response_name="DecodeResponse",
        summary="Ids back to text",
        takes_permits=False,
        is_tei=True,
    ),
    Route(
        path="/detokenize",
        handler=detokenize,
        request=DetokenizeRequest,
        response=DetokenizeResponse,
        summary="Ids back to text",
        takes_permits=False,
    ),
)
