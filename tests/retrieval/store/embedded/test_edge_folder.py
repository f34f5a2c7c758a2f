"""What the owner does between calls, asked directly. The engine is loaded in this process here, for
a folder of its own."""

import json
import resource
import shutil
from contextlib import contextmanager

import numpy as np
import pytest

from hybridtei.errors import FolderReplaced, StoreError, UnsafeFile
from hybridtei.retrieval.store import embedded_folder
from hybridtei.retrieval.store.collection import schema_to_dict
from hybridtei.retrieval.store.embedded_folder import (
    FLUSH_BYTES,
    FLUSH_S,
    OPTIMIZE_AFTER,
    PAUSE_S,
    Folder,
)
from tests.retrieval.store.stores import WIDTH, plan


@pytest.fixture
def folder(tmp_path):
    opened = Folder(tmp_path)
    yield opened
    opened.close()


def points(count):
    rows = np.random.default_rng(0).normal(size=(count, WIDTH)).astype(np.float32)
    return [[i, {}, {"dense": rows[i]}, 0.0] for i in range(count)]


def fill(folder, count):
    folder.create("c", schema_to_dict(plan()))
    folder.upsert("c", points(count))


def is_untidy(folder):
    return any(one.dirty or one.written >= OPTIMIZE_AFTER for one in folder._open.values())


def test_housekeeping_comes_to_an_end_and_begins_again_after_writes(folder):
    assert not is_untidy(folder)
    fill(folder, OPTIMIZE_AFTER)
    # Flushed at the first, and left to be optimised when it is quieter
    for _ in range(3):
        folder.tidy(optimizing=False)
        assert is_untidy(folder)
    folder.tidy(optimizing=True)
    assert not is_untidy(folder)
    folder.upsert("c", points(1))
    assert is_untidy(folder)
    folder.tidy(optimizing=True)
    assert not is_untidy(folder)


@contextmanager
def full_disk():
    """No file of this process may grow beyond a kilobyte."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_during_housekeeping_harms_nothing(folder):
    fill(folder, OPTIMIZE_AFTER)
    with full_disk():
        folder.tidy(optimizing=True)
        folder.tidy(optimizing=True)
    assert is_untidy(folder)
    assert folder.count("c", None) == OPTIMIZE_AFTER


def test_housekeeping_that_failed_is_tried_again_later_and_logged_once(tmp_path, caplog):
    now_s = 0.0
    folder = Folder(tmp_path, clock=lambda: now_s)
    fill(folder, OPTIMIZE_AFTER)
    collection = folder._open["c"]
    with full_disk():
        for _ in range(3):
            folder.tidy(optimizing=True)
            assert collection.resume_s == now_s + PAUSE_S
            # Too early: nothing is tried
            folder.tidy(optimizing=True)
            now_s = collection.resume_s
    (told,) = caplog.messages
    assert "is retried later" in told
    while is_untidy(folder):
        folder.tidy(optimizing=True)
    assert (collection.resume_s, collection.written, collection.dirty) == (0, 0, False)
    folder.close()


def test_leftovers_of_a_crash_are_swept(tmp_path):
    for name in (".new-1", ".old-1"):
        (tmp_path / name / "shard").mkdir(parents=True)
    (tmp_path / "stray").mkdir()
    folder = Folder(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["stray"]
    assert folder.collections() == []
    folder.close()


def test_an_uneven_sparse_vector_never_reaches_the_engine(folder):
    folder.create("c", schema_to_dict(plan()))
    for bad in ({"indices": [1, 2], "values": [1.0]}, {"indices": [1, 1], "values": [1.0, 2.0]}):
        with pytest.raises(ValueError, match="a sparse vector"):
            folder.upsert("c", [[1, {}, {"sparse": bad}, 0.0]])
        with pytest.raises(ValueError, match="a sparse vector"):
            folder.query("c", {"vector": bad, "using": "sparse", "limit": 1})
    folder.upsert("c", points(1))
    assert folder.count("c", None) == 1


def test_traffic_does_not_put_off_a_flush_for_ever(tmp_path):
    """A crash then replays at most `FLUSH_S` or `FLUSH_BYTES` of writes."""
    now_s = 0.0
    folder = Folder(tmp_path, clock=lambda: now_s)
    fill(folder, 1)
    collection = folder._open["c"]
    assert not folder.tidy(optimizing=False, is_idle=False)
    now_s += FLUSH_S
    assert folder.tidy(optimizing=False, is_idle=False)
    assert not collection.dirty
    large = [[1, {"text": "x" * FLUSH_BYTES}, {}, 0.0]]
    folder.upsert("c", large)
    assert folder.tidy(optimizing=False, is_idle=False)
    assert not collection.dirty
    assert not folder.tidy(optimizing=False, is_idle=False)
    folder.close()


def test_points_that_are_written_again_and_again_are_merged_under_traffic(folder):
    folder.create("c", schema_to_dict(plan()))
    for turn in range(OPTIMIZE_AFTER // 100 + 1):
        folder.upsert("c", points(100))
        assert folder._open["c"].is_worn == (turn == OPTIMIZE_AFTER // 100)
    while folder.tidy(optimizing=False, is_idle=False):
        pass
    assert folder._open["c"].written == 0
    assert folder.count("c", None) == 100


def test_new_points_are_not_merged_under_traffic(folder):
    """An optimization of a growing collection would hold up its ingest again and again."""
    fill(folder, 3 * OPTIMIZE_AFTER)
    assert not folder._open["c"].is_worn


def test_a_folder_that_was_replaced_is_neither_read_nor_written(tmp_path):
    folder = Folder(tmp_path)
    fill(folder, 10)
    shutil.rmtree(tmp_path / "c")
    for call in (
        lambda: folder.upsert("c", points(10)),
        lambda: folder.count("c", None),
        lambda: folder.drop("c"),
        lambda: folder.tidy(optimizing=True),
        folder.flush,
        folder.close,
    ):
        with pytest.raises(FolderReplaced, match="was deleted or replaced while it was in use"):
            call()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["layout.json", "shard", "shard/wal", "shard/edge_config.json"])
@pytest.mark.parametrize("kind", ["symbolic", "hard"])
def test_a_link_in_a_collection_is_not_followed(tmp_path, name, kind):
    """A collection of an unpacked archive, whose links lead to files of this user."""
    folder = Folder(tmp_path / "store")
    (tmp_path / "store").mkdir()
    folder.create("c", schema_to_dict(plan()))
    folder.create("d", schema_to_dict(plan()))
    path, victim = tmp_path / "store/c" / name, tmp_path / "victim"
    path.rename(victim)
    if kind == "symbolic" or victim.is_dir():
        path.symlink_to(victim)
    else:
        path.hardlink_to(victim)
    with pytest.raises(UnsafeFile, match=r"is a link|has several names"):
        folder.upsert("c", points(1))
    assert "d" in folder.collections()
    assert folder.count("d", None) == 0
    folder.drop("c")
    assert victim.exists()
    folder.close()


@pytest.mark.parametrize("target", ["../other/c", "/etc", ".ingest"])
def test_an_alias_leads_to_no_place_outside_the_folder(tmp_path, target):
    folder = Folder(tmp_path)
    (tmp_path / "c").mkdir()
    (tmp_path / "c/layout.json").write_text(json.dumps({"alias_of": target}))
    with pytest.raises(StoreError, match="is damaged"):
        folder.count("c", None)


def test_a_link_in_place_of_a_new_layout_is_not_written_to(folder, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("the only copy")
    folder.create("c", schema_to_dict(plan()))
    (folder.path / "c/layout.json.new").symlink_to(victim)
    folder.annotate("c", {"key": "value"})
    assert folder.describe("c")["metadata"]["key"] == "value"
    assert victim.read_text() == "the only copy"


def test_a_collection_that_cannot_be_made_leaves_nothing(folder, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(embedded_folder.os, "rename", fail)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(OSError, match="no space left"):
        folder.create("c", schema_to_dict(plan()))
    assert sorted(tmp_path.iterdir()) == before


def test_a_list_is_stored_and_asked_as_an_array(folder):
    fill(folder, 10)
    row = np.random.default_rng(0).normal(size=WIDTH).astype(np.float32)
    folder.upsert("c", [[10, {}, {"dense": row.tolist()}, 0.0]])
    asked = {"using": "dense", "limit": 3}
    by_list, by_array = (
        folder.query("c", {**asked, "vector": vector}) for vector in (row.tolist(), row)
    )
    assert len(by_list) == 3
    assert by_list == by_array
