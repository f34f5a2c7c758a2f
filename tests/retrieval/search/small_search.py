"""What tests of searching share: a small model whose tokenizer is a file, as labels of collections
want it, and a few texts."""

import asyncio

import numpy as np

from conformance.small.fake_backend import FakeBackend
from hybridtei import Encoder, EngineConfig, to_points
from hybridtei.retrieval.store.collection import heads_of
from hybridtei.retrieval.store.memory import MemoryStore
from hybridtei.retrieval.store.plan import schema_for
from tests.inference.engine import small

MODEL = "small"
# Every token's vector, as a vector of Qdrant
FLOATS = {"multivector_tokens": 0, "multivector_dtype": "float"}
TEXTS = [
    "one two three",
    "two three four",
    "the hybrid search engine",
    "a search by words and meaning",
    "four five six seven",
    "the engine finds text by meaning",
    "one one one two",
    "seven six five",
    "hybrid words and text",
    "three four five",
]


def spec_in(folder, **changes):
    """A model with every output, whose files lie in a folder."""
    small.tokenizer()._raw.save(str(folder / "tokenizer.json"))
    return small.model_spec(
        folder=folder, **{"prompts": {"query": small.PROMPTS["query"]}, **changes}
    )


def encoder_of(spec):
    return Encoder(small.model(spec), FakeBackend(spec), 256, EngineConfig())


def encoder_in(folder):
    """One under the name that collections have."""
    encoder = encoder_of(spec_in(folder))
    encoder.model_id = MODEL
    return encoder


def payload(place, text):
    return {
        "text": text,
        "document_id": f"d{place}",
        "metadata": {"place": place, "even": place % 2 == 0},
    }


async def filled(
    encoder, store=None, name="papers", texts=TEXTS, payload_of=lambda place: {}, **plan
):
    """A store with the texts as points 0, 1, …; `payload_of`: what differs in their payloads."""
    store = store or MemoryStore()
    layout = schema_for(encoder.spec, MODEL, **FLOATS | plan)
    await store.create(name, layout)
    embedded = encoder.encode(list(texts), sorted(heads_of(layout)), input_type="document")
    payloads = [payload(i, text) | payload_of(i) for i, text in enumerate(texts)]
    points = to_points(embedded, list(range(len(texts))), payloads, layout)
    await store.upsert(name, points)
    return store


def exact(encoder, query, texts=TEXTS):
    """float32[texts] of each kind of vector, in numpy."""
    kinds = ("dense", "sparse", "multivector")
    asked = encoder.encode([query], kinds, input_type="query")
    documents = encoder.encode(list(texts), kinds, input_type="document")
    rows = asked.multivector.row(0)
    return {
        "dense": documents.dense @ asked.dense[0],
        "sparse": documents.sparse.to_dense() @ asked.sparse.to_dense()[0],
        "multivector": np.array(
            [(rows @ document.T).max(1).sum() for document in documents.multivector]
        ),
    }


def run(coroutine):
    async def limited():
        async with asyncio.timeout(60):
            return await coroutine

    return asyncio.run(limited())
