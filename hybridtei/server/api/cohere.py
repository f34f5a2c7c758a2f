"""Cohere's embeddings, versions 1 and 2, which ask alike."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from hybridtei.server.api.tei import Size
from hybridtei.server.http.body import SchemaError

EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]


class CohereText(Struct, frozen=True):
    """A part of an input; parts that are no text are refused."""

    type: str = "text"
    text: str | None = None


class CohereInput(Struct, frozen=True):
    """An input of parts, which are read as one text."""

    content: list[CohereText]


class CohereEmbedRequest(Struct, frozen=True, kw_only=True):
    """`/v1/embed` and `/v2/embed`."""

    texts: list[str] | None = None
    inputs: list[CohereInput] | None = None
    model: Annotated[str | None, Meta(description="Which model is to answer, where there are several.")] = None
    input_type: Annotated[
        str | None, Meta(description="search_query and search_document matter to models that read these differently.")
    ] = None
    embedding_types: Annotated[list[EmbeddingType] | None, Meta(description="Forms to give [default: float].")] = None
    output_dimension: Annotated[Size | None, Meta(description="Keep the first so many dimensions.")] = None
    truncate: Annotated[Literal["NONE", "START", "END"] | None, Meta(description="The side that is cut off; NONE: refuse.")] = (
        None
    )

    @property
    def read(self) -> list[str]:
        """All texts. Raises SchemaError."""
        if self.texts is not None:
            return self.texts
        if self.inputs is None:
            raise SchemaError("missing field `texts`")
        return [_joined(item, place) for place, item in enumerate(self.inputs)]


def _joined(item: CohereInput, place: int) -> str:
    for part in item.content:
        if part.type != "text" or part.text is None:
            raise SchemaError(f"inputs[{place}].content: of type `{part.type}`, but only texts can be embedded")
    return "\n".join(part.text or "" for part in item.content)


class CohereEmbedResponse(Struct, frozen=True):
    """Answer of `/v2/embed`: under each wanted form, one entry a text."""

    id: str
    response_type: Literal["embeddings_by_type"]
    embeddings: dict[EmbeddingType, list[Any]]
    texts: list[str]
    meta: dict[str, Any]


class CohereEmbedV1Response(Struct, frozen=True):
    """Answer of `/v1/embed`: as version 2, or a list of vectors where no forms were asked for."""

    id: str
    response_type: Literal["embeddings_floats", "embeddings_by_type"]
    embeddings: list[list[float]] | dict[EmbeddingType, list[Any]]
    texts: list[str]
    meta: dict[str, Any]
