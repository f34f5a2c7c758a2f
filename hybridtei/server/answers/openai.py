"""OpenAI's embeddings."""

from __future__ import annotations

from typing import Any

from hybridtei.batch import Head
from hybridtei.errors import UnsupportedHead
from hybridtei.outputs import Embeddings
from hybridtei.server import encoding
from hybridtei.server.answers.embed import SPLADE_NORMALIZE, wanted
from hybridtei.server.answers.envelope import used
from hybridtei.server.context import Context, Reply
from hybridtei.server.encoding import Pieces
from hybridtei.server.observe import Usage
from hybridtei.server.quantised import smaller_vectors
from hybridtei.server.wire.openai import OpenAICompatRequest
from hybridtei.server.wire.tei import parse_inputs
from hybridtei.tasks.embed import Embed


async def openai_embed(context: Context, request: OpenAICompatRequest) -> Reply:
    """`/v1/embeddings`: always normalised."""
    inputs = parse_inputs(request.input, "input")
    refusal = UnsupportedHead(SPLADE_NORMALIZE) if context.is_splade and request.outputs is None else None
    heads = wanted(context, request.outputs or ["dense"]) | ({Head.DENSE} & context.heads)  # the wire needs `embedding`
    width = request.width
    task = Embed(inputs.items, heads, context.truncate(request.truncation), dimensions=width, input_type=request.side)
    smaller = smaller_vectors(context, heads, request.output_dtype, width)
    pieces = context.service.model.reader.tokenizer.pieces

    def write(answer: Embeddings, usage: Usage) -> dict[str, Any]:
        answer = smaller(answer)
        data = [_item(answer, i, request, pieces) for i in range(len(answer))]
        return {"object": "list", "data": data, "model": context.served_name, "usage": used(usage)}

    return await context.embed(task, inputs, write, refusal=refusal)


def _item(answer: Embeddings, i: int, request: OpenAICompatRequest, pieces: Pieces) -> dict[str, Any]:
    item: dict[str, Any] = {"object": "embedding"}
    if answer.dense is not None:
        row = answer.dense[i]
        item["embedding"] = encoding.as_base64(row) if request.encoding_format == "base64" else row
    if answer.sparse is not None:
        item["sparse_embedding"] = encoding.sparse(answer.sparse, i, request.sparse_format, pieces)
    if answer.multivector is not None:
        item["multivector"] = answer.multivector.row(i)
    item["index"] = i
    return item
