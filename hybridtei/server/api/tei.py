"""TEI's requests, field for field. A union in msgspec holds one array type only, so `parse_inputs` sorts `inputs` out."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self

from msgspec import Meta, Raw, Struct

from hybridtei.server.inputs import TruncationDirection, check_ids, check_inputs, check_predict, direction
from hybridtei.text.tokenizer import Direction

Id = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Size = Annotated[int, Meta(ge=0)]
RawInputs = str | list[str | Id | list[Id]]


class EmbedAllRequest(Struct, frozen=True, kw_only=True):
    """`/embed_all`."""

    inputs: Annotated[RawInputs, Meta(description="A text, a list of ids, or a list of texts and id lists.")]
    truncate: Annotated[bool | None, Meta(description="Cut what is too long [default: the server's auto_truncate].")] = None
    truncation_direction: Annotated[TruncationDirection, Meta(description="The side that is cut off.")] = "Right"
    prompt_name: Annotated[str | None, Meta(description="Name of a prompt to put before each input.")] = None

    def __post_init__(self) -> None:
        check_inputs(self.inputs)

    @property
    def direction(self) -> Direction:
        return direction(self.truncation_direction)


class EmbedSparseRequest(EmbedAllRequest, frozen=True, kw_only=True):
    """`/embed_sparse`."""


class EmbedRequest(EmbedAllRequest, frozen=True, kw_only=True):
    """`/embed`."""

    normalize: Annotated[bool, Meta(description="Scale vectors to length 1.")] = True
    dimensions: Annotated[Size | None, Meta(description="Keep the first so many dimensions.")] = None


class SimilarityInput(Struct, frozen=True):
    """One sentence against many."""

    source_sentence: str
    sentences: list[str]


class SimilarityParameters(Struct, frozen=True):
    """How to read the sentences."""

    truncate: bool | None = None
    truncation_direction: TruncationDirection = "Right"
    prompt_name: str | None = None


class SimilarityRequest(Struct, frozen=True):
    """`/similarity`."""

    inputs: SimilarityInput
    parameters: SimilarityParameters | None = None


class TokenizeRequest(Struct, frozen=True):
    """`/tokenize`."""

    inputs: str | list[str]
    add_special_tokens: bool = True
    prompt_name: str | None = None


class DecodeRequest(Struct, frozen=True):
    """`/decode`."""

    ids: list[Id | list[Id]]
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        check_ids(self.ids)


class PredictRequest(Struct, frozen=True, kw_only=True):
    """`/predict`."""

    inputs: Annotated[
        str | list[str | list[str]],
        Meta(description="A text; [text]; a pair [text, text]; or a list of lists of one text or two, which is a batch."),
    ]
    truncate: Annotated[bool | None, Meta(description="Cut what is too long [default: the server's auto_truncate].")] = None
    truncation_direction: Annotated[TruncationDirection, Meta(description="The side that is cut off.")] = "Right"
    raw_scores: Annotated[bool, Meta(description="Give logits instead of probabilities.")] = False
    parameters: Annotated[
        Any, Meta(description="Of Hugging Face's clients: with it the answer is a list of lists. `top_k`, `function_to_apply`.")
    ] = None

    max_lists: ClassVar[int] = 100_000  # a request of more is refused for their number before they are read

    @classmethod
    def of_many(cls, inputs: int) -> Self:
        """Stands for a request of so many lists, which will be refused for their number."""
        return cls(inputs=[[""]] * inputs)

    def __post_init__(self) -> None:
        check_predict(self.inputs)


class VertexRequest(Struct, frozen=True):
    """`/vertex`."""

    instances: list[Raw]


class Prediction(Struct, frozen=True):
    """A label and how likely it is."""

    score: float
    label: str


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


class OpenAICompatUsage(Struct, frozen=True):
    """Tokens that ran, special tokens included."""

    prompt_tokens: int
    total_tokens: int
