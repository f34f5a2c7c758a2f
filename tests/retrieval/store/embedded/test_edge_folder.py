"""What the owner does between calls, asked directly. The engine is loaded in this process here, for a folder of its own."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridtei.retrieval.store.collection import schema_to_dict
from hybridtei.retrieval.store.embedded_folder import OPTIMIZE_AFTER, PAUSE_S, Folder
from tests.retrieval.store.stores import WIDTH, plan


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    opened = Folder(tmp_path)
    yield opened
    opened.close()


def points(count: int) -> list[Any]:
    rows = np.random.default_rng(0).normal(size=(count, WIDTH)).astype(np.float32)
    return [[i, {}, {"dense": rows[i]}, 0.0] for i in range(count)]


def is_untidy(folder: Folder) -> bool:
    return any(one.dirty or one.written >= OPTIMIZE_AFTER for one in folder._open.values())


def test_housekeeping_comes_to_an_end_and_begins_again_after_writes(folder: Folder) -> None:
    assert not is_untidy(folder)
    folder.create("c", schema_to_dict(plan()))
    folder.upsert("c", points(OPTIMIZE_AFTER))
    for _ in range(3):  # flushed at the first, and left to be optimised when it is quieter
        folder.tidy(optimizing=False)
        assert is_untidy(folder)
    folder.tidy(optimizing=True)
    assert not is_untidy(folder)
    folder.upsert("c", points(1))
    assert is_untidy(folder)
    folder.tidy(optimizing=True)
    assert not is_untidy(folder)


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process may grow beyond a kilobyte."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_during_housekeeping_harms_nothing(folder: Folder) -> None:
    folder.create("c", schema_to_dict(plan()))
    folder.upsert("c", points(OPTIMIZE_AFTER))
    with full_disk():
        folder.tidy(optimizing=True)
        folder.tidy(optimizing=True)
    assert is_untidy(folder)
    assert folder.count("c", None) == OPTIMIZE_AFTER


def test_housekeeping_that_failed_is_tried_again_later_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = 0.0
    folder = Folder(tmp_path, clock=lambda: now_s)
    folder.create("c", schema_to_dict(plan()))
    folder.upsert("c", points(OPTIMIZE_AFTER))
    collection = folder._open["c"]
    with full_disk():
        for _ in range(3):
            folder.tidy(optimizing=True)
            assert collection.resume_s == now_s + PAUSE_S
            folder.tidy(optimizing=True)  # too early: nothing is tried
            now_s = collection.resume_s
    (told,) = caplog.messages
    assert "is retried later" in told
    while is_untidy(folder):
        folder.tidy(optimizing=True)
    assert (collection.resume_s, collection.written, collection.dirty) == (0, 0, False)
    folder.close()


def test_leftovers_of_a_crash_are_swept(tmp_path: Path) -> None:
    for name in (".new-1", ".old-1"):
        (tmp_path / name / "shard").mkdir(parents=True)
    (tmp_path / "stray").mkdir()
    folder = Folder(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["stray"]
    assert folder.collections() == []
    folder.close()


def test_an_uneven_sparse_vector_never_reaches_the_engine(folder: Folder) -> None:
    folder.create("c", schema_to_dict(plan()))
    for bad in ({"indices": [1, 2], "values": [1.0]}, {"indices": [1, 1], "values": [1.0, 2.0]}):
        with pytest.raises(ValueError, match="a sparse vector"):
            folder.upsert("c", [[1, {}, {"sparse": bad}, 0.0]])
        with pytest.raises(ValueError, match="a sparse vector"):
            folder.query("c", {"vector": bad, "using": "sparse", "limit": 1})
    folder.upsert("c", points(1))
    assert folder.count("c", None) == 1
