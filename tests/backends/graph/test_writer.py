"""Graphs in bytes are what the `onnx` package reads; as files they have the same bytes for the same graph, whole or refused."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator

from hybridtei.backends.graph.writer import Graph, declarations, graphs_folder, product_graph
from hybridtei.errors import LoadError

NAMES = st.text(min_size=1, max_size=200)


@given(shapes=st.dictionaries(NAMES, st.lists(st.integers(0, 2**20), max_size=3).map(tuple), max_size=5))
def test_declarations_are_tensors_without_content(shapes: dict[str, tuple[int, ...]]) -> None:
    model = onnx.load_from_string(product_graph("rows", "matrix", "product") + declarations(shapes))
    assert [node.op_type for node in model.graph.node] == ["Gemm", "Identity"]
    assert {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer} == shapes
    for tensor in model.graph.initializer:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        assert tensor.data_location == onnx.TensorProto.EXTERNAL
        assert tensor.data_type == onnx.TensorProto.FLOAT
        assert entries == {"location": "checkpoint", "offset": "0", "length": str(4 * int(np.prod(tensor.dims, dtype=object)))}


def test_a_product_is_a_valid_model_of_a_product() -> None:
    matrix = np.arange(21, dtype=np.float32).reshape(7, 3)
    model = onnx.load_from_string(product_graph("rows", "matrix", "product") + declarations({"matrix": (7, 3)}))
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(matrix, "matrix"))
    onnx.checker.check_model(model, full_check=True)
    (product,) = ReferenceEvaluator(model).run(None, {"rows": matrix[:2]})
    np.testing.assert_array_equal(product, matrix[:2] @ matrix.T)


GRAPH = Graph(b"onnx " * 200, {"embeddings.weight": (90, 32), "bias": (32,), "scale": ()})


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HYBRIDTEI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# --- files -------------------------------------------------------------------------------------------------------------


@given(
    onnx=st.binary(max_size=2000),
    held=st.lists(st.text(), max_size=2).map(tuple),
    weights=st.dictionaries(st.text(), st.lists(st.integers(0, 2**40), max_size=4).map(tuple), max_size=5),
)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, onnx: bytes, held: tuple[str, ...], weights: dict[str, tuple[int, ...]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "round-trip.zip"
    Graph(onnx, weights, held).write(path)
    assert Graph.read(path) == Graph(onnx, weights, held)


def test_the_same_graph_is_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    GRAPH.write(tmp_path / "one.zip")
    monkeypatch.setattr("time.time", lambda: 2e9)
    GRAPH.write(tmp_path / "deep" / "er" / "two.zip")
    GRAPH.write(tmp_path / "one.zip")  # over the old one
    assert (tmp_path / "one.zip").read_bytes() == (tmp_path / "deep" / "er" / "two.zip").read_bytes()
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == ["one.zip", "two.zip"]  # no part is left


def write_zip(path: Path, **members: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name.replace("_", "."), data)


@pytest.mark.parametrize("member", ["graph_onnx", "weights_json"])
def test_a_file_that_lacks_a_member_is_refused_by_name(tmp_path: Path, member: str) -> None:
    members = {"graph_onnx": b"onnx", "weights_json": b'{"weights": {}}'}
    del members[member]
    write_zip(tmp_path / "g.zip", **members)
    with pytest.raises(LoadError, match=rf"{tmp_path}/g\.zip.*{member.replace('_', '.')}"):
        Graph.read(tmp_path / "g.zip")


@pytest.mark.parametrize(
    "weights",
    [
        b"",
        b"not json",
        b"[]",
        b"null",
        b"{}",
        b"\xff",
        *(b'{"weights": {"a": %s}}' % shape for shape in (b"3", b'"12"', b"[1.5]", b"null")),
        b'{"weights": {}, "held": 3}',
    ],
)
def test_weights_that_are_no_names_and_shapes_are_refused(tmp_path: Path, weights: bytes) -> None:
    write_zip(tmp_path / "g.zip", graph_onnx=b"onnx", weights_json=weights)
    with pytest.raises(LoadError, match=rf"{tmp_path}/g\.zip: not a readable graph"):
        Graph.read(tmp_path / "g.zip")


def test_a_file_cut_short_is_refused_wherever_it_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "g.zip"
    GRAPH.write(path)
    whole = path.read_bytes()
    for left in range(len(whole)):
        path.write_bytes(whole[:left])
        with pytest.raises(LoadError, match=r"g\.zip"):
            Graph.read(path)


def test_a_damaged_file_is_refused_or_unharmed(tmp_path: Path) -> None:
    """Whatever byte is wrong: some make zlib fail, some the archive's directory, some are not read."""
    path = tmp_path / "g.zip"
    GRAPH.write(path)
    whole = path.read_bytes()
    refused = list[str]()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            assert Graph.read(path) == GRAPH
        except LoadError as error:
            refused.append(str(error))
    assert len(refused) > len(whole) / 2
    assert all(str(path) in message for message in refused)


def test_a_file_that_is_not_there_or_a_folder_is_refused_by_name(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.zip", tmp_path):
        with pytest.raises(LoadError, match=str(path)):
            Graph.read(path)


# --- places ------------------------------------------------------------------------------------------------------------


def test_the_cache_is_where_the_user_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDTEI_CACHE", str(tmp_path / "own"))
    assert graphs_folder() == tmp_path / "own"
    monkeypatch.delenv("HYBRIDTEI_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert graphs_folder() == tmp_path / "xdg" / "hybridtei" / "graphs"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert graphs_folder() == Path.home() / ".cache" / "hybridtei" / "graphs"
