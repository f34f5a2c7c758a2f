"""Tags of tokens, as Baseten's BEI defines them, and as Hugging Face's clients ask for entities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct

from hybridtei.errors import InvalidInput, NoInputs
from hybridtei.observability.tracing import handler
from hybridtei.outputs import Load, Usage
from hybridtei.server.api.tei import Truncate, TruncationSide, direction
from hybridtei.server.context import Context, Reply, Write
from hybridtei.server.registry import TAG
from hybridtei.server.routing import Route
from hybridtei.tasks.tag import AGGREGATIONS, Aggregation, Span, Tag, Tagged, TaggedToken


class PredictTokensRequest(Struct, frozen=True, kw_only=True):
    """`/predict_tokens`."""

    inputs: Annotated[str | list[str | list[str]], Meta(description="A text, a list of texts, or a list of lists of texts.")]
    truncate: Truncate = None
    truncation_direction: TruncationSide = "Right"
    raw_scores: Annotated[bool, Meta(description="Give the logit of every label; only where tokens are not merged.")] = False
    aggregation_strategy: Annotated[Aggregation, Meta(description="How tokens are merged to entities.")] = "none"
    include_special_tokens: Annotated[bool, Meta(description="Ours: also tokens that stand for no text.")] = False


class TokenPrediction(Struct, frozen=True):
    """A token or an entity, where it stands in the text, in code points, and the scores of its labels."""

    token: str
    token_id: int
    start: int
    end: int
    results: dict[str, float]


class EntitiesRequest(Struct, frozen=True, kw_only=True):
    """`/` of a model that tags."""

    inputs: str | list[str]
    parameters: Annotated[Any, Meta(description="`aggregation_strategy` [simple], `ignore_labels` [O].")] = None


class Entity(Struct, frozen=True, omit_defaults=True):
    """An entity, in the words of transformers' pipeline."""

    score: float
    word: str
    start: int
    end: int
    entity_group: str | None = None
    entity: str | None = None


NUMBERS_A_TOKEN = 40  # as which an item counts that is built and written

Items = list[dict[str, Any]]


@handler("predict_tokens")
async def predict_tokens(context: Context, request: PredictTokensRequest) -> Reply:
    """`/predict_tokens`: for each of `inputs`, its tokens or entities; what stands in an inner list is laid end to end."""
    inputs: list[str | list[str]] = [request.inputs] if isinstance(request.inputs, str) else request.inputs
    groups = [[item] if isinstance(item, str) else item for item in inputs]
    texts = [text for group in groups for text in group]
    task = Tag(
        texts,
        request.aggregation_strategy,
        context.truncate(request.truncate),
        direction(request.truncation_direction),
        request.raw_scores,
        request.include_special_tokens,
    )
    labels = context.service.model.spec.labels

    def write(answers: list[Tagged], _: Usage) -> list[Items]:
        remaining = iter(answers)
        return [[item for _ in group for item in _items(next(remaining), request, labels)] for group in groups]

    return await _tag(context, task, write, is_batch=not isinstance(request.inputs, str))


def _items(tagged: Tagged, request: PredictTokensRequest, labels: Sequence[str]) -> Items:
    if request.aggregation_strategy == "none":
        return [_token(token, labels, whole=request.raw_scores) for token in tagged.tokens]
    return [_item(tagged.text[span.start : span.end], 0, span.start, span.end, _one(span)) for span in tagged.spans]


def _token(token: TaggedToken, labels: Sequence[str], *, whole: bool) -> dict[str, Any]:
    best = int(token.scores.argmax())
    results = dict(zip(labels, token.scores, strict=True)) if whole else {labels[best]: token.scores[best]}
    return _item(token.text, token.token_id, token.start, token.end, results)


def _item(token: str, token_id: int, start: int, end: int, results: dict[str, Any]) -> dict[str, Any]:
    return {"token": token, "token_id": token_id, "start": start, "end": end, "results": results}


def _one(span: Span) -> dict[str, Any]:
    return {span.label: np.float32(span.score)}


@handler("entities")
async def entities(context: Context, request: EntitiesRequest) -> Reply:
    """`/` of a tagger: transformers' own answer, for a text or for each of a list."""
    parameters = request.parameters if isinstance(request.parameters, dict) else {}
    aggregation, ignored = _parameters(parameters)
    texts = [request.inputs] if isinstance(request.inputs, str) else request.inputs
    name = "entity" if aggregation == "none" else "entity_group"

    def write(answers: list[Tagged], _: Usage) -> list[Any]:
        results = [[_entity(tagged, span, name) for span in tagged.spans if span.label not in ignored] for tagged in answers]
        return results[0] if isinstance(request.inputs, str) else results

    task = Tag(texts, aggregation, context.truncate(None))
    return await _tag(context, task, write, is_batch=not isinstance(request.inputs, str))


def _parameters(parameters: dict[str, Any]) -> tuple[Aggregation, frozenset[str]]:
    """Raises InvalidInput."""
    strategy, ignored = parameters.get("aggregation_strategy") or "simple", parameters.get("ignore_labels")
    aggregation = next((name for name in AGGREGATIONS if name == strategy), None)
    if aggregation is None:
        raise InvalidInput(f"`aggregation_strategy` is {strategy!r}; known: {', '.join(AGGREGATIONS)}")
    labels = ignored if isinstance(ignored, list) else ["O"]
    return aggregation, frozenset(label for label in labels if isinstance(label, str))


def _entity(tagged: Tagged, span: Span, name: str) -> dict[str, Any]:
    word = tagged.text[span.start : span.end]
    return {name: span.label, "score": np.float32(span.score), "word": word, "start": span.start, "end": span.end}


async def _tag(context: Context, task: Tag, write: Write[list[Tagged]], *, is_batch: bool) -> Reply:
    if not task.inputs:
        with context.counting_failures():
            raise NoInputs("`inputs` cannot be empty")
    load = Load(len(task.inputs), sum(map(len, task.inputs)), is_batch)
    answer, usage = await context.run_checked(task, load)
    return await context.reply(write, answer, usage, NUMBERS_A_TOKEN * usage.tokens)


ROUTES = (
    Route(
        path="/predict_tokens",
        handler=predict_tokens,
        request=PredictTokensRequest,
        response=list[list[TokenPrediction]],
        summary="Labels of tokens, or entities",
        capability=TAG,
    ),
)
