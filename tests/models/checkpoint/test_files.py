"""Where files are found: a folder, or the hub's cache without the hub."""

import os

import pytest

from conformance.small import tiny
from hybridtei.config import ModelConfig
from hybridtei.encoder import Encoder
from hybridtei.errors import LoadError, MissingArtifact
from hybridtei.models.checkpoint.files import inside, read_object, require, resolve

COMMITS = {"main": "a" * 40, "v2": "b" * 40}
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A hub cache with two revisions of org/name, laid out as the hub's client does: blobs, and
    links to them."""
    root = tmp_path_factory.mktemp("cache")
    repository = root / "models--org--name"
    for seed, (name, commit) in enumerate(COMMITS.items()):
        source = tiny.write_bert(tmp_path_factory.mktemp("source"), seed=seed)
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / name).write_text(commit)
        for path in (path for path in source.rglob("*") if path.is_file()):
            relative = path.relative_to(source)
            blob = repository / "blobs" / f"{seed}-{str(relative).replace('/', '-')}"
            link = repository / "snapshots" / commit / relative
            blob.parent.mkdir(exist_ok=True)
            link.parent.mkdir(parents=True, exist_ok=True)
            path.rename(blob)
            link.symlink_to(blob)
    return root


def load(cache, revision=None):
    config = ModelConfig(
        model_id="org/name", revision=revision, huggingface_hub_cache=str(cache), offline=True
    )
    return Encoder.load(config=config)


def test_a_cached_model_loads_without_the_hub_at_each_revision(cache):
    first, second = load(cache), load(cache, "v2")
    assert first.spec.folder.name == COMMITS["main"]
    assert second.spec.folder.name == COMMITS["v2"]
    one, other = (encoder.encode(["baka bulo"]).dense for encoder in (first, second))
    # Other weights, not only another name
    assert abs(one - other).max() > 0.01
    by_commit = load(cache, COMMITS["v2"]).encode(["baka bulo"]).dense
    assert (by_commit == other).all()


@pytest.mark.parametrize(
    ("model_id", "revision"), [("org/other", None), ("org/name", "v3"), ("org/name", "c" * 40)]
)
def test_what_is_not_cached_is_missing_and_named(cache, model_id, revision):
    with pytest.raises(MissingArtifact, match=model_id):
        resolve(model_id, revision=revision, cache=str(cache), offline=True)


@pytest.mark.parametrize(
    "model_id",
    ["not a valid id", "a/b/c", "org/", "../up", "~nobody/x"],
)
def test_a_name_that_is_neither_folder_nor_id_is_missing(tmp_path, model_id):
    with pytest.raises(MissingArtifact):
        resolve(model_id, cache=str(tmp_path), offline=True)


def test_a_folder_whose_name_is_not_utf8_is_refused_at_the_start(tmp_path):
    name = os.fsencode(tmp_path) + b"/m\xff"
    os.mkdir(name)
    with pytest.raises(MissingArtifact, match="not UTF-8"):
        resolve(os.fsdecode(name))


def test_a_folder_goes_before_the_hub(tmp_path, monkeypatch):
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name").samefile(tmp_path / "org" / "name")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/org/name").samefile(tmp_path / "org" / "name")


def test_an_optional_file_may_be_absent_but_not_broken(tmp_path):
    path = tmp_path / "x.json"
    assert read_object(path, optional=True) == {}
    with pytest.raises(MissingArtifact, match=r"x\.json"):
        read_object(path)
    for content in ("", "{", "[1, 2]"):
        path.write_text(content)
        with pytest.raises(LoadError, match=r"x\.json"):
            read_object(path, optional=True)


@pytest.mark.parametrize(
    ("content", "reason"), [("", "empty"), (POINTER, "git lfs pull"), (None, "missing")]
)
def test_a_file_must_have_content_of_its_own(tmp_path, content, reason):
    path = tmp_path / "model.safetensors"
    if content is not None:
        path.write_text(content)
    with pytest.raises(MissingArtifact, match=rf"model\.safetensors.*{reason}"):
        require(path)


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(MissingArtifact):
        require(tmp_path)


@pytest.mark.parametrize("relative", ["..", "a/../../b", "/etc/passwd"])
def test_paths_stay_inside(tmp_path, relative):
    with pytest.raises(LoadError, match="leads out"):
        inside(tmp_path, relative)


@pytest.mark.parametrize("relative", ["", "1_Pooling", "a/b..c"])
def test_paths_inside_are_taken(tmp_path, relative):
    assert inside(tmp_path, relative) == tmp_path / relative


def test_the_path_of_a_file_is_refused_with_the_cure(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(MissingArtifact, match=r"config\.json: a file; give the folder"):
        resolve(str(tmp_path / "config.json"))
