"""`/tokenize` and `/detokenize` in the words of vLLM and llama.cpp: ids alone, for one text."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec import UNSET, Raw

from hybridtei.errors import EmptyInput, InvalidInput
from hybridtei.observability.tracing import passes_on
from hybridtei.server.api.tei import TokenizeRequest
from hybridtei.server.api.text import tokenize
from hybridtei.server.api.tokens import DetokenizeRequest, LlamaTokenizeRequest, TokenizeKeys, VllmTokenizeRequest
from hybridtei.server.context import Context, Reply
from hybridtei.server.http.body import decode, keys_of
from hybridtei.server.http.json_writer import Written, to_json
from hybridtei.text.tokenizer import Token


@passes_on
async def by_keys(context: Context, body: Raw) -> Reply:
    """`/tokenize`: `inputs` is TEI's, `prompt` vLLM's, `content` llama.cpp's."""
    data = bytes(body)
    keys = keys_of(data, TokenizeKeys)
    if keys.inputs is UNSET and keys.prompt is not UNSET:
        return await _vllm(context, decode(data, VllmTokenizeRequest))
    if keys.inputs is UNSET and keys.content is not UNSET:
        return await _llama(context, decode(data, LlamaTokenizeRequest))
    if keys.inputs is UNSET and keys.messages is not UNSET:
        raise InvalidInput("`messages` need a chat's template, which models of this server have no use for; send `prompt`")
    return await tokenize(context, decode(data, TokenizeRequest))


async def detokenize(context: Context, request: DetokenizeRequest) -> Reply:
    """`/detokenize`: special tokens are spelled out."""
    with context.counting_failures():
        if not request.tokens:
            raise EmptyInput("`tokens` cannot be empty")
        context.service.model.reader.check_ids(request.tokens, "tokens")
        work = partial(context.service.model.reader.tokenizer.text_of, request.tokens)
        text = await context.service.aside(work)
    return Reply({"prompt": text, "content": text})


async def _vllm(context: Context, request: VllmTokenizeRequest) -> Reply:
    def write(tokens: list[Token]) -> dict[str, Any]:
        return {
            "count": len(tokens),
            "max_model_len": context.service.model.reader.max_input_length,
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
        read = context.service.model.reader.tokens
        (tokens,) = read([text], add_special_tokens=add_special_tokens, prompt_name=None)
        return Written(to_json(write(tokens)))

    with context.counting_failures():
        return Reply(await context.service.aside(work))
