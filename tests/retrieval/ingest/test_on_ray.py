"""An ingest on a cluster of two: the same points as in one process, whatever dies on the way."""

import asyncio
import itertools
import json
import os
import random
import signal
from contextlib import nullcontext

import numpy as np
import pytest

from hybridtei import cli
from hybridtei.config import EngineConfig, ModelConfig
from hybridtei.errors import InvalidInput, LoadError
from hybridtei.retrieval import ray as on_ray
from hybridtei.retrieval.ingest.run import ingest
from hybridtei.retrieval.store.embedded import EmbeddedStore
from hybridtei.system import machine
from tests.retrieval.ingest.ray_processes import named
from tests.retrieval.ingest.small_ingest import points

ACTORS = "ray::Worker"
# So many short ones are seven batches: more than the actors have in hand when one is killed
TEXTS = 1600
CLOSE = 1e-5


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    draw, words = (
        random.Random(1),
        ("flow", "of", "air", "over", "a", "swept", "wing", "at", "high", "speed"),
    )
    folder = tmp_path_factory.mktemp("ray") / "source"
    folder.mkdir()
    rows = [
        {"_id": f"d{i}", "text": " ".join(draw.choices(words, k=3)), "year": i}
        for i in range(TEXTS)
    ]
    lines = [*map(json.dumps, rows), json.dumps(rows[0]), "{broken", '{"_id": "e", "text": " "}']
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "b.csv").write_text("id,title,text\n1,one,first\n2,two\n3,three,third\n")
    (folder / "c.md").write_text("# Wings\n\n" + "The flow over a wing. " * 200)
    return folder


@pytest.fixture(scope="module")
def alone(source, tmp_path_factory):
    """The points that one process makes from the source."""
    folder = tmp_path_factory.mktemp("alone")
    return ingested(source, folder, ray=False), folder


def end(summary):
    stats = summary.stats
    return stats.points, stats.documents_missing, stats.documents_deleted, stats.stopped


def ingested(source, folder, *, ray=True):
    engine = {"engine": "ray", "ray_workers": 2} if ray else {}
    return ingest(
        source,
        "c",
        store=folder / "qdrant",
        quarantine=str(folder / "quarantine.jsonl"),
        quiet=True,
        **engine,
    )


def stored(folder):
    async def read():
        store = EmbeddedStore(str(folder / "qdrant"))
        try:
            return {record.id: record for record in await points(store, "c", with_vectors=True)}
        finally:
            await store.close()

    return asyncio.run(read())


def quarantined(folder):
    return sorted((folder / "quarantine.jsonl").read_text().splitlines())


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, record in found.items():
        other = expected[name]
        # With its multi-vector
        assert record.payload == other.payload
        assert np.allclose(record.vector["dense"], other.vector["dense"], atol=CLOSE)
        ours, theirs = (
            dict(zip(one.vector["sparse"]["indices"], one.vector["sparse"]["values"], strict=True))
            for one in (record, other)
        )
        for index in ours.keys() | theirs.keys():
            assert ours.get(index, 0.0) == pytest.approx(theirs.get(index, 0.0), abs=CLOSE)


@pytest.fixture(scope="module")
def cluster():
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    leave = on_ray.join("local", 2)
    yield
    leave()


def meanwhile(monkeypatch, each):
    """Call `each` with the number of every batch, before it is embedded."""
    encode, numbers = on_ray.RayEmbedder.encode, itertools.count()

    def watched(self, *given, **options):
        each(next(numbers))
        return encode(self, *given, **options)

    monkeypatch.setattr(on_ray.RayEmbedder, "encode", watched)


@pytest.mark.slow
def test_a_killed_worker_costs_nothing(cluster, monkeypatch, tmp_path, source, alone):
    seen = {}
    killed = []

    def kill(number):
        seen.update(named(ACTORS))
        if number >= 2 and not killed:
            killed.append(min(seen))
            seen[killed[0]].kill()

    meanwhile(monkeypatch, kill)
    told, expected = ingested(source, tmp_path), alone[0]
    assert len(seen) > 2, "another took the place of the one that was killed"
    assert (told.stats.documents, told.stats.chunks, told.stats.tokens, told.stats.quarantined) == (
        expected.stats.documents,
        expected.stats.chunks,
        expected.stats.tokens,
        expected.stats.quarantined,
    )
    assert end(told) == end(expected)
    assert told.stats.documents == TEXTS + 3
    assert_same(stored(tmp_path), stored(alone[1]))
    assert quarantined(tmp_path) == quarantined(alone[1])

    again = ingested(source, tmp_path)
    assert (again.stats.documents, again.stats.unchanged, again.stats.files) == (0, TEXTS + 3, 2)
    assert end(again) == end(told)


@pytest.mark.slow
def test_stopped_and_gone_on_with(cluster, monkeypatch, tmp_path, source, alone):
    with monkeypatch.context() as patched:
        meanwhile(
            patched, lambda number: signal.raise_signal(signal.SIGTERM) if number == 3 else None
        )
        first = ingested(source, tmp_path)
    assert first.stats.stopped
    assert 0 < first.stats.points < alone[0].stats.points
    second = ingested(source, tmp_path)
    assert second.stats.documents + first.stats.documents == alone[0].stats.documents
    assert end(second) == end(alone[0])


DEADLY = "a text that ends the process"


class Mortal(on_ray.Worker):
    def encode(self, texts, *given):
        if DEADLY in texts:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode(texts, *given)


@pytest.mark.slow
def test_a_text_that_ends_each_process_is_quarantined_alone(cluster, monkeypatch, tmp_path):
    from ray import cloudpickle

    from tests.retrieval.ingest import test_on_ray

    # The actors do not have the tests
    cloudpickle.register_pickle_by_value(test_on_ray)
    monkeypatch.setattr(on_ray, "Worker", Mortal)
    folder = tmp_path / "source"
    folder.mkdir()
    for number, text in enumerate(["one", DEADLY, "three", "four"]):
        (folder / f"{number}.txt").write_text(text)
    told = ingested(folder, tmp_path)
    assert (told.stats.documents, told.stats.quarantined) == (3, 1)
    assert DEADLY in "".join(quarantined(tmp_path))


def test_what_cannot_be_is_told_before_a_cluster_is_started(monkeypatch):
    with pytest.raises(InvalidInput, match="--ray-workers is 0"):
        on_ray.RayEmbedder(ModelConfig(), EngineConfig(), workers=0)
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    with pytest.raises(LoadError, match=r"'hybridtei\[ray\]'"):
        on_ray.RayEmbedder(ModelConfig(), EngineConfig(), workers=2)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--ray-workers 2", "need --engine ray"),
        ("--engine ray --url http://127.0.0.1:1", "exclude each other"),
        ("--engine ray --ray-workers 0", "--ray-workers is 0"),
    ],
)
def test_the_flags(tmp_path, monkeypatch, capsys, words, why):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"text": "one"}\n')
    with pytest.raises(SystemExit) if "need" in why else nullcontext():
        assert cli.main(f"ingest in.jsonl --collection c {words}".split()) == 1
    assert why in capsys.readouterr().err
