"""A collection without a fingerprint is accepted if a few of its vectors are those that the model
makes: the bound of the cosine follows from the kind of vectors and from who made them."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from hybridtei.batch import Ragged
from hybridtei.errors import CollectionMismatch
from hybridtei.outputs import Embeddings, SparseVectors
from hybridtei.retrieval.store.memory import MemoryStore
from hybridtei.retrieval.store.own import OURS
from hybridtei.retrieval.store.plan import DTYPE, WIDTH
from hybridtei.retrieval.store.points import to_points
from hybridtei.retrieval.store.proof import (
    COMPARED,
    LEAST,
    LEAST_OF_BYTES,
    LEAST_OF_OTHERS,
    proof_of,
)
from tests.retrieval.store.stores import ROW_WIDTH, plan, unit
from tests.retrieval.store.stores import WIDTH as DENSE_WIDTH

COUNT = 8
TEXTS = [f"text {place}" for place in range(COUNT)]
OTHERS = OURS._replace(unlabelled=True)
SCHEMA = plan()
DENSE_ONLY = replace(SCHEMA, vectors={"dense": SCHEMA.vectors["dense"]}, sparse={})
SPARSE_ONLY = replace(SCHEMA, vectors={})
PACKED = replace(DENSE_ONLY, metadata={DTYPE: "int8", WIDTH: ROW_WIDTH})
ROWS_ONLY = replace(SCHEMA, vectors={"multivector": SCHEMA.vectors["multivector"]}, sparse={})


def turned(rows, cosine):
    """Unit rows that have this cosine with the given ones."""
    random = np.random.default_rng(1).normal(size=rows.shape)
    aside = unit(random - (random * rows).sum(1, keepdims=True) * rows)
    return (cosine * rows + np.sqrt(1 - cosine**2) * aside).astype(np.float32)


def rows_of(width):
    return unit(np.random.default_rng(0).normal(size=(COUNT, width)))


def each_row(rows):
    return Ragged(rows, np.arange(COUNT + 1))


def sparse_of(cosine):
    """Two entries a text: the query has the first alone."""
    values = np.tile([cosine, np.sqrt(1 - cosine**2)], (COUNT, 1)).astype(np.float32)
    return SparseVectors.from_dense(values)


KINDS = {
    "dense": (DENSE_ONLY, lambda cosine: {"dense": turned(rows_of(DENSE_WIDTH), cosine)}),
    "multivector": (
        ROWS_ONLY,
        lambda cosine: {"multivector": each_row(turned(rows_of(ROW_WIDTH), cosine))},
    ),
    "packed": (
        PACKED,
        lambda cosine: {
            "dense": rows_of(DENSE_WIDTH),
            "multivector": each_row(turned(rows_of(ROW_WIDTH), cosine)),
        },
    ),
    "sparse": (SPARSE_ONLY, lambda cosine: {"sparse": sparse_of(cosine)}),
}


def proved(schema, stored, new, *, own=OURS, payloads=None):
    """What `proof_of` says of a collection of the stored vectors, if the model makes the new
    ones."""

    async def embed(texts):
        asked.append(texts)
        return Embeddings(**new).take(range(len(texts)))

    async def scenario():
        store = MemoryStore()
        await store.create("c", schema)
        given = payloads or [{"text": text} for text in TEXTS]
        await store.upsert("c", to_points(Embeddings(**stored), range(COUNT), given, schema))
        return await proof_of(store, "c", schema, embed, "small", own=own)

    asked = []
    return (*asyncio.run(scenario()), asked)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("own", [OURS, OTHERS], ids=["ours", "others"])
def test_the_bound_is_of_the_kind_and_the_maker(kind, own):
    schema, make = KINDS[kind]
    least = LEAST_OF_BYTES if kind == "packed" else LEAST
    if own.unlabelled:
        least = LEAST_OF_OTHERS
    near = (1 - least) / 4
    is_proved, kept, asked = proved(schema, make(least + near), make(1.0), own=own)
    assert (is_proved, kept) == (True, schema)
    assert asked == [TEXTS[:COMPARED]]
    with pytest.raises(CollectionMismatch, match=f"should be {least} or more"):
        proved(schema, make(least - near), make(1.0), own=own)


def both(dense, sparse):
    return {"dense": turned(rows_of(DENSE_WIDTH), dense), "sparse": sparse_of(sparse)}


def test_sparse_vectors_of_other_software_are_left_out_beside_dense_ones_of_the_model():
    schema = replace(DENSE_ONLY, sparse=SCHEMA.sparse)
    is_proved, kept, _ = proved(schema, both(1.0, 0.3), both(1.0, 1.0), own=OTHERS)
    assert (is_proved, kept) == (True, replace(schema, sparse={}))
    for own in (OURS, OTHERS._replace(sparse="sparse")):
        with pytest.raises(CollectionMismatch, match="`sparse` vectors"):
            proved(schema, both(1.0, 0.3), both(1.0, 1.0), own=own)


def test_without_texts_nothing_is_proved(caplog):
    make = KINDS["dense"][1]
    is_proved, _, asked = proved(DENSE_ONLY, make(1.0), make(1.0), payloads=[{"text": " "}] * COUNT)
    assert (is_proved, asked) == (False, [])
    assert "neither the fingerprint of its model nor a text" in caplog.text


def test_dense_vectors_read_what_stands_above_a_chunk():
    make = KINDS["dense"][1]
    payloads = [{"text": text, "context": "A title"} for text in TEXTS]
    *_, asked = proved(DENSE_ONLY, make(1.0), make(1.0), payloads=payloads)
    assert asked == [[f"A title\n{text}" for text in TEXTS[:COMPARED]]]
