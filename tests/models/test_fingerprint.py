"""The changes that change a fingerprint, and the places that show it."""

import shutil
import time
from pathlib import Path

import httpx
import pytest

from conformance.small import tiny
from hybridtei.models.checkpoint.files import embedded_model
from hybridtei.models.checkpoint.layers import with_tanh_gelu
from hybridtei.models.checkpoint.spec import read_spec
from hybridtei.models.fingerprint import begin, fingerprint
from tests.server.live import commanded


def test_each_part_follows_from_what_it_names(tmp_path):
    folder = tiny.write_bert(tmp_path)
    spec = read_spec(folder)
    first = fingerprint(spec, dtype="float32")
    assert fingerprint(read_spec(folder), dtype="float32") == first

    def changed(**others):
        now = {**fingerprint(read_spec(folder), dtype="float32"), **others}
        return {name for name in first if now[name] != first[name]}

    assert changed(**fingerprint(spec, dtype="int8")) == {"id", "dtype"}
    other = fingerprint(with_tanh_gelu(spec), dtype="float32")
    assert changed(**other) == {"id", "model", "activation"}
    other = fingerprint(read_spec(folder, pooling="cls"), dtype="float32")
    assert changed(**other) == {"id", "model", "pooling"}
    assert changed(**fingerprint(spec, dtype="float32", default_prompt="query: ")) == {"id"}
    tiny.change_each(folder, lambda tensor: tensor + 1)
    assert changed() == {"id", "model", "weights"}
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")
    assert changed() == {"id", "model", "weights", "tokenizer"}


def test_a_server_shows_it_in_info_a_header_and_ollamas_digest(tmp_path):
    folder = tiny.write_bert(tmp_path)
    with commanded("--model-id", str(folder)) as url, httpx.Client(base_url=url) as client:
        until = time.monotonic() + 30
        while (shown := client.get("/info").json()["hybridtei"]["fingerprint"]) is None:
            assert time.monotonic() < until
        own = client.post("/embed_hybrid", json={"inputs": "bake", "outputs": ["dense"]})
        assert own.headers["x-hybridtei-fingerprint"] == shown["id"]
        assert (
            "x-hybridtei-fingerprint" not in client.post("/embed", json={"inputs": "bake"}).headers
        )
        # Other vectors are another digest there; the digest of the same name and files stays
        digests = [client.get("/api/tags").json()["models"][0]["digest"] for _ in range(2)]
        assert digests[0] == digests[1] != shown["id"]
    assert shown == fingerprint(read_spec(folder), dtype=shown["dtype"])


def test_a_folder_that_is_gone_has_none(tmp_path):
    spec = read_spec(tiny.write_bert(tmp_path))
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    assert fingerprint(spec)["weights"] is None
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "nothing")
    with pytest.raises(OSError, match=r"No such file"):
        fingerprint(spec)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "model.safetensors"])
@pytest.mark.parametrize("change", ["cut", "gone", "other"])
def test_files_that_change_after_the_load_give_none(tmp_path, name, change):
    """The vectors are those of the loaded files: a search goes on, without a comparison of
    fingerprints."""
    folder = tiny.write_bert(tmp_path)
    spec, file = read_spec(folder), folder / name
    if change == "gone":
        file.unlink()
    elif change == "cut":
        file.write_bytes(file.read_bytes()[:20])
    else:
        file.write_bytes(file.read_bytes() + b"\n")
    assert begin(Owner(), spec).result(timeout=30) is None
    assert spec.tokenizer_sha256 is not None


class Owner:
    """What a fingerprint is kept for."""


def test_where_the_folders_lie_does_not_count(tmp_path):
    """The embedded model's weights are in the cache folder, its heads in the package: either path
    may sort first."""
    folder, heads = embedded_model()
    model = shutil.copytree(folder, tmp_path / "m")
    found = {fingerprint(read_spec(folder, heads_file=heads))["id"]}
    for name in ("a", "z"):
        (tmp_path / name).mkdir()
        copy = Path(shutil.copy(heads, tmp_path / name))
        found.add(fingerprint(read_spec(model, heads_file=copy))["id"])
    assert len(found) == 1
