"""Whose documents are, who writes them, and that what is stored is never embedded again: from
elsewhere too."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from hybridtei.config import ModelConfig, StoreConfig
from hybridtei.encoder import Encoder
from hybridtei.errors import CollectionMismatch, InvalidInput
from hybridtei.models.checkpoint.files import EMBEDDED_HEADS
from hybridtei.retrieval.ingest import prepare as preparing
from hybridtei.retrieval.ingest import run as running
from hybridtei.retrieval.ingest.chunking import DIGEST
from hybridtei.retrieval.ingest.ledger import SOURCES, Source
from hybridtei.retrieval.ingest.run import ingest
from hybridtei.retrieval.store.base import CollectionSchema, Stored
from hybridtei.retrieval.store.memory import MemoryStore
from hybridtei.retrieval.store.query import CollectionPlan
from tests.retrieval.ingest.small_ingest import Ingest, points, write
from tests.retrieval.store.speaking import Failure, serving_grpc, serving_rest
from tests.retrieval.store.test_nodes import Node

COUNT = 40
TEXTS = {f"d{i}": f"a boundary layer on plate {i}" for i in range(COUNT)}


@pytest.fixture(scope="module")
def encoder():
    """The embedded model, loaded once."""
    loaded = Encoder.load(config=ModelConfig(multivector_tokens=64, multivector_dtype="binary"))
    yield loaded
    loaded.close()


class Shared:
    """An encoder that its users do not close."""

    name = "shared"

    def __init__(self, encoder):
        self.encode = encoder.encode

    def close(self):
        pass


@pytest.fixture
def nodes():
    """Two that share one state, and their addresses."""
    both = [Node(), Node()]
    both[1].join(both[0])
    with ExitStack() as stack:
        yield both, [f"grpc://127.0.0.1:{stack.enter_context(serving_grpc(node))}" for node in both]
    both[0].local.close()


@pytest.fixture(autouse=True)
def small_batches(monkeypatch, encoder):
    monkeypatch.setattr(preparing, "BATCH_CHUNKS", 8)
    monkeypatch.setattr(running, "_embedder", lambda *_: Shared(encoder))


@pytest.fixture
def source(tmp_path):
    return write(tmp_path / "in.jsonl", TEXTS)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A function: the command's work on a machine, which is a folder. `tell`: takes its lines;
    others are options."""

    def once(source, url, machine="m1", tell=print, **more):
        folder = tmp_path / machine
        monkeypatch.setenv("HYBRIDTEI_CACHE", str(folder))
        quarantine = str(folder / "quarantine.jsonl")
        store = StoreConfig(qdrant_url=url, qdrant_patience=5.0)
        more |= {"quarantine": quarantine, "quiet": True}
        return ingest(source, "c", store=store, tell=tell, **more).stats

    return once


def test_another_address_and_another_machine_embed_nothing_again(run, source, nodes):
    _, (a, b) = nodes
    assert run(source, a).documents == COUNT
    again = run(source, f"{b},{a}")
    assert (again.documents, again.unchanged) == (0, COUNT)
    elsewhere = run(source, b, "m2")
    assert (elsewhere.documents, elsewhere.unchanged) == (0, COUNT)
    assert elsewhere.points == COUNT
    changed = write(source, TEXTS | {"d0": "a wing"})
    assert run(changed, b, "m2").documents == 1
    # Whose cache has the old version of the file
    back = run(changed, a)
    assert (back.documents, back.unchanged, back.points) == (0, COUNT, COUNT)


def test_a_collection_made_anew_is_not_taken_for_the_old_one(tmp_path, run, source, nodes):
    (first, _), (a, b) = nodes
    run(source, a)
    first.local.delete_collection("c")
    other = write(tmp_path / "other.jsonl", {"x": "a wing"})
    assert run(other, b, "m2").documents == 1
    stats = run(source, a)
    assert (stats.documents, stats.points) == (COUNT, COUNT + 1)


def test_heads_of_ours_that_were_trained_anew_are_told_apart(
    tmp_path, run, source, nodes, monkeypatch
):
    _, (a, _) = nodes
    run(source, a)
    other = tmp_path / "other.safetensors"
    weights = {name: tensor * 0.5 for name, tensor in load_file(EMBEDDED_HEADS).items()}
    with safe_open(EMBEDDED_HEADS, "np") as file:
        save_file(weights, other, metadata=file.metadata())
    find = running.find_model

    def trained_anew(config):
        spec = find(config)
        kind = replace(
            spec.kind,
            sparse=replace(spec.sparse, file=other),
            multivector=replace(spec.multivector, file=other),
        )
        return replace(spec, kind=kind)

    monkeypatch.setattr(running, "find_model", trained_anew)
    with pytest.raises(CollectionMismatch, match="hybridtei migrate c"):
        run(source, a)


def test_an_ingest_goes_on_across_a_failover(run, source, nodes, monkeypatch):
    (first, second), (a, b) = nodes
    do, upserts = Node.do, []

    def dying(node, call, *arguments, **options):
        if node is first:
            upserts.extend([call] * (call == "upsert"))
            if len(upserts) > 2:
                raise Failure(503, "this node is gone")
        return do(node, call, *arguments, **options)

    monkeypatch.setattr(Node, "do", dying)
    stats = run(source, f"{a},{b}")
    assert (stats.documents, stats.points) == (COUNT, COUNT)
    assert "upsert" in first.calls
    assert "upsert" in second.calls
    later = run(source, b)
    assert (later.documents, later.unchanged) == (0, COUNT)


async def test_a_version_that_is_there_in_part_is_done_again(tmp_path):
    """A chunk is missing, one is of another version, a payload claims more chunks than there are
    points."""
    text = "\n".join(f"The engine finds text {i} by words and meaning." for i in range(20))
    texts = {name: f"{text} {name}" for name in ("whole", "short", "mixed", "forged")}
    store, ingest = MemoryStore(), Ingest(tmp_path, chunk_tokens=32)
    await ingest.run(write(tmp_path / "in.jsonl", texts), store)
    before = len(await points(store))
    records = {
        (one.payload["document_id"], one.payload["chunk"]): one
        for one in await points(store, with_vectors=True)
    }
    await store.delete("small", [records["short", 2].id])
    changes = {
        ("mixed", 1): {DIGEST: records["whole", 1].payload[DIGEST]},
        ("forged", 0): {"chunks": 9_000_000},
    }
    for place, change in changes.items():
        one = records[place]
        await store.upsert("small", [Stored(one.id, {**one.payload, **change}, one.vector)])
    outcome = await ingest.run(tmp_path / "in.jsonl", store)
    assert (ingest.stats.documents, ingest.stats.unchanged) == (3, 1)
    assert outcome.points == before


KNOWN = {
    Path("/data/docs"): "docs",
    Path("/data/docs/deep/a.txt"): "a.txt",
    Path("/srv/all"): "named",
}


@pytest.mark.parametrize(
    ("place", "chosen", "label"),
    [
        ("/data/docs", None, "docs"),
        # A file refreshed by its own path
        ("/data/docs/b/c.txt", None, "docs/b/c.txt"),
        # The nearest
        ("/data/docs/deep/a.txt", None, "a.txt"),
        ("/elsewhere/new", None, "new"),
        (
            "/elsewhere/docs",
            "docs",
            "docs",
            # The folder has moved, or is seen from another machine
        ),
        ("/elsewhere/docs", "other", "other"),
        ("/srv/all/x", None, "named/x"),
    ],
)
def test_the_label_of_a_path(place, chosen, label):
    assert Source.of(Path(place), known(KNOWN), chosen).label == label


def known(sources):
    return CollectionSchema({}, {}, {SOURCES: {name: str(path) for path, name in sources.items()}})


def test_two_sources_of_one_name_are_two():
    with pytest.raises(InvalidInput, match=r"'docs', which is /data/docs.*--source-name"):
        Source.of(Path("/elsewhere/docs"), known(KNOWN))
    assert Source.of(Path("/data"), known(KNOWN)).labels == ["data", "docs", "a.txt"]
    record = Source.of(Path("/elsewhere/docs"), known(KNOWN), "docs").record
    assert record[SOURCES] == {
        "docs": "/elsewhere/docs",
        "a.txt": "/data/docs/deep/a.txt",
        "named": "/srv/all",
    }
    assert Source.of(Path("/data/docs/b"), known(KNOWN)).record == {}


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "a.txt").write_text("one two")
    (folder / "b.txt").write_text("three four")
    return folder


async def test_however_a_path_is_typed_its_documents_are_the_same(tmp_path, folder, monkeypatch):
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    store, ingest = MemoryStore(), Ingest(tmp_path)
    await ingest.run(Path("docs"), store)
    for path in ("./docs/", folder, "docs/../docs", "link", "docs/a.txt", folder / "b.txt"):
        outcome = await ingest.run(Path(path), store)
        assert (ingest.stats.documents, outcome.points, outcome.documents_missing) == (0, 2, 0), (
            path
        )
    (folder / "a.txt").write_text("one three")
    await ingest.run(Path("docs/a.txt"), store)
    assert ingest.stats.documents == 1
    assert {one.payload["document_id"] for one in await points(store)} == {
        "docs/a.txt",
        "docs/b.txt",
    }


async def test_a_file_that_was_ingested_alone_stays_one_document_in_its_folder(tmp_path, folder):
    store, ingest = MemoryStore(), Ingest(tmp_path)
    await ingest.run(folder / "a.txt", store)
    outcome = await ingest.run(folder, store)
    assert (
        ingest.stats.documents,
        ingest.stats.unchanged,
        outcome.points,
        outcome.documents_missing,
    ) == (1, 1, 2, 0)
    (folder / "a.txt").unlink()
    assert (await ingest.run(folder, store)).documents_missing == 1


def test_a_run_waits_until_the_server_has_indexed(run, source, nodes):
    (first, _), (a, _) = nodes
    first.status[:] = ["yellow", "green"]
    told = []
    run(source, a, tell=told.append)
    assert told[-1] == "indexed   0 vectors, the collection is green"


def test_a_collection_on_a_cluster_gets_copies(run, source):
    node, told, plan = Node(peers=3), [], CollectionPlan(shards=6, replicas=1)
    with serving_rest(node) as port:
        run(source, f"http://127.0.0.1:{port}", plan=plan, tell=told.append)
    assert node.made["c"] == {"shard_number": 6, "replication_factor": 1}
    assert "cluster   3 nodes: 6 shards, 1 copies of each" in told
    node.local.close()


def test_a_server_alone_and_one_whose_rest_is_not_reached_get_one_copy(run, source):
    for serving, scheme, says in ((serving_rest, "http", False), (serving_grpc, "grpc", True)):
        node, told = Node(), []
        with serving(node) as port:
            stats = run(source, f"{scheme}://127.0.0.1:{port}", tell=told.append)
        assert stats.points == COUNT
        assert node.made["c"] == {}
        assert any(line.startswith("cluster   unknown") for line in told) == says
        node.local.close()


async def test_ids_of_two_kinds_and_rows_of_two_files_hide_nothing(tmp_path):
    """1 is not "1"; the place of a row without an id is not another row's id; files have rows of
    their own."""
    folder = tmp_path / "docs"
    folder.mkdir()
    rows = [
        '{"id": 1, "text": "one"}',
        '{"id": "1", "text": "two"}',
        '{"id": "line-4", "text": "three"}',
        '{"text": "four"}',
    ]
    for name in ("north", "south"):
        (folder / f"{name}.jsonl").write_text("\n".join(rows))
    store = MemoryStore()
    for _ in range(2):
        stats = await Ingest(tmp_path).run(folder, store)
        assert (stats.points, stats.quarantined) == (8, 0)
    # The second time nothing changes
    assert stats.documents == 0
    stored = {(each.payload["source"], each.payload["document_id"]) for each in await points(store)}
    names = ["1", "1 (text)", "line-4", "line-4 (place)"]
    assert stored == {(f"docs/{file}.jsonl", name) for file in ("north", "south") for name in names}
