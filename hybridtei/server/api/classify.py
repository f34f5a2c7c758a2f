"""Classification as infinity and vLLM ask for it."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from hybridtei.server.api.openai import OpenAICompatUsage
from hybridtei.server.api.tei import Prediction

Texts = Annotated[str | list[str], Meta(description="A text, or a list of texts.")]
Model = Annotated[str | None, Meta(description="Which model is to answer, where there are several.")]


class ClassifyRequest(Struct, frozen=True, kw_only=True):
    """`/classify`, infinity's."""

    input: Texts
    model: Model = None
    raw_scores: Annotated[bool, Meta(description="Give logits instead of probabilities.")] = False


class ClassifyResponse(Struct, frozen=True):
    """Answer of `/classify`: each text's labels, the best first."""

    object: Literal["classify"]
    data: list[list[Prediction]]
    model: str
    usage: OpenAICompatUsage
    id: str
    created: int


class VllmClassifyRequest(Struct, frozen=True, kw_only=True):
    """`/v1/classify`, vLLM's."""

    input: Texts
    model: Model = None
    use_activation: Annotated[bool | None, Meta(description="false: logits instead of probabilities.")] = None
    activation: Annotated[bool | None, Meta(description="The same under its older name.")] = None

    @property
    def probabilities(self) -> bool:
        return self.use_activation is not False and self.activation is not False


class VllmClassification(Struct, frozen=True):
    """A text's likeliest label, and the probability of each, in the model's order."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class VllmClassifyResponse(Struct, frozen=True):
    """Answer of `/v1/classify`."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[VllmClassification]
    usage: OpenAICompatUsage
