"""Tokens as vLLM's and llama.cpp's clients ask for them: on TEI's path, told apart by their keys."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from hybridtei.server.api.tei import Id

Model = Annotated[str | None, Meta(description="Which model is to answer, where there are several.")]


class TokenizeKeys(Struct, frozen=True):
    """By which of its keys a body tells whose request it is."""

    inputs: Raw | UnsetType = UNSET
    prompt: Raw | UnsetType = UNSET
    messages: Raw | UnsetType = UNSET
    content: Raw | UnsetType = UNSET


class VllmTokenizeRequest(Struct, frozen=True, kw_only=True):
    """`/tokenize` with `prompt`, vLLM's."""

    prompt: str
    model: Model = None
    add_special_tokens: bool = True
    return_token_strs: Annotated[bool | None, Meta(description="Also give each token's text.")] = None


class VllmTokenizeResponse(Struct, frozen=True):
    """Answer to `prompt`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class LlamaTokenizeRequest(Struct, frozen=True, kw_only=True):
    """`/tokenize` with `content`, llama.cpp's."""

    content: str
    model: Model = None
    add_special: bool = False
    with_pieces: Annotated[bool, Meta(description="Give objects with each token's id and text.")] = False


class LlamaPiece(Struct, frozen=True):
    """A token."""

    id: int
    piece: str


class LlamaTokenizeResponse(Struct, frozen=True):
    """Answer to `content`."""

    tokens: list[int] | list[LlamaPiece]


class DetokenizeRequest(Struct, frozen=True, kw_only=True):
    """`/detokenize`, vLLM's and llama.cpp's."""

    tokens: list[Id]
    model: Model = None


class DetokenizeResponse(Struct, frozen=True):
    """The same text twice: vLLM's clients read `prompt`, llama.cpp's `content`."""

    prompt: str
    content: str
