"""A collection of 0.1: an ingest into it is refused, and the message says how the collection is
made anew.

`tests/data/collection-0.1.tar.xz` was made by commit c5404b2: `hybridtei ingest docs --collection
old`.
"""

import tarfile
from pathlib import Path

import pytest

import hybridtei
from hybridtei.errors import CollectionMismatch


@pytest.fixture
def old(tmp_path, monkeypatch):
    """The working folder, with `docs` and its collection in `qdrant`."""
    with tarfile.open(Path(__file__).parents[2] / "data" / "collection-0.1.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("options", [{}, {"dry_run": True}, {"delete_missing": True}])
def test_an_ingest_of_its_source_is_refused_with_the_remedy(old, options):
    before = hybridtei.ingest("docs/note.txt", "other", quiet=True).stats.points
    with pytest.raises(CollectionMismatch, match=r"0\.1 stored docs/.*collections delete old"):
        hybridtei.ingest("docs", "old", quiet=True, **options)
    assert hybridtei.ingest("docs", "other", quiet=True).stats.points > before
