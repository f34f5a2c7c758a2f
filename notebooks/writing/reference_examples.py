"""Examples of reference.md, by the heading that they stand under. tests/notebooks/test_snippets.py
runs them in order."""

EXAMPLES = {
    "Embed": """
from hybridtei import Encoder

encoder = Encoder.load()
vectors = encoder.encode(
    ["lift of a thin wing", "a loaf of bread"], outputs=("dense", "sparse", "multivector")
)
assert vectors.dense.shape == (2, 384)
indices, weights = vectors.sparse.row(0)
assert vectors.sparse.to_scipy().nnz > 2
assert vectors.multivector.row(0).shape[1] == 256
piece, weight = encoder.tokens(vectors.sparse)[0][0]

best = encoder.rerank("how wings carry", ["a loaf of bread", "lift of a thin wing"])[0]
assert best.index == 1

small = encoder.encode(
    "a text",
    ("multivector",),
    multivector={"max_tokens": 8, "dtype": "binary"},
    input_type="document",
)
""",
    "Search": """
import asyncio

from hybridtei import (
    Head,
    Index,
    Searcher,
    SearchOptions,
    StoreConfig,
    open_store,
    schema_for,
    to_points,
)

texts = ["lift of a thin wing", "a loaf of bread"]
kinds = (Head.DENSE, Head.SPARSE, Head.MULTIVECTOR)


async def store_and_find(query):
    store = open_store(StoreConfig(qdrant_path="./qdrant"))
    try:
        await store.create("notes", schema_for(encoder.spec, "minilm-hybrid"))
        points = to_points(
            encoder.encode(texts, kinds), ids=[1, 2], payloads=[{"text": text} for text in texts]
        )
        await store.upsert("notes", points)
        return await Searcher(store, encoder).search("notes", query)
    finally:
        await store.close()


assert asyncio.run(store_and_find("how wings carry")).hits[0].id == 1

# The same without asyncio
with Index.open("./qdrant", "notes", encoder) as index:
    hits = index.search("bread", limit=1, mode="dense")
assert hits[0].payload["text"] == "a loaf of bread"
""",
    "Ingest": """
from pathlib import Path

from hybridtei import ingest

Path("notes").mkdir()
Path("notes/plate.md").write_text("# Plates\\n\\nA boundary layer grows along a flat plate.")
summary = ingest("notes", "library", encoder, "./library", quiet=True)
assert (summary.stats.documents, summary.stats.points) == (1, 1)
""",
    "Qdrant by its own client": """
from qdrant_client import QdrantClient, models

from hybridtei import as_lists, create_arguments, point_id, schema_for, to_points

schema = schema_for(encoder.spec, "minilm-hybrid")
client = QdrantClient(":memory:")
client.create_collection("notes", **create_arguments(schema))
points = to_points(
    encoder.encode(["a text"], kinds),
    ids=[point_id("notes.txt", 0)],
    payloads=[{"text": "a text"}],
    schema=schema,
)
client.upsert("notes", [as_lists(point) for point in points])
query = encoder.encode(["a query"], kinds, input_type="query")
indices, values = query.sparse.row(0)
legs = [
    models.Prefetch(query=query.dense[0].tolist(), using="dense", limit=100),
    models.Prefetch(
        query=models.SparseVector(indices=indices.tolist(), values=values.tolist()),
        using="sparse",
        limit=100,
    ),
]
found = client.query_points(
    "notes", prefetch=legs, query=models.RrfQuery(rrf=models.Rrf(k=61)), limit=3
).points
assert (found[0].payload or {})["text"] == "a text"
""",
    "Settings": """
from hybridtei import EngineConfig, ModelConfig

precise = Encoder.load(
    config=ModelConfig(dtype="float32"), engine=EngineConfig(max_batch_tokens=4096)
)
assert precise.dtype == "float32"
""",
}
