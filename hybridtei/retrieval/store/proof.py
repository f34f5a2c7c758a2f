"""Proves by a few stored texts that a model has made the vectors of a collection that has no
fingerprint: those of other software, and those of version 0.3 that `Index.save` or a program
made."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from hybridtei.batch import Ragged
from hybridtei.errors import CollectionMismatch
from hybridtei.inference.tasks.rerank import maxsim
from hybridtei.outputs import Embeddings, unit
from hybridtei.retrieval.store.base import DENSE, SPARSE, CollectionSchema, Store, Stored
from hybridtei.retrieval.store.own import OUR_NAMES, OURS, Own, text_keys, text_of
from hybridtei.retrieval.store.plan import PACKED, packed_format
from hybridtei.retrieval.store.points import check_points, to_points

# Texts -> their vectors, as documents of the collection
EmbedTexts = Callable[[Sequence[str]], Awaitable[Embeddings]]

log = logging.getLogger(__name__)

COMPARED, READ = 5, 50
# A key of payloads
CONTEXT = "context"
# Cosines of equal texts: engines, precisions and Qdrant's compressed numbers differ by less. Bits
# flip where a number is almost 0.
LEAST, LEAST_OF_BYTES = 0.99, 0.9
# Other software may embed a title or metadata with a text; other models' vectors have about 0
LEAST_OF_OTHERS = 0.5


async def proof_of(
    store: Store,
    name: str,
    schema: CollectionSchema,
    embed: EmbedTexts,
    model_id: str,
    *,
    own: Own = OURS,
    names: Mapping[str, str] = OUR_NAMES,
) -> tuple[bool, CollectionSchema]:
    """(True if the model makes the vectors that the collection has for its own texts, or if it has
    no points; False, and a warning, if no text is stored; the schema, without the sparse vectors of
    other software that are not the model's). Raises CollectionMismatch if other vectors differ."""
    keys = [*text_keys(own.text_field), CONTEXT]
    records, _ = await store.scroll(name, limit=READ, with_payload=keys)
    if not records:
        return True, schema
    texts = {record.id: text_of(record.payload, own.text_field) for record in records}
    ids = [identity for identity, text in texts.items() if text.strip()][:COMPARED]
    stored = await store.retrieve(name, ids, with_vectors=True)
    kinds = {name: kind for kind, name in names.items()}
    for record in stored:
        record.vector = {kinds.get(key, key): vector for key, vector in record.vector.items()}
    cosines: dict[str, list[float]] = {}
    if stored:
        if DENSE in schema.vectors:
            # Dense vectors have read the headings above a chunk too
            for record in stored:
                texts[record.id] = "\n".join((*_context(record), texts[record.id]))
        embedded = await embed([texts[record.id] for record in stored])
        cosines = await asyncio.to_thread(_cosines, stored, embedded, schema)
    if not cosines:
        log.warning(
            "collection %r has neither the fingerprint of its model nor a text to compare: it "
            "is unknown whether %s made its vectors",
            name,
            model_id,
        )
    for kind, values in cosines.items():
        bound = LEAST_OF_BYTES if kind == PACKED else LEAST
        if own.unlabelled:
            bound = LEAST_OF_OTHERS
        if (cosine := median(values)) >= bound:
            continue
        if kind == SPARSE and own.unlabelled and own.sparse is None and len(cosines) > 1:
            log.warning("collection %r: its sparse vectors are not those of %s", name, model_id)
            schema = replace(schema, sparse={})
            continue
        raise CollectionMismatch(
            f"collection {name!r} has no fingerprint of its model, so {model_id} embedded "
            f"{len(stored)} of its texts again: their `{kind}` vectors and the stored ones "
            f"have a cosine of {cosine:.3f}, should be {bound} or more. Other weights made the "
            f"collection: `hybridtei migrate {name}` makes its vectors anew"
        )
    return bool(cosines), schema


def _context(record: Stored) -> list[str]:
    return [str(context) for context in (record.payload.get(CONTEXT),) if context]


def _cosines(
    stored: Sequence[Stored], embedded: Embeddings, schema: CollectionSchema
) -> dict[str, list[float]]:
    """The cosines of stored and new vectors of equal texts, by kind."""
    new = to_points(embedded, [record.id for record in stored], schema=schema)
    cosines: dict[str, list[float]] = {}
    for before, after in zip(stored, check_points(new, schema), strict=True):
        vectors = _vectors(before, schema)
        for kind, vector in _vectors(after, schema).items():
            is_of_text = kind == DENSE or DENSE not in schema.vectors or not _context(before)
            if kind in vectors and is_of_text:
                cosines.setdefault(kind, []).append(_cosine(vectors[kind], vector))
    return cosines


def _vectors(record: Stored, schema: CollectionSchema) -> dict[str, Any]:
    """The vectors of a point, and those in its payload."""
    packed = packed_format(schema)
    if packed is None or PACKED not in record.payload:
        return record.vector
    return {**record.vector, PACKED: packed.vectors([record.payload[PACKED]]).values}


def _cosine(*vectors: Any) -> float:
    """The cosine of two vectors, or the mean over a multi-vector's rows of their best cosines."""
    if isinstance(vectors[1], dict):
        indices = np.unique(np.concatenate([vector["indices"] for vector in vectors]))
        vectors = tuple(
            np.bincount(np.searchsorted(indices, vector["indices"]), vector["values"], len(indices))
            for vector in vectors
        )
    rows = [unit(np.atleast_2d(np.asarray(vector, np.float32))) for vector in vectors]
    return float(maxsim(rows[0], Ragged.from_rows(rows[1:]), mean=True)[0])
