"""Migrations of small collections by tiny models: written to meanwhile, killed, flipped, rolled
back, finished."""

import asyncio
import itertools
import json
import shutil
import subprocess
import sys
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

import pytest

from conformance.small.tiny import write_bert
from hybridtei.config import EngineConfig, ModelConfig, StoreConfig
from hybridtei.encoder import Encoder
from hybridtei.errors import CollectionMismatch, HybridTeiError, InvalidInput
from hybridtei.retrieval.ingest.run import ingest
from hybridtei.retrieval.migrate import MigrateOptions
from hybridtei.retrieval.migrate import run as running
from hybridtei.retrieval.migrate.run import MigrationRun
from hybridtei.retrieval.search.calibration import curve_of
from hybridtei.retrieval.search.searcher import Searcher
from hybridtei.retrieval.store.collection import CollectionSchemas
from hybridtei.retrieval.store.embedded import EmbeddedStore
from hybridtei.retrieval.store.plan import CALIBRATION, FINGERPRINT, schema_for
from hybridtei.retrieval.store.points import to_points
from hybridtei.retrieval.store.server import ServerStore
from tests.retrieval.search.small_search import FLOATS
from tests.retrieval.store.speaking import Failure, speaking
from tests.retrieval.store.stores import STAND_INS, opened, plan, standing_in

NAME, POINTS = "papers", 150
KINDS = ("memory", "grpc")


def texts(count=POINTS):
    return [f"{i} wing flow over plate {i * 7 % 31}. heat" for i in range(count)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("models")
    return write_bert(place / "old", seed=0), write_bert(place / "new", seed=1, hidden_size=48)


def loaded(folder):
    return Encoder.load(config=ModelConfig(model_id=str(folder)))


async def filled(store, folder, rows):
    encoder = loaded(folder)
    await store.create(NAME, schema_for(encoder.spec, str(folder), **FLOATS))
    await store.upsert(NAME, points(encoder, list(range(len(rows))), rows))
    return encoder


def points(encoder, ids, rows):
    return to_points(
        encoder.encode(list(rows), ("dense",)), list(ids), [{"text": row} for row in rows]
    )


async def step(store, said=None, **options):
    chosen = MigrateOptions(collection=NAME, quiet=True, **options)
    await MigrationRun(
        store, chosen, ModelConfig(), EngineConfig(), ([] if said is None else said).append
    ).run()


async def payloads(store, name):
    records, _ = await store.scroll(name, limit=10_000)
    return {record.id: record.payload for record in records}


@asynccontextmanager
async def fresh(kind, folder=None):
    """An empty store."""
    with standing_in(kind) if kind in STAND_INS else nullcontext(opened(kind, folder)) as store:
        yield store
        await store.close()


async def searched(store, encoder, folder, text="wing flow 3"):
    searcher = Searcher(store, encoder.named(str(folder)), schemas=CollectionSchemas(store))
    return [(hit.id, hit.score) for hit in (await searcher.search(NAME, text)).hits]


async def write(schemas, encoders, ids, rows):
    """A writer that has both models, as a server has."""
    while True:
        schema = await schemas.of(NAME, writing=True)
        if await schemas.upsert(
            NAME, schema, points(encoders[schema.metadata["model_id"]], ids, rows)
        ):
            return


@pytest.mark.parametrize("kind", KINDS)
async def test_writes_at_any_moment_are_in_the_collection_that_answers_afterwards(kind, folders):
    """A writer changes, adds and deletes points before each call of the migration to the store,
    without a wait: a write may be acknowledged only if it is there in the end, and a search always
    finds points of one model."""

    async with fresh(kind) as store:
        encoders = {str(folder): loaded(folder) for folder in folders}
        await store.create(
            NAME, schema_for(encoders[str(folders[0])].spec, str(folders[0]), **FLOATS)
        )
        await store.upsert(NAME, points(encoders[str(folders[0])], list(range(POINTS)), texts()))
        schemas, expected = CollectionSchemas(store), dict(enumerate(texts()))
        over = asyncio.Event()

        async def traffic():
            for turn in itertools.count():
                if over.is_set():
                    return
                changed = {turn % POINTS: f"changed {turn}", 1000 + turn: f"added {turn}"}
                await write(schemas, encoders, list(changed), list(changed.values()))
                expected.update(changed)
                schema = await schemas.of(NAME)
                encoder = encoders[schema.metadata["model_id"]]
                model = encoder.named(schema.metadata["model_id"])
                assert (await Searcher(store, model, schemas=schemas).search(NAME, "wing")).hits
                await asyncio.sleep(0)

        steps = ({"to": str(folders[1]), "yes": True}, {"step": "rollback"})
        for number, options in zip((1, 0), steps, strict=True):
            over.clear()
            writing = asyncio.create_task(traffic())
            await step(store, **options)
            over.set()
            await writing
            assert (await store.aliases())[NAME] == f"{NAME}.{number}"
            told = {key: one["text"] for key, one in (await payloads(store, NAME)).items()}
            assert told == expected


@pytest.mark.parametrize("kind", [*KINDS, "embedded"])
async def test_searches_follow_the_switch_and_the_way_back(kind, folders, tmp_path):
    async with fresh(kind, tmp_path) as store:
        old = await filled(store, folders[0], texts(40))
        new = loaded(folders[1])
        before = await searched(store, old, folders[0])
        with pytest.raises(InvalidInput, match="--yes accepts this"):
            await step(store, to=str(folders[1]))
        # Nothing was begun
        assert await store.collections() == [NAME]
        said = []
        await step(store, said, to=str(folders[1]), no_switch=True)
        assert f"{NAME}.1 (40 points of {folders[1]}) is a copy" in said[-1]
        await store.delete(NAME, [7])
        await step(store, said, to=str(folders[1]), yes=True)
        assert "switched in" in said[-2]
        after = await searched(store, new, folders[1])
        assert after != before
        with pytest.raises(CollectionMismatch):
            await searched(store, old, folders[0])
        assert 7 not in await payloads(store, NAME)
        await store.delete(NAME, [3])
        await store.upsert(NAME, points(new, [7], [texts()[7]]))
        await step(store, step="rollback")
        assert 3 not in await payloads(store, NAME)
        await store.upsert(NAME, points(old, [3], [texts()[3]]))
        assert await searched(store, old, folders[0]) == before
        # An alias moves: no --yes; the copy of before catches up
        await step(store, to=str(folders[1]))
        await step(store, step="delete_old")
        assert await store.collections() == [f"{NAME}.1"]
        with pytest.raises(InvalidInput, match="the previous one was deleted"):
            await step(store, step="rollback")
        chosen = MigrateOptions(collection=f"{NAME}.1", quiet=True, to=str(folders[0]))
        with pytest.raises(InvalidInput, match=f"migrate '{NAME}'"):
            await MigrationRun(store, chosen, ModelConfig(), EngineConfig(), print).run()


async def test_without_a_fingerprint_the_way_back_proves_the_weights_first(folders, tmp_path):
    """As 0.3 left it: the files of the old model have changed, and nothing says so but its
    texts."""
    old = tmp_path / "old"
    shutil.copytree(folders[0], old)

    async with fresh("memory") as store:
        await filled(store, old, texts(20))
        await step(store, to=str(folders[1]), yes=True)
        before = await payloads(store, NAME)
        await store.annotate(f"{NAME}.0", {FINGERPRINT: None})
        await step(store, step="rollback")
        await step(store, to=str(folders[1]))
        await store.annotate(f"{NAME}.0", {FINGERPRINT: None})
        write_bert(tmp_path / "other", seed=7)
        shutil.copy(tmp_path / "other" / "model.safetensors", old / "model.safetensors")
        with pytest.raises(CollectionMismatch, match="embedded 5 of its texts again"):
            await step(store, step="rollback")
        assert (await store.aliases())[NAME] == f"{NAME}.1"
        assert await payloads(store, NAME) == before


def test_a_switch_that_is_killed_between_any_two_of_its_writes_goes_on(folders, monkeypatch):
    # No search is under way
    monkeypatch.setattr(running, "KEPT_S", -1.0)

    async def story(state, store, writes):
        (await filled(store, folders[0], texts(9))).close()
        await step(store, to=str(folders[1]), no_switch=True)
        do, left = state.do, iter(range(writes))

        def dying(*arguments, **options):
            if options.get("write") and next(left, None) is None:
                raise Failure(400, "killed")
            return do(*arguments, **options)

        state.do = dying
        is_killed = False
        try:
            await step(store, to=str(folders[1]), yes=True)
        except HybridTeiError:
            state.do, is_killed = do, True
            await step(store, to=str(folders[1]), yes=True)
        assert (await store.aliases())[NAME] == f"{NAME}.1"
        assert await store.collections() == [f"{NAME}.0", f"{NAME}.1"]
        described = [await store.describe(f"{NAME}.{number}") for number in (0, 1)]
        assert [one.metadata.get("previous") for one in described if one is not None] == [
            None,
            f"{NAME}.0",
        ]
        assert await store.count(NAME) == await store.count(f"{NAME}.0") == 9
        return is_killed

    for writes in itertools.count():
        with speaking() as state:
            store = ServerStore(StoreConfig(qdrant_url=state.url("grpc")))
            if not asyncio.run(story(state, store, writes)):
                break
    # A collection, its points, a mark, two of metadata, the deletion, the alias, metadata of two
    assert writes == 8


@pytest.mark.parametrize("kind", KINDS)
async def test_what_cannot_be_embedded_is_not_copied(kind, folders):
    async with fresh(kind) as store:
        encoder = await filled(store, folders[0], texts(20))
        await store.upsert(
            NAME, to_points(encoder.encode(["a"], ("dense",)), [0], [{"title": "no text"}])
        )
        with pytest.raises(InvalidInput, match="no text"):
            await step(store, to=str(folders[1]), no_switch=True)
        assert await store.collections() == [NAME]


async def test_another_model_has_no_curve_of_the_old_one(folders):
    async with fresh("memory") as store:
        await filled(store, folders[0], texts(3))
        await store.annotate(NAME, {CALIBRATION: {"dense": [[0.0, 0.5]]}, "note": "mine"})
        await step(store, to=str(folders[1]), yes=True)
        metadata = (await CollectionSchemas(store).of(NAME)).metadata
        assert (CALIBRATION in metadata, metadata["note"]) == (False, "mine")


@pytest.mark.parametrize("kind", ["memory", "embedded", *STAND_INS])
async def test_a_store_annotates_collections_and_gives_them_names(kind, tmp_path):
    async with fresh(kind, tmp_path) as store:
        for name in ("a", "b", "c"):
            await store.create(name, plan(model_id=name))
        await store.annotate("a", {"note": {"x": 1}, "model_id": None})
        described = await store.describe("a")
        assert dict(described.metadata) == {"note": {"x": 1}}
        curve = [[-1.5, 0.25], [2.0, 1.0]]
        await store.annotate("b", {CALIBRATION: {"dense": curve}})
        assert curve_of(await store.describe("b"), "dense") == [tuple(point) for point in curve]
        await store.alias("a", "b")
        assert await store.aliases() == {"a": "b"}
        assert await store.collections() == ["b", "c"]
        await store.alias("a", "c")
        assert await store.aliases() == {"a": "c"}
        assert await store.count("a") == 0


@pytest.mark.slow
def test_the_load_script_sees_equal_copies_after_kills_and_the_old_answers_again(
    folders,
):
    command = [sys.executable, "-m", "conformance.load", "migrate", "--points", "200"]
    command += ["--old", str(folders[0]), "--new", str(folders[1]), "--kills", "1"]
    done = subprocess.run(
        command, check=False, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]
    )
    told = json.loads(done.stdout.splitlines()[-1])
    of_speed = {"kill -9 of the command", "last search that the old model answers"}
    assert set(told["broken"]) <= of_speed
    assert len(told["rows"]) == 11


def ingested(place, folder):
    model = ModelConfig(model_id=str(folder))
    return ingest(place / "notes", NAME, model, place / "store", quiet=True)


def migrated(place, said=None, **options):
    tell = ([] if said is None else said).append
    chosen, store = (
        MigrateOptions(collection=NAME, quiet=True, **options),
        StoreConfig(qdrant_path=str(place / "store")),
    )
    running.run_migration(chosen, ModelConfig(), EngineConfig(), store, tell=tell)


@pytest.fixture
def notes(tmp_path):
    (tmp_path / "notes").mkdir()
    for i, text in enumerate(texts(5)):
        (tmp_path / f"notes/{i}.txt").write_text(text)
    return tmp_path


def test_an_ingest_after_a_migration_embeds_nothing_again(notes, folders):
    assert ingested(notes, folders[0]).stats.documents == 5
    migrated(notes, to=str(folders[1]), yes=True)
    migrated(notes, step="delete_old")
    again = ingested(notes, folders[1]).stats
    assert (again.documents, again.unchanged) == (0, 5)


def test_vectors_that_the_new_model_lacks_are_named(notes, folders, hybrid):
    said = []
    ingested(notes, hybrid)
    try:
        migrated(notes, said, to=str(folders[0]), no_switch=True)
    except HybridTeiError as refusal:
        said.append(str(refusal))
    assert [line for line in said if "sparse" in line and "multivector" in line]


def test_migrating_back_restores_the_vectors_that_were_dropped(notes, folders, hybrid):
    async def sparse():
        store = EmbeddedStore(str(notes / "store"))
        described = await store.describe(NAME)
        await store.close()
        return {*described.sparse} if described is not None else set()

    ingested(notes, hybrid)
    assert asyncio.run(sparse()) == {"sparse"}
    for folder in (folders[0], hybrid):
        migrated(notes, to=str(folder), yes=True, drop_outputs="sparse,multivector")
        migrated(notes, step="delete_old")
    assert asyncio.run(sparse()) == {"sparse"}
