"""Scores of pairs, as vLLM's clients ask for them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from hybridtei.server.api.openai import OpenAICompatUsage
from hybridtei.server.api.rerank import Instruction
from hybridtei.server.http.body import SchemaError

Side = str | list[str] | None


class ScoreRequest(Struct, frozen=True, kw_only=True):
    """`/score` and `/v1/score`."""

    text_1: Annotated[Side, Meta(description="A text, or as many as on the other side.")] = None
    text_2: Annotated[Side, Meta(description="A text, or a list of texts.")] = None
    queries: Annotated[Side, Meta(description="`text_1` under its newer name.")] = None
    documents: Annotated[Side, Meta(description="`text_2` under its newer name.")] = None
    model: Annotated[str | None, Meta(description="Which model is to answer, where there are several.")] = None
    instruction: Instruction = None

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Raises SchemaError."""
        one, other = self.text_1 if self.queries is None else self.queries, self.documents or self.text_2
        first, second = ([side] if isinstance(side, str) else side or [] for side in (one, other))
        if not first or not second:
            raise SchemaError(f"missing field `{'text_2' if first else 'text_1'}`")
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            raise SchemaError(f"text_1 holds {len(first)} texts and text_2 {len(second)}: expected one, or as many")
        return list(zip(first, second, strict=True))


class Score(Struct, frozen=True):
    """Of one pair."""

    index: int
    object: Literal["score"]
    score: float


class ScoreResponse(Struct, frozen=True):
    """Answer of `/score`, in the order of the pairs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: OpenAICompatUsage
