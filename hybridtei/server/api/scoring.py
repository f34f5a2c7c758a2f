"""Scores of pairs of texts: vLLM's API."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta, Struct

from hybridtei.errors import InvalidInput, RequestError
from hybridtei.inference.tasks.embed import Embed
from hybridtei.inference.tasks.rerank import (
    MAX_CHUNK_DOCUMENTS,
    NO_INSTRUCTION,
    RerankByVectors,
    RerankPairs,
    rerank_task,
)
from hybridtei.options import EmbedOptions, Instruction, RankOptions
from hybridtei.outputs import Floats, Load, Usage, unit
from hybridtei.server.api.tei import (
    DIRECTIONS,
    Activation,
    CutSide,
    Enveloped,
    PromptTokens,
    ServedModel,
    UseActivation,
    options_of,
)
from hybridtei.server.context import Context, Reply, check_instruction, envelope, usage_of
from hybridtei.server.http.body import SchemaError
from hybridtei.server.models import RANK
from hybridtei.server.routing import post
from hybridtei.server.vectors import pooled, pooled_head
from hybridtei.server.wires import ListedErrorResponse, Wire

Side = str | list[str] | None


class ScoreRequest(Struct, frozen=True, kw_only=True):
    """Request of `/score` and `/v1/score`."""

    text_1: Annotated[
        Side, Meta(description="A text, or the same number of texts as on the other side.")
    ] = None
    text_2: Annotated[Side, Meta(description="A text, or a list of texts.")] = None
    queries: Annotated[Side, Meta(description="`text_1` under its newer name.")] = None
    documents: Annotated[Side, Meta(description="`text_2` under its newer name.")] = None
    model: ServedModel = None
    truncate_prompt_tokens: PromptTokens = None
    truncation_side: CutSide = None
    use_activation: UseActivation = None
    activation: Activation = None
    instruction: Instruction = None

    @property
    def fields(self) -> tuple[str, str]:
        """The names under which the client sends the two sides."""
        return (
            "text_1" if self.queries is None else "queries",
            "documents" if self.documents else "text_2",
        )

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Raises SchemaError."""
        sides = (getattr(self, field) for field in self.fields)
        first, second = ([side] if isinstance(side, str) else side or [] for side in sides)
        if not first or not second:
            raise SchemaError(f"missing field `{'text_2' if first else 'text_1'}`")
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            raise SchemaError(
                f"text_1 holds {len(first)} texts and text_2 {len(second)}: expected one, or as "
                "many"
            )
        return list(zip(first, second, strict=True))


class Score(Struct, frozen=True):
    """The score of one pair."""

    index: int
    object: Literal["score"]
    score: float


class ScoreResponse(Enveloped, frozen=True):
    """Answer of `/score`, in the order of the pairs."""

    object: Literal["list"]
    data: list[Score]


Pairs = Sequence[tuple[str, str]]


SCORES = Wire(
    tried="vLLM's documented requests",
    error=ListedErrorResponse,
    older={"activation": "use_activation"},
)


@post(["/score", "/v1/score"], ScoreRequest, ScoreResponse, capability=RANK, wire=SCORES)
async def score(context: Context, request: ScoreRequest) -> Reply:
    """Scores of pairs, in their order."""
    pairs = request.pairs
    with context.counting_failures():
        context.check_batch(len(pairs))
        check_instruction(request.instruction, len(pairs))
    options = context.settled(
        RankOptions(
            truncation_direction=DIRECTIONS[request.truncation_side or "Right"],
            max_tokens=request.truncate_prompt_tokens,
            raw_scores=request.use_activation is False,
            instruction=request.instruction,
        )
    )
    questions = [
        rerank_task(
            context.service.model.spec,
            query,
            [document for _, document in group],
            options,
        )
        for query, group in groupby(pairs, key=lambda pair: pair[0])
    ]
    if context.service.model.spec.role == "embedding" and not isinstance(
        questions[0], RerankByVectors
    ):
        with context.counting_failures():
            if request.instruction is not None:
                raise InvalidInput(NO_INSTRUCTION)
        reading = context.settled(
            options_of(
                EmbedOptions,
                options,
                normalize=False,
            )
        )
        return await _cosines(context, request, pairs, reading)
    load = Load(len(pairs), sum(len(first) + len(second) for first, second in pairs), is_batch=True)
    task = RerankPairs(questions)
    bounds = context.bounds(load.inputs).in_chunks(MAX_CHUNK_DOCUMENTS)
    query_field, document_field = request.fields
    try:
        scored, usage = await context.run(task, load, bounds, scope="predict", field=document_field)
    except RequestError as error:
        raise error.named(query_field, of="`query`") from None
    return Reply(_object(context, scored.scores, usage), usage)


async def _cosines(
    context: Context, request: ScoreRequest, pairs: Pairs, options: EmbedOptions
) -> Reply:
    """Score pairs by the cosine of their embeddings. Each text is embedded once."""
    place_of = {
        text: place
        for place, text in enumerate(dict.fromkeys(text for pair in pairs for text in pair))
    }
    distinct = [*place_of]
    task = Embed(distinct, frozenset({pooled_head(context)}), options)
    load = Load(len(distinct), sum(map(len, distinct)), is_batch=True)

    # The request's field with the text at a place of `distinct`, for errors
    def field_of(place: int) -> str:
        text = distinct[place]
        pair = next(pair for pair in pairs if text in pair)
        return f"{request.fields[pair.index(text)]}[{pairs.index(pair)}]"

    answer, usage = await context.embed_in_chunks(task, load, field_of)
    vectors = unit(pooled(answer))
    first, second = (vectors[[place_of[pair[side]] for pair in pairs]] for side in (0, 1))
    return Reply(_object(context, np.einsum("nd,nd->n", first, second), usage), usage)


def _object(context: Context, scores: Floats, usage: Usage) -> dict[str, Any]:
    data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
    return {**envelope(context, "list", "score"), "data": data, "usage": usage_of(context, usage)}
