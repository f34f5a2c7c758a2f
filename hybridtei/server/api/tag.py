"""Tags of tokens, as Baseten's BEI defines them, and as Hugging Face's clients ask for entities."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from hybridtei.server.api.tei import TruncationDirection
from hybridtei.tasks.spans import Aggregation


class PredictTokensRequest(Struct, frozen=True, kw_only=True):
    """`/predict_tokens`."""

    inputs: Annotated[str | list[str | list[str]], Meta(description="A text, a list of texts, or a list of lists of texts.")]
    truncate: Annotated[bool | None, Meta(description="Cut what is too long [default: the server's auto_truncate].")] = None
    truncation_direction: Annotated[TruncationDirection, Meta(description="The side that is cut off.")] = "Right"
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
