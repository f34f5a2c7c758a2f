"""Reranking: with `texts` as TEI's clients ask, with `documents` as those of Cohere, Jina, Voyage, vLLM, infinity, Weaviate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field

from hybridtei.errors import InvalidInput
from hybridtei.server.api.openai import OpenAICompatUsage
from hybridtei.server.api.tei import Size, TruncationDirection


class RerankWeights(Struct, frozen=True):
    """Shares of each kind of vector in a score, where a model ranks by vectors."""

    dense: float = 1.0
    sparse: float = 1.0
    multivector: float = 1.0


INSTRUCTIONS_CHARACTERS_MAX = 8_000_000  # of an instruction, once for each document
RANK_FIELDS_MAX = 32  # each is looked up in each of thousands of documents, on the event loop

Truncate = Annotated[bool | None, Meta(description="Cut what is too long [default: the server's auto_truncate].")]
Side = Annotated[TruncationDirection, Meta(description="The side that is cut off.")]
Instruction = Annotated[str | None, Meta(description="What a language model that ranks is to judge by.")]
Shares = Annotated[
    str | RerankWeights | None,
    Meta(description="Where a model ranks by its vectors: average, mkqa, mldr, example, or a share for each kind."),
]


class RerankKeys(Struct, frozen=True):
    """By which of its keys a body tells whose request it is."""

    texts: Raw | UnsetType = UNSET
    documents: Raw | UnsetType = UNSET


class RerankRequest(Struct, frozen=True, kw_only=True):
    """`/rerank` with `texts`."""

    query: str
    texts: list[str]
    truncate: Truncate = None
    truncation_direction: Side = "Right"
    raw_scores: Annotated[bool, Meta(description="Give logits instead of probabilities.")] = False
    return_text: Annotated[bool, Meta(description="Repeat each text in the answer.")] = False
    instruction: Instruction = None
    weights: Shares = None


class Rank(Struct, frozen=True, omit_defaults=True):
    """A text's place among those given, and its score."""

    index: int
    score: float
    text: str | None = None


class DocumentsRequest(Struct, frozen=True, kw_only=True):
    """`/rerank`, `/v1/rerank` and `/v2/rerank` with `documents`."""

    query: str
    documents: Annotated[list[str | dict[str, Any]], Meta(description="Texts, or objects with `text` or the `rank_fields`.")]
    model: Annotated[str | None, Meta(description="Which model is to answer, where there are several.")] = None
    top_n: Annotated[Size | None, Meta(description="Give the best so many [default, and 0: all].")] = None
    top_k: Annotated[Size | None, Meta(description="The same under Voyage's name.")] = None
    return_documents: Annotated[bool | None, Meta(description="Repeat each document in the answer.")] = None
    rank_fields: Annotated[
        list[str] | None,
        Meta(description="Of documents that are objects: up to 32 fields to read, in this order [default: text]."),
    ] = None
    max_tokens_per_doc: Annotated[Size | None, Meta(description="Cut each document to so many tokens; 0: do not.")] = None
    raw_scores: Annotated[bool | UnsetType | None, Meta(description="Give logits instead of probabilities.")] = UNSET
    truncate: Truncate = None
    truncation: Annotated[bool | None, Meta(description="The same under Voyage's name.")] = None
    truncation_direction: Side = "Right"
    instruction: Instruction = None
    weights: Shares = None
    by_property: Annotated[Any, Meta(description="Weaviate's: with it, `scores` come in the order of `documents`.")] = field(
        default=UNSET, name="property"
    )

    @property
    def most(self) -> int | None:
        """How many to give."""
        return self.top_n or self.top_k or None

    @property
    def fields(self) -> list[str]:
        """`rank_fields`, each once. Raises InvalidInput for more than RANK_FIELDS_MAX."""
        named = self.rank_fields or []
        if len(named) > RANK_FIELDS_MAX:
            raise InvalidInput(f"`rank_fields` holds {len(named)} fields > maximum allowed {RANK_FIELDS_MAX}")
        return list(dict.fromkeys(named))


class RankedDocument(Struct, frozen=True, omit_defaults=True):
    """A document's place among those given, and its score."""

    index: int
    relevance_score: float
    document: dict[str, Any] | str | None = None


class DocumentsResponse(Struct, frozen=True, omit_defaults=True):
    """Answer to `documents`: what each kind of client looks for. `data` and `results` are the same."""

    id: str
    object: Literal["rerank"]
    created: int
    model: str
    results: list[RankedDocument]
    data: list[RankedDocument]
    usage: OpenAICompatUsage
    meta: dict[str, Any]
    query: str | None = None
    scores: list[dict[str, Any]] | None = None


def text_of(document: str | dict[str, Any], place: int, fields: Sequence[str]) -> str:
    """What is read of a document: its `text`, or the named fields, each once, one a line. Raises InvalidInput."""
    if isinstance(document, str):
        return document
    if not fields:
        text = document.get("text")
        if not isinstance(text, str):
            raise InvalidInput(f"`documents[{place}]` should be a text, or an object with a `text`; or name `rank_fields`")
        return text
    found = [value for field in fields if (value := document.get(field)) is not None]
    if not found:
        raise InvalidInput(f"`documents[{place}]` has none of the `rank_fields`: {', '.join(fields)}")
    return "\n".join(map(str, found))


def check_instruction(instruction: str | None, documents: int) -> None:
    """Refuse an instruction that is tokenised with too many documents. Raises InvalidInput."""
    length = len(instruction or "")
    if length * documents > INSTRUCTIONS_CHARACTERS_MAX:
        raise InvalidInput(
            f"`instruction` holds {length} characters for each of {documents} documents, {length * documents} in all > "
            f"maximum allowed {INSTRUCTIONS_CHARACTERS_MAX}"
        )
