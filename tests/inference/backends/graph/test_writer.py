"""Graphs in bytes are what the `onnx` package reads; as files they have the same bytes for the same
graph, whole or refused."""

from pathlib import Path

import numpy as np
import onnx
from hypothesis import given
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator

from hybridtei.inference.backends.graph.writer import (
    Graph,
    declarations,
    graphs_folder,
    made_once,
    product_graph,
)
from tests.near import same

NAMES = st.text(min_size=1, max_size=200)


@given(
    shapes=st.dictionaries(
        NAMES, st.lists(st.integers(0, 2**20), max_size=3).map(tuple), max_size=5
    )
)
def test_declarations_are_tensors_without_content(shapes):
    model = onnx.load_from_string(product_graph("rows", "matrix", "product") + declarations(shapes))
    assert [node.op_type for node in model.graph.node] == ["Gemm", "Identity"]
    assert {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer} == shapes
    for tensor in model.graph.initializer:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        assert tensor.data_location == onnx.TensorProto.EXTERNAL
        assert tensor.data_type == onnx.TensorProto.FLOAT
        assert entries == {
            "location": "checkpoint",
            "offset": "0",
            "length": str(4 * int(np.prod(tensor.dims, dtype=object))),
        }


def test_a_product_is_a_valid_model_of_a_product():
    matrix = np.arange(21, dtype=np.float32).reshape(7, 3)
    model = onnx.load_from_string(
        product_graph("rows", "matrix", "product") + declarations({"matrix": (7, 3)})
    )
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(matrix, "matrix"))
    onnx.checker.check_model(model, full_check=True)
    (product,) = ReferenceEvaluator(model).run(None, {"rows": matrix[:2]})
    same(product, matrix[:2] @ matrix.T)


GRAPH = Graph(b"onnx " * 200, {"embeddings.weight": (90, 32), "bias": (32,), "scale": ()})


# --- files


def never():
    raise AssertionError("it is kept")


@given(
    onnx=st.binary(max_size=2000),
    held=st.lists(st.text(), max_size=2).map(tuple),
    weights=st.dictionaries(
        st.text(), st.lists(st.integers(0, 2**40), max_size=4).map(tuple), max_size=5
    ),
    causal=st.booleans(),
)
def test_what_was_made_once_is_read(tmp_path_factory, onnx, held, weights, causal):
    path, graph = (
        tmp_path_factory.mktemp("kept") / "deep" / "graph",
        Graph(onnx, weights, held, causal=causal),
    )
    assert made_once(path, Graph, lambda: graph) is graph
    assert made_once(path, Graph, never) == graph
    # No part is left
    assert [*path.parent.iterdir()] == [path]


def test_a_graph_in_a_folder_that_others_may_write_to_is_not_read(tmp_path):
    other = Graph(b"other", {})
    made_once(tmp_path / "graph", Graph, lambda: GRAPH)
    tmp_path.chmod(0o777)
    assert made_once(tmp_path / "graph", Graph, lambda: other) is other


def test_a_file_that_is_damaged_or_cut_short_anywhere_is_made_again(tmp_path, caplog):
    path, other = tmp_path / "graph", Graph(b"other", {})
    made_once(path, Graph, lambda: GRAPH)
    whole = path.read_bytes()
    for place in range(len(whole)):
        for spoiled in (
            whole[:place],
            whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :],
        ):
            path.write_bytes(spoiled)
            assert made_once(path, Graph, lambda: other) is other
    assert caplog.text.count(f"{path}: damaged") == 2 * len(whole)


def test_what_is_of_another_kind_is_made_again(tmp_path, caplog):
    made_once(tmp_path / "graph", str, lambda: "text")
    assert made_once(tmp_path / "graph", Graph, lambda: GRAPH) is GRAPH
    assert "not readable" in caplog.text


def test_a_folder_in_its_place_costs_warnings(tmp_path, caplog):
    assert made_once(tmp_path, Graph, lambda: GRAPH) is GRAPH
    assert "cannot be kept" in caplog.text


# --- places


def test_the_cache_is_where_the_user_says(tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRIDTEI_CACHE", str(tmp_path / "own"))
    assert graphs_folder() == tmp_path / "own"
    monkeypatch.delenv("HYBRIDTEI_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert graphs_folder() == tmp_path / "xdg" / "hybridtei" / "graphs"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert graphs_folder() == Path.home() / ".cache" / "hybridtei" / "graphs"
