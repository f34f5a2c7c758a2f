"""Collections of 0.1: their points have digests that are keyed by the settings, and their sources no paths.

`tests/data/collection-0.1.tar.xz` was made by commit c5404b2: `hybridtei ingest docs --collection old`.
"""

import tarfile
from pathlib import Path

import pytest

import hybridtei
from hybridtei.retrieval.ingest.options import Summary

DOCUMENTS, POINTS = 8, 11


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with `docs` and its collection in `qdrant`."""
    with tarfile.open(Path(__file__).parents[2] / "data" / "collection-0.1.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def again(source: str = "docs", **options: object) -> Summary:
    return hybridtei.ingest(source, "old", quiet=True, **options)


def test_nothing_is_embedded_or_deleted(old: Path) -> None:
    for _ in range(2):
        summary = again(delete_missing=True)
        assert (
            summary.stats.documents,
            summary.stats.unchanged,
            summary.stats.documents_deleted,
        ) == (0, DOCUMENTS, 0)
        assert (summary.status, summary.stats.points) == (0, POINTS)
    assert summary.stats.files == 0, "the second time no file is read"
    (old / "docs" / "note.txt").write_text("The display shows E42.")
    assert again().stats.documents == 1
    assert again().stats.unchanged == DOCUMENTS


def test_nothing_is_deleted_before_it_is_known_whose_it_is(old: Path) -> None:
    (old / "docs" / "note.txt").unlink()
    first = again(delete_missing=True)
    assert (first.stats.documents_missing, first.stats.documents_deleted, first.stats.points) == (
        1,
        0,
        POINTS,
    )
    assert "the next ingest deletes them" in first.in_words()
    assert again(delete_missing=True).stats.documents_deleted == 1
