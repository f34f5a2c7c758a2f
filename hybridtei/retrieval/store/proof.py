"""Proves by a few stored texts that a model has made the vectors of a collection that has no
fingerprint: those of version 0.3 that `Index.save` or a program made."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from statistics import median
from typing import Any

import numpy as np

from hybridtei.batch import Ragged
from hybridtei.errors import CollectionMismatch
from hybridtei.inference.tasks.rerank import maxsim
from hybridtei.outputs import Embeddings, unit
from hybridtei.retrieval.store.base import DENSE, CollectionSchema, PointId, Store, Stored
from hybridtei.retrieval.store.plan import PACKED, packed_format
from hybridtei.retrieval.store.points import check_points, to_points

# Texts -> their vectors, as documents of the collection
EmbedTexts = Callable[[Sequence[str]], Awaitable[Embeddings]]

log = logging.getLogger(__name__)

COMPARED, READ = 5, 50
# Keys of payloads
TEXT, CONTEXT = "text", "context"
# Cosines of equal texts: engines, precisions and Qdrant's compressed numbers differ by less. Bits
# flip where a number is almost 0.
LEAST, LEAST_OF_BYTES = 0.99, 0.9


async def is_proved(
    store: Store, name: str, schema: CollectionSchema, embed: EmbedTexts, model_id: str
) -> bool:
    """True if the model makes the vectors that the collection has for its own texts, or if it has
    no points; False, and a warning, if no text is stored. Raises CollectionMismatch if the vectors
    differ."""
    records, _ = await store.scroll(name, limit=READ, with_payload=[TEXT, CONTEXT])
    if not records:
        return True
    texts: dict[PointId, str] = {}
    for record in records:
        text = record.payload.get(TEXT)
        if isinstance(text, str) and text.strip() and len(texts) < COMPARED:
            texts[record.id] = text
    stored = await store.retrieve(name, list(texts), with_vectors=True)
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
            "collection %r has neither the fingerprint of its model nor a text to compare: nobody "
            "can tell whether %s made its vectors",
            name,
            model_id,
        )
    for kind, values in cosines.items():
        bound = LEAST_OF_BYTES if kind == PACKED else LEAST
        if (cosine := median(values)) < bound:
            raise CollectionMismatch(
                f"collection {name!r} has no fingerprint of its model, so {model_id} embedded "
                f"{len(stored)} of its texts again: their `{kind}` vectors and the stored ones "
                f"have a cosine of {cosine:.3f}, should be {bound} or more. Other weights made the "
                f"collection: `hybridtei migrate {name}` makes its vectors anew"
            )
    return bool(cosines)


def _context(record: Stored) -> list[str]:
    return [str(context) for context in (record.payload.get(CONTEXT),) if context]


def _cosines(
    stored: Sequence[Stored], embedded: Embeddings, schema: CollectionSchema
) -> dict[str, list[float]]:
    """The cosines of stored and new vectors of equal texts, by kind."""
    new = to_points(embedded, [record.id for record in stored], schema=schema)
    cosines: dict[str, list[float]] = {}
    packed = packed_format(schema)
    for before, after in zip(stored, check_points(new, schema), strict=True):
        is_of_text = DENSE not in schema.vectors or not _context(before)
        for kind, vector in after.vector.items():
            if kind in before.vector and (is_of_text or kind == DENSE):
                cosines.setdefault(kind, []).append(_cosine(before.vector[kind], vector))
        if (
            packed is not None
            and is_of_text
            and {PACKED} <= before.payload.keys() & after.payload.keys()
        ):
            rows = packed.vectors([before.payload[PACKED], after.payload[PACKED]])
            cosines.setdefault(PACKED, []).append(_cosine(*rows))
    return cosines


def _cosine(before: Any, after: Any) -> float:
    """The cosine of two vectors, or the mean over a multi-vector's rows of their best cosines."""
    if isinstance(after, dict):
        weights = dict(zip(map(int, before["indices"]), before["values"], strict=True))
        pairs = zip(map(int, after["indices"]), after["values"], strict=True)
        product = sum(float(value) * float(weights.get(index, 0.0)) for index, value in pairs)
        norms = np.linalg.norm(before["values"]) * np.linalg.norm(after["values"])
        return product / float(norms)
    rows = [unit(np.atleast_2d(np.asarray(vector, np.float32))) for vector in (before, after)]
    return float(maxsim(rows[0], Ragged.from_rows(rows[1:]), mean=True)[0])
