"""Collections that other software made: their names of vectors, and the texts in their payloads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from hybridtei.errors import CollectionMismatch
from hybridtei.retrieval.store.base import DENSE, SPARSE, CollectionSchema

TEXT = "text"


class Own(NamedTuple):
    """What the caller of a search says of a collection: its names of our kinds of vectors, and its
    key of texts. `unlabelled`: it needs no label of a model."""

    unlabelled: bool = False
    dense: str | None = None
    sparse: str | None = None
    text_field: str = TEXT

    def names(self, schema: CollectionSchema) -> dict[str, str]:
        """Kind of vector -> the collection's name of it, where they differ. Raises
        CollectionMismatch for a name that the collection lacks."""
        names: dict[str, str] = {}
        kinds = ((DENSE, self.dense, schema.vectors), (SPARSE, self.sparse, schema.sparse))
        for kind, name, vectors in kinds:
            if name is not None and name not in vectors:
                raise CollectionMismatch(
                    f"`{kind}_name` is {name!r}, the collection has {[*vectors] or 'none'}"
                )
            if name is not None:
                names[kind] = name
            elif self.unlabelled and kind not in vectors and len(vectors) == 1:
                (names[kind],) = vectors
        return names


OURS, OUR_NAMES = Own(), MappingProxyType[str, str]({})


def view_of(schema: CollectionSchema, names: Mapping[str, str]) -> CollectionSchema:
    """The schema with our names of its vectors."""
    if not names:
        return schema
    vectors, sparse = dict(schema.vectors), dict(schema.sparse)
    if DENSE in names:
        vectors[DENSE] = vectors.pop(names[DENSE])
    if SPARSE in names:
        sparse[SPARSE] = sparse.pop(names[SPARSE])
    return replace(schema, vectors=vectors, sparse=sparse)


def text_of(payload: Mapping[str, Any], text_field: str) -> str:
    """The text of a point, or an empty one."""
    first, _, rest = text_field.partition(".")
    if text_field in payload or not rest:
        return str(payload.get(text_field) or "")
    inner = payload.get(first)
    # LlamaIndex keeps a node as JSON
    if isinstance(inner, str):
        with suppress(ValueError, RecursionError):
            inner = json.loads(inner)
    return text_of(inner, rest) if isinstance(inner, Mapping) else ""


def text_keys(text_field: str) -> list[str]:
    """The keys of a payload that may have the text."""
    return list({text_field, text_field.partition(".")[0]})
