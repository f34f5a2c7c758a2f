"""Ingests as a whole: nothing lost, nothing twice, whatever happens on the way."""

import asyncio
import json
import signal
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest

from hybridtei.config import StoreConfig
from hybridtei.errors import BackendError, StoreUnavailable
from hybridtei.retrieval.ingest import prepare as preparing
from hybridtei.retrieval.ingest.chunking import (
    TEXT,
)
from hybridtei.retrieval.ingest.run import VECTORS
from hybridtei.retrieval.store.memory import MemoryStore
from hybridtei.retrieval.store.server import ServerStore
from tests.retrieval.ingest.small_ingest import (
    NAME,
    Ingest,
    ids_of,
    points,
    reasons,
    write,
    written,
)
from tests.retrieval.store.speaking import Failure, speaking
from tests.server.live import until

HANG = 60
ROOT = Path(__file__).parents[3]
SMALL_INGEST = [sys.executable, "-X", "faulthandler", "-m", "tests.retrieval.ingest.small_ingest"]


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(preparing, "BATCH_CHUNKS", 16)


@pytest.fixture
def source(tmp_path):
    return write(
        tmp_path / "texts.jsonl", {f"d{i}": f"text number {i} of words" for i in range(100)}
    )


async def test_every_document_is_a_point_with_what_the_encoder_gives(tmp_path, source):
    store = MemoryStore()
    ingest = Ingest(tmp_path)
    outcome = await ingest.run(source, store)
    assert (outcome.points, outcome.stopped) == (100, False)
    records = await points(store, with_vectors=True)
    assert ids_of(records) == Counter((f"d{i}", 0) for i in range(100))
    model, _ = written(tmp_path / "model")
    wanted = ingest.embedder(model).encode(
        [record.payload[TEXT] for record in records], VECTORS, input_type="document"
    )
    for row, record in enumerate(records):
        assert [*record.vector["sparse"]["indices"]] == wanted.sparse.row(row)[0].tolist()
        assert record.vector["dense"] == pytest.approx(wanted.dense[row].tolist(), abs=1e-5)
        assert len(record.vector["multivector"]) == len(wanted.multivector.row(row))
    assert (ingest.stats.documents, ingest.stats.chunks) == (100, 100)


async def test_an_engine_that_fails_at_everything_stops_the_ingest(tmp_path, source):
    def broken(batch):
        raise BackendError("the device is gone")

    store = MemoryStore()
    with pytest.raises(BackendError, match="the device is gone"):
        await Ingest(tmp_path, {"gate": broken}).run(source, store)
    assert reasons(tmp_path / "quarantine.jsonl") == []


@pytest.mark.parametrize("how", ["refuses", "hangs", "loses answers"])
async def test_what_was_acknowledged_stays_and_a_resume_adds_the_rest(tmp_path, source, how):
    ingest = Ingest(tmp_path)

    async def broken(qdrant):
        # from the first call on: one under way while the server breaks would keep others
        store = server_store(qdrant, patience=0.3, timeout=3)
        passes = []

        def spoil(batch):
            passes.append(1)
            if len(passes) == 5:
                # Something is acknowledged
                until(lambda: ingest.stats.documents > 0)
                if how == "hangs":
                    store._timeout_s = 0.5
                    qdrant.held.clear()
                elif how == "refuses":
                    qdrant.failures = [Failure(503, "going down")] * 1000
                else:
                    qdrant.lost = 1000

        ingest.backend = {"gate": spoil}
        with pytest.raises(StoreUnavailable, match=r"patience 0\.3 s"):
            await ingest.run(source, store)
        qdrant.held.set()
        qdrant.failures, qdrant.lost = [], 0
        await store.close()

    async def resumed(qdrant):
        acknowledged = ingest.stats.documents
        assert 0 < acknowledged < 100
        store = server_store(qdrant)
        there = await store.count(NAME)
        assert there >= acknowledged
        ingest.backend = {}
        outcome = await ingest.run(source, store)
        assert ingest.stats.unchanged == there
        assert outcome.points == 100
        assert ids_of(await points(store)) == Counter((f"d{i}", 0) for i in range(100))
        await store.close()

    with speaking() as qdrant:
        await broken(qdrant)
        await resumed(qdrant)


def server_store(qdrant, *, patience=30, timeout=30):
    url = qdrant.url("grpc")
    return ServerStore(
        StoreConfig(qdrant_url=url, qdrant_patience=patience, qdrant_timeout=timeout)
    )


@contextmanager
def held(command, texts):
    """A process that holds a pass once it has embedded `texts` texts, until a line comes in."""
    with subprocess.Popen(
        [*command, str(texts)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdout.readline() == b"standing still\n"
        yield process


def test_a_signal_ends_it_in_order(tmp_path):
    """The signal comes while a pass is held; what was embedded is stored, and the next run stores
    the rest."""
    source = write(
        tmp_path / "texts.jsonl", {f"d{i}": f"text number {i} of words" for i in range(500)}
    )
    command = [*SMALL_INGEST, str(source), str(tmp_path)]
    with held(command, 70) as process:
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(b"\n", timeout=HANG)
    assert process.returncode == 0
    stopped = json.loads(output)
    assert stopped["stopped"]
    assert 0 < stopped["points"] == stopped["documents"] < 500
    output = subprocess.check_output(command, cwd=ROOT, timeout=HANG)
    resumed = json.loads(output)
    assert (resumed["points"], resumed["stopped"]) == (500, False)
    assert resumed["unchanged"] == stopped["documents"]


async def test_the_encoder_does_not_wait_for_the_store(tmp_path, source):
    """While the first batch is written, later ones are embedded: the store lets go only when they
    are."""
    loop = asyncio.get_running_loop()
    later = asyncio.Event()
    passes = []

    def count(batch):
        passes.append(1)
        if len(passes) == 3:
            loop.call_soon_threadsafe(later.set)

    class Waiting(MemoryStore):
        async def upsert(self, name, points):
            async with asyncio.timeout(HANG):
                await later.wait()
            await super().upsert(name, points)

    outcome = await Ingest(tmp_path, {"gate": count}).run(source, Waiting())
    assert outcome.points == 100
