"""Tokens of texts, and texts of tokens: TEI's `/tokenize` and `/decode`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from io import BytesIO
from typing import Any, TypeVar

from hybridtei.errors import EmptyInput
from hybridtei.inference.engine.admission import MAX_ANSWER_NUMBERS
from hybridtei.inference.engine.service import BYTES_PER_NUMBER, too_many_numbers
from hybridtei.server.answers import write_json
from hybridtei.server.api.tei import DecodeRequest, SimpleToken, TokenizeRequest, parse_ids, texts_of
from hybridtei.server.context import Context, Reply
from hybridtei.server.endpoint import post

ANSWER_BYTES = 200_000_000

T = TypeVar("T")


@post("/tokenize", list[list[SimpleToken]], takes_permits=False, is_tei=True)
async def tokenize(context: Context, request: TokenizeRequest) -> Reply:
    """Tokens with their places in the text."""
    with context.counting_failures():
        texts = texts_of(request.inputs, "inputs")
        context.check_batch(len(texts))
        tokens, special, prompt = context.service.reader.tokens, request.add_special_tokens, request.prompt_name
        return await _aside(context, texts, partial(tokens, add_special_tokens=special, prompt_name=prompt))


@post("/decode", list[str], takes_permits=False, is_tei=True)
async def decode(context: Context, request: DecodeRequest) -> Reply:
    """Ids back to text."""
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
    """Make and write the answer of each item: in parts, so that other requests use the thread in between, and item by item,
    since an answer is many times the size of its request. Raises RequestRefused."""
    part, written = context.server.max_client_batch_size, BytesIO()

    def append(some: Sequence[T]) -> None:
        for item in some:  # a variable would keep one answer in memory while the next is made
            written.write(b"," if written.tell() > 1 else b"")
            write_json(make(item), written)

    written.write(b"[")
    for begin in range(0, len(items), part):
        await context.service.aside(partial(append, items[begin : begin + part]))
        if written.tell() > ANSWER_BYTES and len(items) > part:
            raise too_many_numbers(MAX_ANSWER_NUMBERS)
    written.write(b"]")
    return Reply(written.getvalue(), numbers=written.tell() // BYTES_PER_NUMBER)
