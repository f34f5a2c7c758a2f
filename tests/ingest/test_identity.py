"""The ledger is found by what the collection is, and what is stored is never embedded again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from hybridtei.checkpoint.files import EMBEDDED_HEADS
from hybridtei.checkpoint.spec import ModelSpec
from hybridtei.config import EngineConfig, ModelConfig, StoreConfig
from hybridtei.encoder import Encoder
from hybridtei.errors import CollectionMismatch, InvalidInput
from hybridtei.ingest import prepare as preparing
from hybridtei.ingest import run as running
from hybridtei.ingest.chunking import DIGEST
from hybridtei.ingest.identity import COLLECTION_ID, LEDGER_MARK, open_ledger
from hybridtei.ingest.indexing import THRESHOLD
from hybridtei.ingest.ledger import Ledger
from hybridtei.ingest.options import IngestOptions, Summary
from hybridtei.ingest.run import run_ingest
from hybridtei.store import CollectionPlan, collection_state_folder, state_folder
from hybridtei.store.server import ServerStore
from tests.ingest.small_ingest import Ingest, points, write
from tests.store.memory_store import MemoryStore
from tests.store.speaking import Failure, serving_grpc, serving_rest
from tests.store.test_nodes import Node

COUNT = 40


@pytest.fixture(scope="module")
def encoder() -> Iterator[Encoder]:
    """The embedded model, loaded once."""
    loaded = Encoder.load(config=ModelConfig(multivector_tokens=64, multivector_dtype="binary"))
    yield loaded
    loaded.close()


class Shared:
    """An encoder that its users do not close."""

    name = "shared"

    def __init__(self, encoder: Encoder) -> None:
        self.encode = encoder.encode

    def close(self) -> None:
        pass


@pytest.fixture
def nodes() -> Iterator[tuple[list[Node], list[str]]]:
    """Two that share one state, and their addresses."""
    both = [Node(), Node()]
    both[1].join(both[0])
    with ExitStack() as stack:
        yield both, [f"grpc://127.0.0.1:{stack.enter_context(serving_grpc(node))}" for node in both]
    both[0].local.close()


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch, encoder: Encoder) -> None:
    monkeypatch.setattr(preparing, "BATCH_CHUNKS", 8)
    monkeypatch.setattr(running, "_embedder", lambda *_: Shared(encoder))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "in.jsonl", {f"d{i}": f"a boundary layer on plate {i}" for i in range(COUNT)})


def run(source: Path, url: str, machine: Path, monkeypatch: pytest.MonkeyPatch, **more: Any) -> Summary:
    """The command's work on a machine, which is a folder. `tell`: takes its lines; others are options."""
    monkeypatch.setenv("HYBRIDTEI_CACHE", str(machine))
    tell = more.pop("tell", lambda line: None)
    quarantine = str(machine / "quarantine.jsonl")
    options = IngestOptions(source=str(source), collection="c", quarantine=quarantine, quiet=True, **more)
    return run_ingest(options, ModelConfig(), EngineConfig(), StoreConfig(qdrant_url=url, qdrant_patience=5.0), tell=tell)


def test_another_address_and_another_machine_embed_nothing_again(
    tmp_path: Path, source: Path, nodes: tuple[list[Node], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, second), (a, b) = nodes
    assert run(source, a, tmp_path / "m1", monkeypatch).stats.documents == COUNT
    again = run(source, f"{b},{a}", tmp_path / "m1", monkeypatch)
    assert (again.stats.documents, again.stats.skipped) == (0, COUNT)
    assert "scroll" not in first.calls + second.calls, "the ledger is found by the collection, not by the address"
    elsewhere = run(source, b, tmp_path / "m2", monkeypatch)
    assert (elsewhere.stats.documents, elsewhere.stats.skipped, elsewhere.outcome.expected) == (0, COUNT, COUNT)
    assert "scroll" in second.calls
    changed = write(source, {f"d{i}": f"a boundary layer on plate {i}" for i in range(1, COUNT)} | {"d0": "a wing"})
    assert run(changed, b, tmp_path / "m2", monkeypatch).stats.documents == 1
    back = run(changed, a, tmp_path / "m1", monkeypatch)  # whose ledger has the old version of one
    assert (back.stats.documents, back.stats.skipped, back.outcome.points) == (0, COUNT, COUNT)


def test_late_chunks_are_others_than_plain_ones_and_are_remembered(
    tmp_path: Path, source: Path, nodes: tuple[list[Node], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, (a, _) = nodes
    lines: list[str] = []
    assert run(source, a, tmp_path / "m1", monkeypatch).stats.documents == COUNT
    assert run(source, a, tmp_path / "m1", monkeypatch, chunking="late", tell=lines.append).stats.documents == COUNT
    assert any(line.startswith("chunks    at most 65 tokens") and "late" in line for line in lines)
    assert run(source, a, tmp_path / "m1", monkeypatch, chunking="late").stats.documents == 0
    with pytest.raises(InvalidInput, match="--chunking late and --no-chunking exclude each other"):
        run(source, a, tmp_path / "m1", monkeypatch, chunking="late", no_chunking=True)
    find = running.find_model
    monkeypatch.setattr(running, "find_model", lambda model: replace(find(model), pooling=("cls",)))
    with pytest.raises(InvalidInput, match=r"--chunking late: .* the model pools by cls"):
        run(source, a, tmp_path / "m1", monkeypatch, chunking="late")


def test_a_collection_made_anew_is_not_taken_for_the_old_one(
    tmp_path: Path, source: Path, nodes: tuple[list[Node], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, _), (a, b) = nodes
    run(source, a, tmp_path / "m1", monkeypatch)
    first.local.delete_collection("c")
    other = write(tmp_path / "other.jsonl", {"x": "a wing"})
    assert run(other, b, tmp_path / "m2", monkeypatch).stats.documents == 1
    summary = run(source, a, tmp_path / "m1", monkeypatch)
    assert (summary.stats.documents, summary.outcome.points) == (COUNT, COUNT + 1)


@pytest.mark.parametrize("is_signed", [True, False])
def test_heads_of_ours_that_were_trained_anew_are_told_apart(
    tmp_path: Path, source: Path, nodes: tuple[list[Node], list[str]], monkeypatch: pytest.MonkeyPatch, is_signed: bool
) -> None:
    _, (a, _) = nodes
    if not is_signed:  # as of a release that kept no fingerprint: the ledger alone can tell
        monkeypatch.setattr(running, "signed", lambda schema, spec: schema)
    run(source, a, tmp_path / "m1", monkeypatch)
    other = tmp_path / "other.safetensors"
    weights = {name: tensor * 0.5 for name, tensor in load_file(EMBEDDED_HEADS).items()}
    with safe_open(EMBEDDED_HEADS, "np") as file:
        save_file(weights, other, metadata=file.metadata())
    find = running.find_model

    def trained_anew(config: ModelConfig) -> ModelSpec:
        spec = find(config)
        assert spec.sparse is not None
        assert spec.multivector is not None
        return replace(spec, sparse=replace(spec.sparse, file=other), multivector=replace(spec.multivector, file=other))

    monkeypatch.setattr(running, "find_model", trained_anew)
    if is_signed:
        with pytest.raises(CollectionMismatch, match="hybridtei migrate c"):
            run(source, a, tmp_path / "m1", monkeypatch)
    else:
        assert run(source, a, tmp_path / "m1", monkeypatch).stats.documents == COUNT


def test_an_ingest_goes_on_across_a_failover(
    tmp_path: Path, source: Path, nodes: tuple[list[Node], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, second), (a, b) = nodes
    do, upserts = Node.do, []

    def dying(node: Node, call: str, *arguments: Any, **options: Any) -> Any:
        if node is first:
            upserts.extend([call] * (call == "upsert"))
            if len(upserts) > 2:
                raise Failure(503, "this node is gone")
        return do(node, call, *arguments, **options)

    monkeypatch.setattr(Node, "do", dying)
    summary = run(source, f"{a},{b}", tmp_path / "m1", monkeypatch)
    assert (summary.stats.documents, summary.outcome.points, summary.outcome.expected) == (COUNT, COUNT, COUNT)
    assert "upsert" in first.calls
    assert "upsert" in second.calls
    later = run(source, b, tmp_path / "m1", monkeypatch)
    assert (later.stats.documents, later.stats.skipped) == (0, COUNT)


@pytest.mark.parametrize("killed", ["", "marked", "named"])
def test_a_ledger_by_address_is_taken_over(
    tmp_path: Path, source: Path, nodes: tuple[list[Node], list[str]], monkeypatch: pytest.MonkeyPatch, killed: str
) -> None:
    """As of a release before: no digests, no ids. A kill may come between any two steps."""
    (first, second), (a, b) = nodes
    machine = tmp_path / "m1"
    run(source, a, machine, monkeypatch)
    (path,) = collection_state_folder().glob("*.jsonl")
    old = state_folder(StoreConfig(qdrant_url=a)) / "c.ledger.jsonl"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"".join(line for line in path.read_bytes().splitlines(keepends=True) if b'"c":' not in line))
    path.unlink()
    collection = first.local._client.collections["c"]
    for payload in collection.payload:
        payload.pop(DIGEST)
    for key in (COLLECTION_ID, LEDGER_MARK):
        collection.config.metadata.pop(key)

    def kill(*_: Any) -> None:
        raise KeyboardInterrupt

    if killed:
        with monkeypatch.context() as patch:
            patch.setattr(*((ServerStore, "annotate") if killed == "marked" else (Ledger, "move")), kill)
            with pytest.raises(KeyboardInterrupt):
                run(source, a, machine, patch)
    summary = run(source, f"{a},{b}", machine, monkeypatch)
    assert (summary.stats.documents, summary.stats.skipped) == (0, COUNT)
    assert not old.exists()
    assert "scroll" not in first.calls + second.calls
    monkeypatch.setenv("HYBRIDTEI_CACHE", str(machine))


async def test_a_version_that_is_there_in_part_is_done_again(tmp_path: Path) -> None:
    """A chunk is missing, one is of another version, a payload claims what its point is not."""
    text = "\n".join(f"The engine finds text {i} by words and meaning." for i in range(20))
    texts = {name: f"{text} {name}" for name in ("whole", "short", "mixed", "forged")}
    store, ingest = MemoryStore(), Ingest(tmp_path, chunk_tokens=32)
    await ingest.run(write(tmp_path / "in.jsonl", texts), store)
    before = len(await points(store))
    records = {(one.payload["document_id"], one.payload["chunk"]): one for one in await points(store, with_vectors=True)}
    await store.delete("small", [records["short", 2].id])
    changes = {("mixed", 1): {DIGEST: records["whole", 1].payload[DIGEST]}, ("forged", 1): {"chunk": 3}}
    for place, change in changes.items():
        one = records[place]
        await store.upsert("small", [one.model_copy(update={"payload": {**one.payload, **change}})])
    (tmp_path / "ledger.jsonl").unlink()
    outcome = await ingest.run(tmp_path / "in.jsonl", store)
    assert (ingest.stats.documents, ingest.stats.skipped) == (3, 1)
    assert outcome.points == outcome.expected == before


async def test_a_kill_while_the_ledger_is_made_again_leaves_none_that_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, ingest = MemoryStore(), Ingest(tmp_path)
    source = write(tmp_path / "in.jsonl", {f"d{i}": f"text {i}" for i in range(10)})
    await ingest.run(source, store)
    (tmp_path / "ledger.jsonl").unlink()

    def kill(*_: Any) -> None:
        raise ZeroDivisionError

    for place in ("add", "set_mark"):
        with monkeypatch.context() as patch:
            patch.setattr(Ledger, place, kill)
            with pytest.raises(ZeroDivisionError):
                await ingest.run(source, store)
    await ingest.run(source, store)
    assert (ingest.stats.documents, ingest.stats.skipped) == (0, 10)


async def test_a_server_that_keeps_no_metadata_has_its_ledger_by_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYBRIDTEI_CACHE", str(tmp_path))

    class Old(MemoryStore):
        async def annotate(self, name: str, metadata: Any) -> None:
            pass

    store, config = Old(), StoreConfig(qdrant_url="http://h")
    source = write(tmp_path / "in.jsonl", {"a": "text"})
    await Ingest(tmp_path).run(source, store)
    existing = await store.describe("small")
    assert existing is not None
    existing = type(existing)(existing.vectors, existing.sparse)
    monkeypatch.setattr(Old, "describe", lambda *_: asyncio.sleep(0, existing))
    for _ in range(2):
        ledger, _ = await open_ledger(config, store, "small", existing)
        assert ledger.path == state_folder(config) / "small.ledger.jsonl"
        assert ledger.mark is None
        ledger.close()


def test_a_large_run_leaves_the_threshold_as_it_was(
    tmp_path: Path, source: Path, nodes: tuple[list[Node], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, _), (a, _) = nodes
    first.status[:] = ["yellow", "green"]
    told: list[str] = []
    run(source, a, tmp_path, monkeypatch, defer_indexing_mb=0, tell=told.append)
    assert first.optimizers["c"]["indexing_threshold"] == 20_000
    assert THRESHOLD not in first.local.get_collection("c").config.metadata
    assert told[-1] == "indexed   0 vectors, the collection is green"


def test_a_collection_on_a_cluster_gets_copies(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node, told, plan = Node(peers=3), list[str](), CollectionPlan(shards=6, replicas=1)
    with serving_rest(node) as port:
        run(source, f"http://127.0.0.1:{port}", tmp_path, monkeypatch, plan=plan, tell=told.append)
    assert node.made["c"] == {"shard_number": 6, "replication_factor": 1}
    assert "cluster   3 nodes: 6 shards, 1 copies of each" in told
    node.local.close()


def test_a_server_alone_and_one_whose_rest_is_not_reached_get_one_copy(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for serving, scheme, says in ((serving_rest, "http", False), (serving_grpc, "grpc", True)):
        node, told = Node(), list[str]()
        with serving(node) as port:
            summary = run(source, f"{scheme}://127.0.0.1:{port}", tmp_path, monkeypatch, tell=told.append)
        assert summary.outcome.points == COUNT
        assert node.made["c"] == {}
        assert any(line.startswith("cluster   unknown") for line in told) == says
        node.local.close()
