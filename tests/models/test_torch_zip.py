"""torch's files are read like torch reads them; no pickle runs, and any other file is refused by
name."""

import io
import os
import pickle
import zipfile
from collections import OrderedDict
from contextlib import suppress

import pytest
import torch

from conformance.small import tiny
from hybridtei.errors import LoadError
from hybridtei.models import torch_zip
from hybridtei.models.checkpoint.weights import Weights
from tests.models.refused import refuses_weights
from tests.near import same

BASE = torch.arange(60, dtype=torch.float32).reshape(5, 12) / 7
STATE = {
    "plain": BASE,
    "view": BASE[1:3],
    "columns": BASE[:, 2:5],
    "transposed": BASE.T,
    "number": torch.tensor(2.5),
    "empty": torch.zeros(0, 4),
    "half": BASE.half(),
    "brain": BASE.bfloat16(),
    "double": BASE.double(),
    "parameter": torch.nn.Parameter(BASE * 2),
}


def saved(path, state, **settings):
    torch.save(state, path, **settings)
    return path


@pytest.fixture
def file(tmp_path):
    """A file of one tensor."""
    return saved(tmp_path / "pytorch_model.bin", {"a": BASE})


@pytest.mark.parametrize(("kind", "protocol"), [(dict, 2), (OrderedDict, 4)])
def test_every_tensor_is_torchs(tmp_path, kind, protocol):
    path = saved(tmp_path / "pytorch_model.bin", kind(STATE), pickle_protocol=protocol)
    weights = Weights.open(tmp_path)
    assert weights.names() == set(STATE)
    for name, tensor in STATE.items():
        expected = tensor.detach().float().numpy()
        assert weights.shape(name) == expected.shape
        same(weights.float32(name), expected)
        same(Weights.of_file(path).float32(name), expected)


def test_a_models_state_dict_with_its_versions_and_integers(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    saved(tmp_path / "pytorch_model.bin", module.state_dict())
    weights = Weights.open(tmp_path)
    same(weights.float32("0.weight"), module[0].weight.detach().numpy())
    assert "1.num_batches_tracked" in weights.names()
    with pytest.raises(LoadError, match=r"`1\.num_batches_tracked` is I64"):
        weights.float32("1.num_batches_tracked")


def test_float32_is_a_view_of_the_file(tmp_path):
    saved(tmp_path / "pytorch_model.bin", {"plain": BASE})
    assert not Weights.open(tmp_path).float32("plain").flags.owndata


def test_shards_are_read_together(tmp_path):
    names = {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}
    for number, (name, file) in enumerate(names.items()):
        saved(tmp_path / file, {name: BASE + number})
    tiny.write_json(tmp_path / "pytorch_model.bin.index.json", {"weight_map": names})
    weights = Weights.open(tmp_path)
    for number, name in enumerate(names):
        same(weights.float32(name), BASE.numpy() + number)


class _Runs:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("state", ["runs", "module", "number", "nested"])
def test_what_is_no_state_dict_is_refused_and_nothing_runs(tmp_path, state):
    made = tmp_path / "made"
    states = {
        "runs": {"a": _Runs(made)},
        "module": torch.nn.Linear(2, 2),
        "number": {"a": 3},
        "nested": {"state_dict": {"a": BASE}},
    }
    saved(tmp_path / "pytorch_model.bin", states[state])
    refuses_weights(tmp_path, str(tmp_path / "pytorch_model.bin"))
    assert not made.exists()


def test_a_bare_pickle_is_refused_by_what_it_is(tmp_path):
    saved(tmp_path / "pytorch_model.bin", {"a": BASE}, _use_new_zipfile_serialization=False)
    refuses_weights(tmp_path, r"was saved by torch before 1\.6.*as safetensors")


def rewritten(path, description, compress=zipfile.ZIP_STORED, member="data.pkl"):
    """Replace the description of a saved file, or another member, or compress it."""
    with zipfile.ZipFile(path) as archive:
        contents = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(path, "w", compress) as archive:
        for name, content in contents.items():
            archive.writestr(
                name, description if description and name.endswith(member) else content
            )


def test_compressed_storages_are_refused(tmp_path, file):
    rewritten(file, b"", zipfile.ZIP_DEFLATED)
    refuses_weights(tmp_path, "storage `0` is missing, compressed, or shorter than 240 bytes")


def described(shape, strides, offset=0, count=60):
    """A description as torch writes it, with these numbers."""

    class Tensor:
        def __reduce__(self):
            return torch._utils._rebuild_tensor_v2, (
                Storage(),
                offset,
                shape,
                strides,
                False,
                OrderedDict(),
            )

    class Storage:
        pass

    class Pickler(pickle._Pickler):
        def persistent_id(self, value):
            if isinstance(value, Storage):
                return "storage", torch.FloatStorage, "0", "cpu", count
            return None

    target = io.BytesIO()
    Pickler(target, protocol=2).dump({"a": Tensor()})
    return target.getvalue()


@pytest.mark.parametrize(
    ("shape", "strides", "offset", "count"),
    [
        ((61,), (1,), 0, 60),
        ((5, 12), (12, 2), 0, 60),
        ((5,), (1,), 56, 60),
        ((5,), (-1,), 10, 60),
        ((-5,), (1,), 0, 60),
        ((5,), (1,), -1, 60),
        ((5,), (1,), 0, 61),
        ((2**40, 2**40), (0, 1), 0, 60),
        ((2**40,), (0,), 0, 60),
    ],
)
def test_a_tensor_beyond_its_storage_is_refused(tmp_path, file, shape, strides, offset, count):
    rewritten(file, described((5, 12), (12, 1)))
    same(Weights.open(tmp_path).float32("a"), BASE.numpy())
    rewritten(file, described(shape, strides, offset, count))
    refuses_weights(tmp_path, str(file))


TEXT_A, NESTED, STORED = b"X\x01\0\0\0a", b")" + b"q\0h\0h\0\x86" * 12, b"\x80\x02}"


def test_a_byte_order_is_no_bomb(tmp_path, file):
    rewritten(file, bytes(10**6), zipfile.ZIP_DEFLATED, "byteorder")
    refuses_weights(tmp_path, "byteorder` takes more than 16 bytes")


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_member_is_unfolded_no_further_than_its_bound(tmp_path, file, method):
    """The directory says 8 bytes; a block of these methods unfolds at once."""
    rewritten(file, bytes(10**6), method, "byteorder")
    whole = file.read_bytes()
    file.write_bytes(whole.replace((10**6).to_bytes(4, "little"), (8).to_bytes(4, "little")))
    refuses_weights(tmp_path, "compressed by another method than deflate")


@pytest.mark.parametrize(
    ("description", "message"),
    [
        (
            STORED + NESTED + b"K\x01s.",
            "names something by a tuple",
            # Its hash would take 2^12 steps
        ),
        (STORED + b"(" + NESTED + b"K\x01u.", "names something by a tuple"),
        (STORED + TEXT_A + NESTED + b"\x93.", "names something by a tuple"),
        (
            STORED + b"r\xff\xff\xff\x7f" + b".",
            "keeps a value at place 2147483647, after 3 opcodes",
        ),
        (described((1,) * 65, (1,) * 65), "a tensor of 65 dimensions and 65 strides"),
        (STORED + b")" * 1001, "more than 1000 opcodes"),
    ],
)
def test_a_description_is_bounded_by_its_length(tmp_path, file, monkeypatch, description, message):
    monkeypatch.setattr(torch_zip, "MAX_OPCODES", 1000)
    rewritten(file, description)
    refuses_weights(tmp_path, message)


def test_a_damaged_file_is_refused_or_unharmed(tmp_path):
    path = saved(tmp_path / "pytorch_model.bin", {"a": BASE, "b": BASE[1:, 3:]})
    whole = path.read_bytes()
    for place in range(0, len(whole), 13):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        with suppress(LoadError):
            weights = Weights.open(tmp_path)
            assert all(weights.float32(name).nbytes < 10**6 for name in weights.names())
    for left in range(0, len(whole), 41):
        path.write_bytes(whole[:left])
        refuses_weights(tmp_path, str(path))
