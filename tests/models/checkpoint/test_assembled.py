"""The embedded model's folder, put together in the cache: upstream's tensors bit for bit, or an
error that names the place."""

import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from hybridtei.errors import LoadError, MissingArtifact
from hybridtei.models.checkpoint import files
from hybridtei.models.checkpoint.files import INSTALL, WEIGHTS, assembled_model, embedded_model
from tests.models.upstream import SHA256, upstream_folder

# A buffer, and what nothing here uses
NOT_THERE = {
    "embeddings.position_ids",
    "pooler.dense.bias",
    "pooler.dense.weight",
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A cache for the whole module; what a test damages in it, it mends."""
    folder = tmp_path_factory.mktemp("cache")
    yield folder
    # pytest keeps folders of three runs, and this one is large
    shutil.rmtree(folder)


@pytest.fixture
def full(shared, monkeypatch):
    monkeypatch.setenv("HYBRIDTEI_CACHE", str(shared))
    return shared


def parts(folder):
    return list(folder.rglob("*.part"))


# --- what it holds


def test_every_tensor_is_upstreams_bit_for_bit(full):
    folder, upstream = assembled_model(), upstream_folder()
    assert embedded_model() == (folder, files.EMBEDDED_HEADS)
    assert files.sha256_of(upstream / WEIGHTS) == SHA256
    ours, theirs = load_file(folder / WEIGHTS), load_file(upstream / WEIGHTS)
    assert theirs.keys() - ours.keys() == NOT_THERE
    for name, tensor in ours.items():
        assert (tensor.dtype, tensor.shape) == (theirs[name].dtype, theirs[name].shape), name
        assert tensor.tobytes() == theirs[name].tobytes(), name
    assert parts(full) == []


def test_the_files_beside_it_are_upstreams(full):
    folder, upstream = assembled_model(), upstream_folder()
    for name in files._configuration():
        assert (folder / name).read_bytes() == (upstream / name).read_bytes(), name
    ours, theirs = (
        json.loads((each / "tokenizer.json").read_text()) for each in (folder, upstream)
    )
    # What a tokenizer does that does not say
    assert ours["truncation"].pop("direction") == "Right"
    assert ours == theirs


# --- later starts


def test_an_image_has_it_in_a_place_of_its_own_beside_an_empty_cache(full, tmp_path, monkeypatch):
    made = assembled_model()
    monkeypatch.setenv("HYBRIDTEI_EMBEDDED_MODEL", str(made.parent))
    monkeypatch.setenv("HYBRIDTEI_CACHE", str(tmp_path / "volume"))
    assert assembled_model() == made
    assert not list((tmp_path / "volume").glob("all-MiniLM*"))


def test_once_there_it_is_hashed_once_and_neither_written_nor_made_again(full, monkeypatch):
    written = {path: path.stat().st_mtime_ns for path in assembled_model().rglob("*")}
    for known in full.glob("sha256-*"):
        known.unlink()
    hashed = []
    digest = hashlib.file_digest
    monkeypatch.setattr(
        hashlib,
        "file_digest",
        lambda file, kind: hashed.append(Path(file.name).name) or digest(file, kind),
    )
    monkeypatch.setattr(files, "SOURCE_PACKAGE", "hybridtei_no_such_package")
    assert {path: path.stat().st_mtime_ns for path in assembled_model().rglob("*")} == written
    assert hashed == ["tokenizer.json", WEIGHTS]
    assembled_model()
    assert len(hashed) == 2


@pytest.mark.parametrize(
    ("name", "damage"),
    [(WEIGHTS, "changed"), ("tokenizer.json", "changed"), ("1_Pooling/config.json", "missing")],
)
def test_what_is_not_as_it_was_written_is_written_again(full, name, damage):
    file = assembled_model() / name
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    assert (assembled_model() / name).read_bytes() == content


@pytest.mark.slow
def test_processes_that_start_at_once_do_no_harm(cache):
    code = "from hybridtei.models.checkpoint.files import assembled_model; assembled_model()"
    starting = [
        subprocess.Popen([sys.executable, "-c", code], env={**os.environ}) for _ in range(3)
    ]
    assert [process.wait() for process in starting] == [0] * 3
    assert files._is_whole(assembled_model())
    assert parts(cache) == []
    shutil.rmtree(cache)


# --- what cannot be


def test_without_the_package_it_is_named(cache, monkeypatch):
    monkeypatch.setattr(files, "SOURCE_PACKAGE", "hybridtei_no_such_package")
    with pytest.raises(MissingArtifact, match=INSTALL):
        assembled_model()


@pytest.mark.parametrize("name", [files.DATA, files.TOKENIZER])
def test_a_package_with_something_else_in_it_is_refused(cache, tmp_path, monkeypatch, name):
    source = files._source()
    other = tmp_path / "other"
    (other / "onnx").mkdir(parents=True)
    for each in (files.DATA, files.TOKENIZER):
        (other / each).symlink_to(source / each)
    (other / name).unlink()
    (other / name).write_bytes(b"something else")
    monkeypatch.setattr(files, "_source", lambda: other)
    with pytest.raises(LoadError, match=f"{other / name}: sha256 .*{files.SOURCE_SHA256[name]}"):
        assembled_model()
    (other / name).unlink()
    with pytest.raises(MissingArtifact, match=str(other / name)):
        assembled_model()


def test_an_index_that_leads_elsewhere_is_refused(cache, tmp_path, monkeypatch):
    index = json.loads(files.INDEX.read_text())
    index["embeddings.LayerNorm.bias"][0] += 4
    (tmp_path / "tensors.json").write_text(json.dumps(index))
    monkeypatch.setattr(files, "INDEX", tmp_path / "tensors.json")
    with pytest.raises(LoadError, match=rf"{cache}.*model\.safetensors: has the sha256"):
        assembled_model()
    assert not list(cache.rglob(WEIGHTS + "*"))


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("HYBRIDTEI_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(LoadError, match=rf"{tmp_path}/file/cache/all-MiniLM.*HYBRIDTEI_CACHE"):
        assembled_model()


def test_a_cache_that_is_full_is_named_and_left_clean(cache):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Stands in for a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000_000, before[1]))
    try:
        with pytest.raises(LoadError, match=rf"{cache}.*HYBRIDTEI_CACHE"):
            assembled_model()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert parts(cache) == []
    assert not list(cache.rglob(WEIGHTS))


def test_a_hash_in_a_cache_that_others_may_write_to_is_not_believed(tmp_path, monkeypatch):
    """A file of the cache, and the entry that says that it is whole, may both be another user's."""
    cache, path = tmp_path / "cache", tmp_path / "weights"
    monkeypatch.setenv("HYBRIDTEI_CACHE", str(cache))
    path.write_bytes(b"poison")
    true = hashlib.sha256(b"poison").hexdigest()
    assert files.sha256_of(path) == true
    (entry,) = cache.iterdir()
    entry.write_text(entry.read_text().replace(true, "0" * 64))
    assert files.sha256_of(path) == "0" * 64
    for mode in (0o777, 0o775, 0o1777):
        cache.chmod(mode)
        assert files.sha256_of(path) == true
        entry.write_text(entry.read_text().replace(true, "0" * 64))
