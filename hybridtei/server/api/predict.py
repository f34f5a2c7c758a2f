"""Labels of texts, in the APIs of TEI, infinity and vLLM, and labels of tokens, in those of BEI and
Hugging Face."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta, Struct

from hybridtei.errors import InvalidInput, NoInputs
from hybridtei.inference.tasks import label
from hybridtei.inference.tasks.label import Prediction
from hybridtei.options import Aggregation, LabelOptions, Truncate
from hybridtei.outputs import Load, Usage, best_first
from hybridtei.server.answers import label_scores
from hybridtei.server.api.tei import (
    DIRECTIONS,
    NOT_EMPTY,
    Activation,
    Enveloped,
    FullText,
    OneOrMore,
    PredictRequest,
    PromptTokens,
    ServedModel,
    TruncationSide,
    options_of,
    parse_predict,
    texts_of,
)
from hybridtei.server.context import Context, NameOf, Reply, Write, envelope, usage_of
from hybridtei.server.http.body import SchemaError
from hybridtei.server.models import CLASSIFY, TAG
from hybridtei.server.routing import post
from hybridtei.server.wires import ListedErrorResponse, Wire


class ClassifyRequest(Struct, frozen=True, kw_only=True):
    """Request of `/classify` and `/v1/classify`."""

    input: Annotated[OneOrMore, Meta(description="A text, or a list of texts.")]
    model: ServedModel = None
    raw_scores: Annotated[
        bool, Meta(description="infinity's; true: logits instead of probabilities.")
    ] = False
    use_activation: Annotated[
        bool | None, Meta(description="vLLM's; false: logits instead of probabilities.")
    ] = None
    activation: Activation = None
    softmax: Activation = None
    truncate_prompt_tokens: PromptTokens = None

    @property
    def logits(self) -> bool:
        return self.raw_scores or self.use_activation is False


class ClassifyResponse(Enveloped, frozen=True):
    """Answer of `/classify`: each text's labels, the best first."""

    object: Literal["classify"]
    data: list[list[Prediction]]


class VllmClassification(Struct, frozen=True):
    """A text's likeliest label, and the probabilities of all labels in the model's order."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class VllmClassifyResponse(Enveloped, frozen=True):
    """Answer of `/v1/classify`."""

    object: Literal["list"]
    data: list[VllmClassification]


# The cost of building and writing one label, in numbers
NUMBERS_A_LABEL = 20


@post(
    "/predict",
    PredictRequest,
    list[Prediction] | list[list[Prediction]],
    capability=CLASSIFY,
    is_tei=True,
)
async def predict(context: Context, request: PredictRequest) -> Reply:
    """Labels by score, the best first. A batch, or a client of Hugging Face, gets a list of such
    lists."""
    texts, is_batch = parse_predict(request.inputs)
    parameters = request.parameters if isinstance(request.parameters, dict) else None
    top_k, function = _parameters(parameters or {})
    options = options_of(
        LabelOptions,
        request,
        truncation_direction=DIRECTIONS[request.truncation_direction],
        raw_scores=request.raw_scores or function is not None,
        as_tei=True,
    )
    task = label.Classify(texts, context.settled(options))

    def write(answer: label.Classified, _: Usage) -> list[Any]:
        apply = label.FUNCTIONS[function or "none"]
        scores = answer.scores if apply is None else apply(answer.scores)
        rows = [label_scores(answer.labels, row, best_first(row)[:top_k]) for row in scores]
        return rows if is_batch or parameters is not None else rows[0]

    return await _classify(context, task, write, is_batch=is_batch)


def _parameters(parameters: dict[str, Any]) -> tuple[int | None, str | None]:
    """Read `top_k` and `function_to_apply`. Raises SchemaError or InvalidInput."""
    top_k, function = parameters.get("top_k"), parameters.get("function_to_apply")
    if top_k is not None and (type(top_k) is not int or top_k < 1):
        raise SchemaError(
            f"parameters.top_k: expected a whole number of at least 1, got {reprlib.repr(top_k)}"
        )
    if function is not None and not (isinstance(function, str) and function in label.FUNCTIONS):
        raise InvalidInput(
            f"`function_to_apply` is {reprlib.repr(function)}; known: {', '.join(label.FUNCTIONS)}"
        )
    return top_k, function


CLASSIFIERS = Wire(
    tried="infinity_client, vLLM's documented requests",
    error=ListedErrorResponse,
    older={"activation": "use_activation", "softmax": "use_activation"},
)


@post(
    "/classify",
    ClassifyRequest,
    ClassifyResponse | VllmClassifyResponse,
    capability=CLASSIFY,
    wire=CLASSIFIERS,
)
async def classify(context: Context, request: ClassifyRequest) -> Reply:
    """Classification in infinity's or vLLM's format, depending on the server's setting."""
    if context.server.classify_as == "vllm":
        return await vllm_classify(context, request)
    return await infinity_classify(context, request)


async def infinity_classify(context: Context, request: ClassifyRequest) -> Reply:
    """Each text's labels, the best first."""
    task = _task_of(context, request)

    def write(answer: label.Classified, usage: Usage) -> dict[str, Any]:
        data = [label_scores(answer.labels, row, best_first(row)) for row in answer.scores]
        return {
            **envelope(context, "classify", "infinity"),
            "data": data,
            "usage": usage_of(context, usage),
        }

    return await _classify(context, task, write, field="input")


@post(
    "/v1/classify",
    ClassifyRequest,
    VllmClassifyResponse,
    span="classify",
    capability=CLASSIFY,
    wire=CLASSIFIERS,
)
async def vllm_classify(context: Context, request: ClassifyRequest) -> Reply:
    """Classification for vLLM's clients."""
    task = _task_of(context, request)

    def write(answer: label.Classified, usage: Usage) -> dict[str, Any]:
        labels = answer.labels
        data = [
            {
                "index": i,
                "label": labels[int(row.argmax())],
                "probs": row,
                "num_classes": len(labels),
            }
            for i, row in enumerate(answer.scores)
        ]
        return {
            **envelope(context, "list", "classify"),
            "data": data,
            "usage": {**usage_of(context, usage), "completion_tokens": 0},
        }

    return await _classify(context, task, write, field="input")


def _task_of(context: Context, request: ClassifyRequest) -> label.Classify:
    options = LabelOptions(raw_scores=request.logits, max_tokens=request.truncate_prompt_tokens)
    return label.Classify(texts_of(request.input, "input"), context.settled(options))


async def _classify(
    context: Context,
    task: label.Classify,
    write: Write[label.Classified],
    *,
    is_batch: bool = True,
    field: str | None = None,
) -> Reply:
    characters = sum(
        len(item) if isinstance(item, str) else len(item[0]) + len(item[1]) for item in task.inputs
    )
    load = Load(len(task.inputs), characters, is_batch)
    answer, usage = await context.run(task, load, scope="predict", field=field)
    return await context.reply(write, answer, usage, NUMBERS_A_LABEL * answer.scores.size)


class PredictTokensRequest(Struct, frozen=True, kw_only=True):
    """Request of `/predict_tokens`."""

    inputs: Annotated[
        FullText | Annotated[list[OneOrMore], NOT_EMPTY],
        Meta(description="A text, a list of texts, or a list of lists of texts."),
    ]
    truncate: Truncate = None
    truncation_direction: TruncationSide = "Right"
    raw_scores: Annotated[
        bool, Meta(description="Give the logit of every label; only if tokens are not merged.")
    ] = False
    aggregation_strategy: Annotated[
        Aggregation, Meta(description="How to merge tokens to entities.")
    ] = "none"
    include_special_tokens: Annotated[
        bool, Meta(description="Ours: include special tokens, which have no text.")
    ] = False


class TokenPrediction(Struct, frozen=True):
    """A token or an entity, its start and end in code points of the text, and the scores of its
    labels."""

    token: str
    token_id: int
    start: int
    end: int
    results: dict[str, float]


class EntityParameters(Struct, frozen=True):
    """The `parameters` of Hugging Face's clients."""

    aggregation_strategy: Aggregation | None = None
    ignore_labels: frozenset[str] = frozenset({"O"})


class EntitiesRequest(Struct, frozen=True, kw_only=True):
    """Request of `/` for a tagger."""

    inputs: str | list[str]
    parameters: EntityParameters | None = None


# The cost of building and writing one token, in numbers
NUMBERS_A_TOKEN = 40
Items = list[dict[str, Any]]


@post("/predict_tokens", PredictTokensRequest, list[list[TokenPrediction]], capability=TAG)
async def predict_tokens(context: Context, request: PredictTokensRequest) -> Reply:
    """Labels of tokens, or entities, for each item of `inputs`. The results of an inner list are
    joined."""
    is_batch = not isinstance(request.inputs, str)
    inputs: list[str | list[str]]
    inputs = [request.inputs] if isinstance(request.inputs, str) else [*request.inputs]
    groups = [[item] if isinstance(item, str) else item for item in inputs]
    texts = [text for group in groups for text in group]
    options = options_of(
        LabelOptions,
        request,
        truncation_direction=DIRECTIONS[request.truncation_direction],
    )
    task = label.Tag(texts, context.settled(options))
    labels = context.service.model.spec.labels

    def write(answers: list[label.Tagged], _: Usage) -> list[Items]:
        remaining = iter(answers)
        return [
            [item for _ in group for item in _items(next(remaining), request, labels)]
            for group in groups
        ]

    # The field of the text at a place of `texts`, for errors
    def field_of(place: int) -> str:
        if not is_batch:
            return "inputs"
        names: list[str] = []
        for i, item in enumerate(inputs):
            if isinstance(item, str):
                names.append(f"inputs[{i}]")
            else:
                names += [f"inputs[{i}][{j}]" for j in range(len(item))]
        return names[place]

    all_labels = len(labels) if request.raw_scores else 0
    return await _tag(
        context,
        task,
        write,
        is_batch=is_batch,
        field=field_of,
        of_token=NUMBERS_A_TOKEN + NUMBERS_A_LABEL * all_labels,
    )


def _items(tagged: label.Tagged, request: PredictTokensRequest, labels: Sequence[str]) -> Items:
    if request.aggregation_strategy == "none":
        return [_token(token, labels, all_labels=request.raw_scores) for token in tagged.tokens]
    return [
        _item(
            tagged.text[span.start : span.end],
            0,
            span.start,
            span.end,
            {span.label: np.float32(span.score)},
        )
        for span in tagged.spans
    ]


def _token(token: label.TaggedToken, labels: Sequence[str], *, all_labels: bool) -> dict[str, Any]:
    if all_labels:
        results = dict(zip(labels, token.scores, strict=True))
    else:
        best = int(token.scores.argmax())
        results = {labels[best]: token.scores[best]}
    return _item(token.text, token.token_id, token.start, token.end, results)


def _item(
    token: str, token_id: int, start: int, end: int, results: dict[str, Any]
) -> dict[str, Any]:
    return {"token": token, "token_id": token_id, "start": start, "end": end, "results": results}


async def entities(context: Context, request: EntitiesRequest) -> Reply:
    """Answer `/` of a tagger in transformers' format, for a text or for each text of a list."""
    parameters = request.parameters or EntityParameters()
    aggregation = parameters.aggregation_strategy or "simple"
    ignored = parameters.ignore_labels
    texts = [request.inputs] if isinstance(request.inputs, str) else request.inputs
    label_key = "entity" if aggregation == "none" else "entity_group"

    def write(answers: list[label.Tagged], _: Usage) -> list[Any]:
        results = [
            [_entity(tagged, span, label_key) for span in tagged.spans if span.label not in ignored]
            for tagged in answers
        ]
        return results[0] if isinstance(request.inputs, str) else results

    task = label.Tag(texts, context.settled(LabelOptions(aggregation_strategy=aggregation)))
    return await _tag(context, task, write, is_batch=not isinstance(request.inputs, str))


def _entity(tagged: label.Tagged, span: label.Span, label_key: str) -> dict[str, Any]:
    word = tagged.text[span.start : span.end]
    return {
        label_key: span.label,
        "score": np.float32(span.score),
        "word": word,
        "start": span.start,
        "end": span.end,
    }


async def _tag(
    context: Context,
    task: label.Tag,
    write: Write[list[label.Tagged]],
    *,
    is_batch: bool,
    field: str | NameOf | None = None,
    of_token: int = NUMBERS_A_TOKEN,
) -> Reply:
    """`of_token`: the cost of building and writing a token, in numbers."""
    if not task.inputs:
        with context.counting_failures():
            raise NoInputs("`inputs` cannot be empty")
    load = Load(len(task.inputs), sum(map(len, task.inputs)), is_batch)
    answer, usage = await context.run(task, load, scope="predict", field=field)
    return await context.reply(write, answer, usage, of_token * usage.tokens)
