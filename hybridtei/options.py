"""The options of an embedding, of a ranking and of labels, each defined once; and the keywords of
`Encoder.load`.

A field is a keyword of `Encoder` and `Client`, a flag of a command, and a field of hybridtei's own
routes, with one name, help and bounds. Requests of other APIs are read into these structs. None is
the default of who answers: `Context` has the server's, an `Encoder` its own.

Imports only msgspec and settings, since clients load no numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from time import perf_counter_ns
from typing import Annotated, Any, ClassVar, Literal, Self, TypedDict, get_type_hints

from msgspec import Meta, Struct, structs, to_builtins

from hybridtei.config import (
    BackendName,
    Dtype,
    Gelu,
    LongInputs,
    MultivectorDtype,
    PoolingFlag,
)
from hybridtei.keywords import check_names, check_value

Direction = Literal["left", "right"]
InputType = Literal["query", "document"]
SIDES: tuple[InputType, ...] = ("query", "document")
QueryEncoder = Literal["model", "table"]
Output = Literal["dense", "sparse", "multivector", "tokens"]
Aggregation = Literal["none", "simple", "first", "average", "max"]
Size = Annotated[int, Meta(ge=0)]
Truncate = Annotated[
    bool | None,
    Meta(description="Cut inputs that are too long [default: the server's auto_truncate]."),
]
Dimensions = Annotated[Size | None, Meta(description="Keep this many leading dimensions.")]
Long = Annotated[
    LongInputs | None,
    Meta(
        description=(
            "How a text that is too long for the model is read: `mean` reads windows and averages "
            "their vectors by tokens; `cut` cuts it [default: the server's long_inputs]."
        )
    ),
]
Side = Annotated[
    InputType | None,
    Meta(
        description=(
            "Kind of the inputs, for models that treat queries differently [default: document]."
        )
    ),
]
PromptName = Annotated[str | None, Meta(description="Name of a prompt to put before each input.")]
Instruction = Annotated[
    str | None, Meta(description="The criterion for language models that rank.")
]


BudgetMs = Annotated[
    Annotated[int, Meta(ge=1, le=600_000)] | None,
    Meta(
        description=(
            "Milliseconds of ranking: documents are scored in their order until then, and unscored "
            "documents follow. `budget` in the answer counts the scored ones."
        )
    ),
]
MaxTokens = Annotated[
    Size | None, Meta(description="Cut each document to this many tokens; 0: do not cut.")
]
MaxChunks = Annotated[
    Size | None,
    Meta(
        description=(
            "Read a document that is longer than the model in at most this many windows; the "
            "best one counts [default, and 0: the server's rerank_windows]."
        )
    ),
]
NS_PER_MS = 1_000_000


class MultivectorBudget(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The bound of a document's multi-vector."""

    max_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description=(
                "Merge similar vectors until a document has at most this number [default: all]."
            )
        ),
    ] = None
    dtype: Annotated[
        MultivectorDtype,
        Meta(
            description=(
                "int8: each vector scaled to whole numbers up to 127; binary: the sign of each "
                "number, one bit."
            )
        ),
    ] = "float"

    @property
    def is_full(self) -> bool:
        """True if the budget changes no vector."""
        return self.max_tokens is None and self.dtype == "float"


Budget = Annotated[
    MultivectorBudget | None,
    Meta(description="How to shrink documents' multi-vectors; queries' stay whole."),
]


@dataclass(frozen=True, slots=True)
class RankWeights:
    """The weight of each kind of vector in a score. The sum need not be 1."""

    dense: float = 1.0
    sparse: float = 1.0
    multivector: float = 1.0

    @property
    def by_name(self) -> dict[str, float]:
        """The weights by the names of heads, which are also the names of stored vectors."""
        return {"dense": self.dense, "sparse": self.sparse, "multivector": self.multivector}


# Weights of BGE-M3's authors, for `/rerank` and `/search`. Multi-vector scores are means over the
# query's vectors. `m3`: passages. `m3-long`: long documents. `m3-two`: two kinds of vectors.
PRESETS = {
    "m3": RankWeights(1.0, 0.3, 1.0),
    "m3-long": RankWeights(0.15, 0.5, 0.35),
    "m3-two": RankWeights(1.0, 0.3, 0.0),
}
GivenWeights = Annotated[
    str | RankWeights | None,
    Meta(
        description=(
            "For models that rank by vectors: m3, m3-long, m3-two, or a weight for each kind of "
            "vector."
        )
    ),
]
# Spans of a document, since each is written
MAX_SPANS = 32


class RelevantSpans(Struct, frozen=True):
    """Options of listing spans: Cohere's field."""

    mode: Literal["enabled", "disabled"]
    threshold: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        Meta(description="Least score of one [default: 0.1]."),
    ] = None
    max_spans: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_SPANS)] | None,
        Meta(description="Most spans of a document [default: 32]."),
    ] = None

    @property
    def if_enabled(self) -> RelevantSpans | None:
        """These options, or None if the mode is "disabled"."""
        return None if self.mode == "disabled" else self


class EmbedKeywords(TypedDict, total=False):
    """The fields of `EmbedOptions` that a library's caller gives, for type checkers."""

    truncate: bool | None
    truncation_direction: Direction | None
    prompt_name: str | None
    normalize: bool
    dimensions: int | None
    input_type: InputType | None
    multivector: MultivectorBudget | Mapping[str, Any] | None
    long_inputs: LongInputs | None


class RankKeywords(TypedDict, total=False):
    """The fields of `RankOptions` that a library's caller gives, for type checkers."""

    truncate: bool | None
    truncation_direction: Direction | None
    raw_scores: bool
    instruction: str | None
    weights: RankWeights | str | None
    max_tokens_per_doc: int | None
    max_chunks_per_doc: int | None
    budget_ms: int | None


class LabelKeywords(TypedDict, total=False):
    """The fields of `LabelOptions` that a library's caller gives, for type checkers."""

    truncate: bool | None
    truncation_direction: Direction | None


class Options(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How texts are read."""

    # The keywords of a library's caller
    KEYWORDS: ClassVar[Mapping[str, Any]] = {}

    truncate: Truncate = None
    truncation_direction: Annotated[
        Direction | None, Meta(description="The side that is cut off [default: the model's].")
    ] = None
    # Of an input, special tokens included; below 0: the model's length
    max_tokens: int | None = None

    @classmethod
    def given(cls, call: str, values: Mapping[str, Any], **defaults: Any) -> Self:
        """Make options of the keywords of a Python caller's `call`, and of what the call itself
        names; None: the default. Raises TypeError for an unknown one, InvalidInput for a wrong
        value."""
        check_names(call, values, cls.KEYWORDS)
        defaults |= {name: value for name, value in values.items() if value is not None}
        hints = _hints(cls)
        return cls(
            **{name: check_value(name, value, hints[name]) for name, value in defaults.items()}
        )

    def as_fields(self) -> dict[str, Any]:
        """The options that are not at their default, as JSON types."""
        return dict(to_builtins(self))


@cache
def _hints(kind: type[Struct]) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


class EmbedOptions(Options, frozen=True, kw_only=True):
    """How texts are embedded."""

    KEYWORDS = EmbedKeywords.__annotations__

    prompt_name: PromptName = None
    normalize: Annotated[
        bool,
        Meta(description="Whether dense vectors are scaled to length 1; multi-vectors always are."),
    ] = True
    dimensions: Dimensions = None
    input_type: Side = None
    multivector: Budget = None
    long_inputs: Long = None
    query_encoder: Annotated[
        QueryEncoder,
        Meta(
            description="table: look up the tokens' weights in queries, without running the model."
        ),
    ] = "model"
    # False: texts without a type or prompt get none, not the checkpoint's default (TEI's routes)
    uses_default_prompt: bool = True


class RankOptions(Options, frozen=True, kw_only=True):
    """How documents are ranked."""

    KEYWORDS = RankKeywords.__annotations__

    raw_scores: Annotated[bool, Meta(description="Give logits instead of probabilities.")] = False
    instruction: Instruction = None
    weights: GivenWeights = None
    max_tokens_per_doc: MaxTokens = None
    max_chunks_per_doc: MaxChunks = None
    relevant_spans: RelevantSpans | None = None
    budget_ms: BudgetMs = None
    # In `perf_counter_ns`: the end of `budget_ms`, once it has begun
    deadline_ns: int | None = None

    def begun(self) -> RankOptions:
        """The options with the deadline of a budget that begins now."""
        if self.budget_ms is None:
            return self
        return structs.replace(self, deadline_ns=perf_counter_ns() + self.budget_ms * NS_PER_MS)


class LabelOptions(Options, frozen=True, kw_only=True):
    """How texts, or their tokens, are labelled."""

    KEYWORDS = LabelKeywords.__annotations__

    raw_scores: Annotated[bool, Meta(description="Give logits instead of probabilities.")] = False
    aggregation_strategy: Annotated[
        Aggregation, Meta(description="How to merge tokens to entities.")
    ] = "none"
    include_special_tokens: Annotated[
        bool, Meta(description="Ours: include special tokens, which have no text.")
    ] = False
    # True: a regression's numbers become probabilities too
    as_tei: bool = False


class LoadKeywords(TypedDict, total=False):
    """The fields of `ModelConfig` and `EngineConfig` that a library's caller gives, for type
    checkers."""

    revision: str | None
    dtype: Dtype | None
    pooling: PoolingFlag | None
    dense_path: str | None
    backend: BackendName
    packed_cache_gb: float
    quantization_ranges: str | None
    multivector_tokens: int | None
    multivector_dtype: MultivectorDtype | None
    gelu: Gelu
    hf_token: str | None
    huggingface_hub_cache: str | None
    offline: bool
    trust_remote_code: bool
    max_concurrent_requests: int
    max_batch_tokens: int
    max_batch_requests: int | None
    max_answer_bytes: int
    request_timeout: float
    pass_timeout: float
    bulk_niceness: int
    memory_fraction: float
    embedding_cache_mb: int
    tokenization_workers: int | None
    auto_truncate: bool
    default_prompt: str | None
    default_prompt_name: str | None
    use_default_prompt: bool
