"""Tokens of texts, and texts of tokens: no pass, no permit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from hybridtei.errors import EmptyInput
from hybridtei.server.body import SchemaError
from hybridtei.server.context import Context, Reply
from hybridtei.server.encoding import Fragment, joined, to_json
from hybridtei.server.errors import NoInputs
from hybridtei.server.wire.tei import DecodeRequest, TokenizeRequest

T = TypeVar("T")


async def tokenize(context: Context, request: TokenizeRequest) -> Reply:
    """`/tokenize`: every token with its place in the text; takes no permit."""
    texts = [request.inputs] if isinstance(request.inputs, str) else request.inputs
    with context.counting_failures():
        if not texts:
            raise NoInputs("`inputs` cannot be empty")
        context.check_batch(len(texts))
        read = partial(
            context.service.model.reader.tokens,
            add_special_tokens=request.add_special_tokens,
            prompt_name=request.prompt_name,
        )
        # Text by text, and written there too: the tokens of a long request are many times its size.
        work = partial(_written, texts, lambda text: to_json(read([text])[0]))
        return Reply(Fragment(await context.service.aside(work)))


async def decode(context: Context, request: DecodeRequest) -> Reply:
    """`/decode`: ids back to text; takes no permit."""
    with context.counting_failures():
        sequences = _sequences(request.ids)
        context.check_batch(len(sequences))
        if not all(sequences):
            raise EmptyInput("`input_ids` cannot be empty")
        text_of = partial(context.service.model.reader.tokenizer.decode, skip_special_tokens=request.skip_special_tokens)
        work = partial(_written, sequences, lambda ids: to_json(text_of(ids)))
        return Reply(Fragment(await context.service.aside(work)))


def _written(items: Sequence[T], write: Callable[[T], bytes]) -> bytes:
    return joined(map(write, items))


def _sequences(raw: list[int | list[int]]) -> list[list[int]]:
    """A list of ids is one sequence, a list of lists is many. Raises SchemaError on a mixture."""
    single = [item for item in raw if isinstance(item, int)]
    many = [item for item in raw if isinstance(item, list)]
    if single and many:
        raise SchemaError("ids: data did not match any variant of untagged enum InputIds")
    return many or [single]
