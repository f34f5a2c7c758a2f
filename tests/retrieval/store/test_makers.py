"""Whatever makes a collection makes the same one, and its vectors are proved to be the searching
model's."""

import asyncio
import logging
import os
import shutil
import tarfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from qdrant_client import QdrantClient

from conformance.small.tiny import write_bert
from hybridtei import Index, StoreConfig, ingest, schema_for, to_points
from hybridtei.client import Client
from hybridtei.config import EngineConfig, ModelConfig
from hybridtei.encoder import Encoder
from hybridtei.errors import CollectionMismatch
from hybridtei.models.fingerprint import fingerprint
from hybridtei.retrieval.migrate import MigrateOptions
from hybridtei.retrieval.migrate.run import MigrationRun
from hybridtei.retrieval.store import opened
from hybridtei.retrieval.store.collection import MIGRATION_OF, CollectionSchemas
from hybridtei.retrieval.store.memory import MemoryStore
from hybridtei.retrieval.store.plan import FINGERPRINT, PACKED
from hybridtei.retrieval.store.server import create_arguments, schema_of
from hybridtei.retrieval.store.transfer import exported, import_from
from tests.retrieval.search.small_search import MODEL, TEXTS, encoder_in, run
from tests.retrieval.store.stores import standing_in
from tests.retrieval.test_langchain import langchain_store
from tests.server.live import serving

# What the points of a collection are, and where they came from
NOTES = {"ingest_sources", "has_records"}
DATA = Path(__file__).parents[2] / "data"


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return encoder_in(tmp_path_factory.mktemp("model"))


def inside(folder, work):
    """The result of `work(store)` with the embedded engine of a folder."""

    async def once():
        async with opened(StoreConfig(qdrant_path=str(folder))) as store:
            return await work(store)

    return run(once())


def described(folder, name):
    return inside(folder, lambda store: store.describe(name))


def test_whatever_makes_a_collection_makes_the_same(encoder, tmp_path):
    folder, source = tmp_path / "qdrant", tmp_path / "notes.txt"
    source.write_text(TEXTS[0])
    schema = schema_for(encoder.spec, MODEL)
    ingest(source, "ingest", encoder, folder, quiet=True)
    with Index(TEXTS, encoder) as index:
        index.save(folder, "index")

    async def others(store):
        await store.create("schema", schema)
        schemas = CollectionSchemas(store)
        await import_from(schemas, exported(schemas, "ingest"), "import")

    inside(folder, others)
    store = MemoryStore()
    with serving(encoder.spec, schemas=CollectionSchemas(store), model_id=MODEL) as server:
        server.post("/collections/points/points", {"points": [{"text": "one"}], "create": True})
        with Client(server.url) as client:
            client.upsert("upsert", ["one"])
        points, upsert = run(store.describe("points")), run(store.describe("upsert"))
    made = {name: described(folder, name) for name in ("ingest", "index", "schema", "import")}
    made |= {"points": points, "upsert": upsert}
    made |= made_by_langchain_and_migrate(encoder, schema)
    with standing_in("rest") as served:

        async def create():
            await served.create("rest", schema)
            there = await served.describe("rest")
            await served.close()
            return there

        made["rest"] = run(create())
    assert schema.metadata[FINGERPRINT] == fingerprint(encoder.spec)["model"]
    for name, there in made.items():
        metadata = {key: one for key, one in there.metadata.items() if key not in NOTES}
        plain = replace(there, metadata=metadata, stored_as=None)
        # A server tells its defaults
        if name == "rest":
            plain = replace(plain, shard_number=None, replication_factor=None, on_disk_payload=None)
        assert plain == schema, name


def made_by_langchain_and_migrate(encoder, schema):
    """Name -> what `describe` says. A copy is made of what answers, so both are the same."""

    async def migrated():
        store = MemoryStore()
        await store.create("old", schema)
        run_of = MigrationRun(
            store, MigrateOptions(collection="old"), ModelConfig(), EngineConfig(), print
        )
        old = replace(await store.describe("old"), stored_as="old")
        return await run_of._copy_of(old, old, 1)

    client = QdrantClient(":memory:")
    client.create_collection("langchain", **create_arguments(schema))
    langchain_store(client, "langchain", encoder).add_texts(TEXTS)
    copy = run(migrated())
    metadata = {key: one for key, one in copy.metadata.items() if key != MIGRATION_OF}
    return {
        "langchain": schema_of(client.get_collection("langchain")),
        "migrate": replace(copy, metadata=metadata),
    }


def test_multivectors_of_floats_are_stored_as_the_collection_keeps_them(encoder):
    schema = schema_for(encoder.spec, MODEL)
    embedded = encoder.encode(TEXTS, ("dense", "sparse", "multivector"), input_type="document")
    plain = to_points(embedded, list(range(len(TEXTS))), [{"text": text} for text in TEXTS])
    fitted = to_points(embedded, list(range(len(TEXTS))), schema=schema)

    async def stored(points):
        store = MemoryStore()
        await store.create("c", schema)
        await store.upsert("c", points)
        return [point.payload[PACKED] for point in await store.retrieve("c", [0, 1, 2])]

    with Index(TEXTS, encoder) as index:
        own = asyncio.run(index._store.retrieve("index", [0, 1, 2]))
    assert run(stored(plain)) == run(stored(fitted)) == [point.payload[PACKED] for point in own]


@pytest.fixture
def folders(tmp_path):
    """A model, and another one of the same form."""
    return [write_bert(tmp_path / name, seed=seed) for seed, name in enumerate(("one", "other"))]


def loaded(folder, weights=None):
    """The model of a folder, whose weights are replaced before."""
    if weights is not None:
        shutil.copy(weights / "model.safetensors", folder / "new")
        os.replace(folder / "new", folder / "model.safetensors")
    return Encoder.load(str(folder), measures=False)


def unsigned(folder, name="index"):
    """Take the fingerprint out of a collection, as `Index.save` of 0.3.0 made it."""
    inside(folder, lambda store: store.annotate(name, {FINGERPRINT: None}))


def test_without_a_fingerprint_stored_texts_are_embedded_again(folders, tmp_path, caplog):
    place = tmp_path / "qdrant"
    with closing(loaded(folders[0])) as encoder, Index(TEXTS, encoder) as index:
        index.save(place)
        unsigned(place)
        with Index.open(place, encoder=encoder) as there:
            assert there.search(TEXTS[3], mode="dense")[0].payload["text"] == TEXTS[3]
            assert FINGERPRINT not in described(place, "index").metadata
            there.add(["eight nine"])
        assert described(place, "index").metadata[FINGERPRINT] == run(encoder.fingerprint())
    unsigned(place)
    with closing(loaded(folders[0], weights=folders[1])) as other:
        with pytest.raises(CollectionMismatch, match="embedded 5 of its texts again"):
            Index.open(place, encoder=other)
        (source := tmp_path / "new.txt").write_text("nine ten")
        with pytest.raises(CollectionMismatch, match="embedded 5 of its texts again"):
            ingest(source, "index", other, place, quiet=True, outputs=["dense"])
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_the_fingerprint_is_of_what_was_loaded(folders, tmp_path, caplog):
    place = tmp_path / "qdrant"
    with (
        closing(loaded(folders[0])) as encoder,
        Index(TEXTS, encoder) as index,
        closing(loaded(folders[0], weights=folders[1])) as other,
    ):
        index.save(place)
        assert FINGERPRINT not in described(place, "index").metadata
        with Index.open(place, encoder=encoder) as there:
            assert there.search(TEXTS[3], mode="dense")[0].payload["text"] == TEXTS[3]
        with pytest.raises(CollectionMismatch):
            Index.open(place, encoder=other)
    assert "is not the file that was loaded" in caplog.text


def test_without_texts_one_warning_says_that_the_model_is_unknown(encoder, tmp_path, caplog):
    schema = schema_for(encoder.spec, MODEL)
    metadata = {key: one for key, one in schema.metadata.items() if key != FINGERPRINT}

    async def fill(store):
        await store.create("index", replace(schema, metadata=metadata))
        await store.upsert("index", to_points(encoder.encode(TEXTS), list(range(len(TEXTS)))))

    inside(tmp_path, fill)
    with caplog.at_level(logging.WARNING), Index.open(tmp_path, encoder=encoder) as there:
        assert len(there.search("one two")) == len(there.search("three")) == len(TEXTS)
        there.add(["eight"])
    assert [record.message for record in caplog.records if "is unknown" in record.message] == [
        "collection 'index' has neither the fingerprint of its model nor a text to compare: "
        f"it is unknown whether {MODEL} made its vectors"
    ]
    assert FINGERPRINT not in described(tmp_path, "index").metadata


def unpacked(name, folder):
    with tarfile.open(DATA / name) as file:
        file.extractall(folder, filter="data")
    return folder / "qdrant"


def test_an_index_that_0_3_saved_is_searched_and_signed_at_the_next_write(tmp_path):
    place = unpacked("index-0.3.tar.xz", tmp_path)
    with closing(Encoder.load()) as encoder, Index.open(place, "notes", encoder) as index:
        assert index.search("when do keys change")[0].payload["text"] == "The keys rotate monthly."
        index.add(["A new record."])
    assert FINGERPRINT in described(place, "notes").metadata


def test_an_index_that_other_weights_filled_in_0_3_is_refused(tmp_path):
    place = unpacked("index-0.3-other-weights.tar.xz", tmp_path)
    with (
        closing(Encoder.load()) as encoder,
        pytest.raises(CollectionMismatch, match="migrate notes"),
    ):
        Index.open(place, "notes", encoder)
