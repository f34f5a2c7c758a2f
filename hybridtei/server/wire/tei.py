"""TEI's requests, field for field. A union in msgspec holds one array type only, so `parse_inputs` sorts `inputs` out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta, Raw, Struct

from hybridtei.server.body import SchemaError
from hybridtei.text.reader import Input
from hybridtei.text.tokenizer import Direction

Id = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Size = Annotated[int, Meta(ge=0)]
RawInputs = str | list[str | Id | list[Id]]
TruncationDirection = Literal["Left", "left", "Right", "right"]


class EmbedAllRequest(Struct, frozen=True, kw_only=True):
    """`/embed_all`."""

    inputs: Annotated[RawInputs, Meta(description="A text, a list of ids, or a list of texts and id lists.")]
    truncate: Annotated[bool | None, Meta(description="Cut what is too long [default: the server's auto_truncate].")] = None
    truncation_direction: Annotated[TruncationDirection, Meta(description="The side that is cut off.")] = "Right"
    prompt_name: Annotated[str | None, Meta(description="Name of a prompt to put before each input.")] = None

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


class PredictRequest(Struct, frozen=True):
    """`/predict`."""

    inputs: str | list[str | list[str]]
    truncate: bool | None = None
    truncation_direction: TruncationDirection = "Right"
    raw_scores: bool = False


class RerankRequest(Struct, frozen=True):
    """`/rerank`."""

    query: str
    texts: list[str]
    truncate: bool | None = None
    truncation_direction: TruncationDirection = "Right"
    raw_scores: bool = False
    return_text: bool = False


class VertexRequest(Struct, frozen=True):
    """`/vertex`."""

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


class ErrorResponse(Struct, frozen=True):
    """Every error but schema errors, which are plain text, and 401, 404 and 405, which have no body."""

    error: str
    error_type: Literal["Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty"]


@dataclass(frozen=True, slots=True)
class Inputs:
    """What `inputs` meant: its items, and whether it was a list of them."""

    items: list[Input]
    is_batch: bool

    @property
    def characters(self) -> int:
        """Unicode characters of texts, length of id lists: what `x-compute-characters` counts."""
        return sum(map(len, self.items))


def direction(name: TruncationDirection) -> Direction:
    """The wire's four spellings -> ours."""
    return "left" if name in ("Left", "left") else "right"


def parse_inputs(raw: Any, field: str = "inputs") -> Inputs:
    """A text; a list of ids, which is one input (so is []); or a list of texts and id lists. Raises SchemaError."""
    if isinstance(raw, str):
        return Inputs([raw], is_batch=False)
    if all(isinstance(item, int) for item in raw):
        return Inputs([raw], is_batch=False)
    if any(isinstance(item, int) for item in raw):
        raise SchemaError(f"{field}: data did not match any variant of untagged enum Input: ids and texts mixed in one list")
    return Inputs(raw, is_batch=True)
