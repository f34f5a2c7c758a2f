"""TEI's requests, field for field, the parsing of the forms of `inputs`, and `/tokenize` and
`/decode`.

A msgspec union can have only one array type, so the structs accept `inputs` loosely, and functions
here check it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from functools import cache, partial
from io import BytesIO
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from msgspec import Meta, Raw, Struct

from hybridtei.batch import runs
from hybridtei.errors import EmptyInput, NoInputs
from hybridtei.inference.engine.service import BYTES_PER_NUMBER
from hybridtei.models.text.reader import PORTION_CHARACTERS, Input
from hybridtei.models.text.tokenizer import Text
from hybridtei.options import (
    Dimensions,
    Direction,
    EmbedOptions,
    Options,
    PromptName,
    QueryEncoder,
    Truncate,
)
from hybridtei.server.answers import write_json
from hybridtei.server.context import Context, Reply
from hybridtei.server.http.body import SchemaError
from hybridtei.server.routing import post

T = TypeVar("T", bound=Sized)
Chosen = TypeVar("Chosen", bound=Options)
TruncationDirection = Literal["Left", "left", "Right", "right"]
Id = Annotated[int, Meta(ge=0, le=2**32 - 1)]
TruncationSide = Annotated[TruncationDirection, Meta(description="The side that is cut off.")]
CutSide = Annotated[
    TruncationDirection | None, Meta(description="`truncation_direction` under vLLM's name.")
]
UseActivation = Annotated[
    bool | None, Meta(description="vLLM's; false: give logits instead of probabilities.")
]
Activation = Annotated[bool | None, Meta(description="`use_activation` under its older name.")]
PromptTokens = Annotated[
    Annotated[int, Meta(ge=-1)] | None,
    Meta(
        description=(
            "vLLM's and Cohere's: cut each input to this many tokens, special tokens included; -1: "
            "to the model's length."
        )
    ),
]
ServedModel = Annotated[str | None, Meta(description="Which of several models answers.")]
# Only for the OpenAPI document: our code, not msgspec, refuses empty texts and lists, with TEI's
# messages.
NOT_EMPTY = Meta(extra_json_schema={"minItems": 1})
FullText = Annotated[str, Meta(extra_json_schema={"minLength": 1})]
FullTexts = Annotated[list[FullText], NOT_EMPTY]
OneOrMore = FullText | FullTexts
Ids = Annotated[list[Id], NOT_EMPTY]
InputType = FullText | Ids
RawInputs = FullText | Annotated[list[FullText | Id | Ids], NOT_EMPTY]
# Of a request to `/predict`
MAX_TEXTS = 20_000
OneOrTwo = Annotated[list[str], Meta(min_length=1, max_length=2)]


class EmbedAllRequest(Struct, frozen=True, kw_only=True):
    """Request of `/embed_all`."""

    inputs: Annotated[
        RawInputs, Meta(description="A text, a list of ids, or a list of texts and id lists.")
    ]
    truncate: Truncate = None
    truncation_direction: TruncationSide = "Right"
    prompt_name: PromptName = None
    # TEI puts no default prompt of the checkpoint before texts
    uses_default_prompt: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_inputs(self.inputs)

    @property
    def options(self) -> EmbedOptions:
        return options_of(
            EmbedOptions,
            self,
            truncation_direction=DIRECTIONS[self.truncation_direction],
            uses_default_prompt=self.uses_default_prompt,
        )


class EmbedSparseRequest(EmbedAllRequest, frozen=True, kw_only=True):
    """Request of `/embed_sparse`."""

    query_encoder: Annotated[
        QueryEncoder,
        Meta(
            description="table: look up the tokens' weights in queries, without running the model."
        ),
    ] = "model"


class EmbedRequest(EmbedAllRequest, frozen=True, kw_only=True):
    """Request of `/embed`."""

    normalize: Annotated[bool, Meta(description="Scale vectors to length 1.")] = True
    dimensions: Dimensions = None


class SimilarityInput(Struct, frozen=True):
    """One sentence against many."""

    source_sentence: FullText
    sentences: FullTexts


class SimilarityParameters(Struct, frozen=True):
    """Options of reading the sentences."""

    truncate: bool | None = None
    truncation_direction: TruncationDirection = "Right"
    prompt_name: str | None = None

    @property
    def options(self) -> EmbedOptions:
        return options_of(
            EmbedOptions,
            self,
            truncation_direction=DIRECTIONS[self.truncation_direction],
            normalize=False,
            uses_default_prompt=False,
        )


class SimilarityRequest(Struct, frozen=True):
    """Request of `/similarity`."""

    inputs: SimilarityInput
    parameters: SimilarityParameters | None = None


class TokenizeRequest(Struct, frozen=True):
    """Request of `/tokenize`."""

    inputs: OneOrMore
    add_special_tokens: bool = True
    prompt_name: str | None = None


class DecodeRequest(Struct, frozen=True):
    """Request of `/decode`."""

    ids: Annotated[list[Id | Ids], NOT_EMPTY]
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        check_ids(self.ids)


class PredictRequest(Struct, frozen=True, kw_only=True):
    """Request of `/predict`."""

    inputs: Annotated[
        FullText | Annotated[list[str | OneOrTwo], Meta(min_length=1, max_length=MAX_TEXTS)],
        Meta(
            description=(
                "A text, [text], a pair [text, text], or a batch: a list of lists of one or two "
                "texts."
            )
        ),
    ]
    truncate: Truncate = None
    truncation_direction: TruncationSide = "Right"
    raw_scores: Annotated[bool, Meta(description="Give logits instead of probabilities.")] = False
    parameters: Annotated[
        Any,
        Meta(
            description=(
                "Hugging Face's `top_k`, `function_to_apply`; with it the answer is a list of "
                "lists."
            )
        ),
    ] = None

    def __post_init__(self) -> None:
        parse_predict(self.inputs)


class VertexRequest(Struct, frozen=True):
    """Request of `/vertex`."""

    instances: list[Raw]


class SparseValue(Struct, frozen=True):
    """One entry of a sparse vector; `index` is a vocabulary id."""

    index: int
    value: float


class SimpleToken(Struct, frozen=True):
    """One token; `start` and `stop` count UTF-8 bytes of the text, null for special tokens."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class EmbeddingModel(Struct, frozen=True):
    """A model that embeds."""

    pooling: str


class ClassifierModel(Struct, frozen=True):
    """A model with labels."""

    id2label: dict[str, str]
    label2id: dict[str, int]


class ModelType(Struct, frozen=True, omit_defaults=True):
    """Exactly one key."""

    embedding: EmbeddingModel | None = None
    classifier: ClassifierModel | None = None
    reranker: ClassifierModel | None = None


class Info(Struct, frozen=True):
    """Answer of `/info`; `hybridtei` is ours."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    served_model_name: str
    model_type: ModelType
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: int | None
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str
    sha: str | None
    docker_label: str | None
    hybridtei: dict[str, Any]


class CutInput(Struct, frozen=True):
    """An input that was cut: its place, and the first and last character + 1 that the model read;
    null where it has no characters of its own."""

    index: int
    characters: tuple[int, int] | None


class OpenAICompatUsage(Struct, frozen=True, omit_defaults=True):
    """The number of tokens that ran, special tokens included, and the inputs that were cut."""

    prompt_tokens: int
    total_tokens: int
    truncated: list[CutInput] | None = None


class Enveloped(Struct, frozen=True):
    """The fields that `context.envelope` and `usage_of` add to an answer."""

    id: str
    created: int
    model: str
    usage: OpenAICompatUsage


# TEI's four spellings
DIRECTIONS: Mapping[TruncationDirection, Direction] = {
    "Left": "left",
    "left": "left",
    "Right": "right",
    "right": "right",
}
# The values of `input_type` and `task` in every API
SIDES: Mapping[str | None, Literal["query", "document"]] = {
    "query": "query",
    "search_query": "query",
    "retrieval.query": "query",
    "document": "document",
    "passage": "document",
    "search_document": "document",
    "retrieval.passage": "document",
}


def options_of(kind: type[Chosen], request: Struct, **others: Any) -> Chosen:
    """Read the fields that a request has under the names of options. `others`: those that it spells
    differently."""
    for name in _shared(kind, type(request)):
        others.setdefault(name, getattr(request, name))
    return kind(**others)


@cache
def _shared(kind: type[Struct], other: type[Struct]) -> tuple[str, ...]:
    return tuple(name for name in kind.__struct_fields__ if name in other.__struct_fields__)


def texts_of(value: str | list[str], field: str) -> list[str]:
    """The texts of a field that takes one or several. Raises NoInputs."""
    if isinstance(value, str):
        return [value]
    if not value:
        raise NoInputs(f"`{field}` cannot be empty")
    return value


def check_inputs(raw: Any, field: str = "inputs") -> None:
    """Raises SchemaError for ids and texts in one list, which `parse_inputs` cannot read."""
    if isinstance(raw, list) and _mixes_ids(raw):
        raise SchemaError(
            f"{field}: got ids beside texts or lists, expected ids alone, or texts and lists of ids"
        )


def _mixes_ids(raw: list[Any]) -> bool:
    """True if some of the items are ids and others are not."""
    if not raw or type(raw[0]) is not int:
        return int in set(map(type, raw))
    try:
        # Only ids have a sum. It takes a quarter of the time of looking at a million types
        sum(raw)
    except TypeError:
        return True
    return False


def parse_inputs(raw: Any) -> tuple[list[Input], bool]:
    """Parse a text, a list of ids (one input, even if empty), or a list of texts and id lists: the
    inputs, and True for a list of them. Call `check_inputs` first."""
    if isinstance(raw, list) and raw and type(raw[0]) is not int:
        return raw, True
    return [raw], False


def check_ids(raw: list[int | list[int]]) -> None:
    """Raises SchemaError for ids beside lists, which `parse_ids` cannot read."""
    if _mixes_ids(raw):
        raise SchemaError("ids: got ids beside lists, expected one of these alone")


def parse_ids(raw: list[int | list[int]]) -> list[list[int]]:
    """Ids are one sequence, lists of ids are several. Call `check_ids` first."""
    return raw if raw and type(raw[0]) is list else [raw]  # type: ignore[list-item, return-value]


def parse_predict(raw: Any) -> tuple[list[Text], bool]:
    """Parse a text, [text], [text, text] (one pair), or a batch of such lists: its texts and pairs,
    and True for a batch. Raises SchemaError."""
    if isinstance(raw, str):
        return [raw], False
    if len(set(map(type, raw))) > 1:
        raise SchemaError("inputs: got texts beside lists, expected one of these alone")
    is_batch = not isinstance(raw[0], str)
    if not is_batch and len(raw) > 2:
        raise SchemaError(
            f"inputs: got {len(raw)} texts, expected one or two, or lists of one or two"
        )
    texts: list[Text] = []
    for first, *second in raw if is_batch else [raw]:
        texts.append((first, *second) if second else first)
    return texts, is_batch


@post("/tokenize", TokenizeRequest, list[list[SimpleToken]], takes_permits=False, is_tei=True)
async def tokenize(context: Context, request: TokenizeRequest) -> Reply:
    """Tokens with their places in the text."""
    with context.counting_failures():
        texts = texts_of(request.inputs, "inputs")
        context.check_batch(len(texts))
        tokens = partial(
            context.service.reader.tokens,
            add_special_tokens=request.add_special_tokens,
            prompt_name=request.prompt_name,
        )
        return await _aside(context, texts, tokens)


@post("/decode", DecodeRequest, list[str], takes_permits=False, is_tei=True)
async def decode(context: Context, request: DecodeRequest) -> Reply:
    """Ids back to text."""
    with context.counting_failures():
        sequences = parse_ids(request.ids)
        context.check_batch(len(sequences))
        if not all(sequences):
            raise EmptyInput("`input_ids` cannot be empty")
        for ids in sequences:
            context.service.reader.check_ids(ids, "ids")
        text_of = partial(
            context.service.tokenizer.decode, skip_special_tokens=request.skip_special_tokens
        )
        return await _aside(context, sequences, text_of)


async def _aside(context: Context, items: Sequence[T], make: Callable[[T], Any]) -> Reply:
    """Make and write the answer of each item: in parts, so that other requests use the thread in
    between, and item by item, since an answer is many times the size of its request. Raises
    RequestRefused."""
    limit, bounds = context.server.max_client_batch_size, context.bounds(len(items))
    buffer = BytesIO()

    # Runs in the thread
    def append(part: Sequence[T]) -> None:
        # A variable would keep one answer in memory while the next is made
        for item in part:
            buffer.write(b"," if buffer.tell() > 1 else b"")
            write_json(make(item), buffer)

    buffer.write(b"[")
    for begin, end in runs([*map(len, items)], PORTION_CHARACTERS, limit):
        await context.service.aside(partial(append, items[begin:end]))
        bounds.check(buffer.tell() // BYTES_PER_NUMBER)
    buffer.write(b"]")
    return Reply(buffer.getvalue(), numbers=buffer.tell() // BYTES_PER_NUMBER)
