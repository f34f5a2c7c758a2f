"""OpenAI's embeddings."""

from __future__ import annotations

from typing import Any

from hybridtei.batch import Head
from hybridtei.errors import HybridTeiError, InvalidInput, UnsupportedHead
from hybridtei.observability.tracing import handler
from hybridtei.outputs import Embeddings
from hybridtei.server.api.embed import SPLADE_NORMALIZE, wanted
from hybridtei.server.api.envelope import used
from hybridtei.server.api.openai import OpenAICompatRequest
from hybridtei.server.api.tei import Inputs, parse_inputs
from hybridtei.server.context import Context, Reply
from hybridtei.server.http import json_writer as encoding
from hybridtei.server.http.json_writer import Pieces
from hybridtei.server.http.quantised import smaller_vectors
from hybridtei.server.observe import Usage
from hybridtei.tasks.embed import Embed


@handler("openai_embed")
async def openai_embed(context: Context, request: OpenAICompatRequest) -> Reply:
    """`/v1/embeddings`: normalised, unless Jina's `normalized` is false."""
    with context.counting_failures():
        request.check()
    inputs = parse_inputs(request.items, "input")
    refusal: HybridTeiError | None = foreign_ids(context, inputs)
    if context.is_splade and request.outputs is None:
        refusal = UnsupportedHead(SPLADE_NORMALIZE)
    heads = wanted(context, request.outputs or ["dense"]) | ({Head.DENSE} & context.heads)  # the wire needs `embedding`
    width = request.width
    task = Embed(
        inputs.items,
        heads,
        context.truncate(request.truncate if request.truncation is None else request.truncation),
        normalize=request.normalized is not False,
        dimensions=width,
        input_type=request.side,
    )
    smaller = smaller_vectors(context, heads, request.precision, width)
    pieces = context.service.model.reader.tokenizer.pieces

    def write(answer: Embeddings, usage: Usage) -> dict[str, Any]:
        answer = smaller(answer)
        data = [_item(answer, i, request, pieces) for i in range(len(answer))]
        return {"object": "list", "data": data, "model": context.served_name, "usage": used(usage)}

    return await context.embed(task, inputs, write, refusal=refusal)


def foreign_ids(context: Context, inputs: Inputs) -> InvalidInput | None:
    """Why lists of ids are refused that are not of this model's vocabulary. What else they hold is nonsense, too."""
    size = context.service.model.reader.tokenizer.vocab_size
    largest = max((max(item, default=0) for item in inputs.items if not isinstance(item, str)), default=0)
    if largest < size:
        return None
    return InvalidInput(
        f"`input` holds the id {largest}, but the vocabulary ends at {size - 1}. LangChain's OpenAIEmbeddings sends ids of "
        "OpenAI's vocabulary, which mean nothing here: create it with `check_embedding_ctx_length=False`"
    )


def _item(answer: Embeddings, i: int, request: OpenAICompatRequest, pieces: Pieces) -> dict[str, Any]:
    item: dict[str, Any] = {"object": "embedding"}
    if answer.dense is not None:
        row = answer.dense[i]
        item["embedding"] = encoding.as_base64(row) if request.is_base64 else row
    if answer.sparse is not None:
        item["sparse_embedding"] = encoding.sparse(answer.sparse, i, request.sparse_format, pieces)
    if answer.multivector is not None:
        item["multivector"] = answer.multivector.row(i)
    item["index"] = i
    return item
