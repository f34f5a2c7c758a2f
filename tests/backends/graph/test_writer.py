"""What we spell in bytes reads as the `onnx` package reads it."""

from __future__ import annotations

import numpy as np
import onnx
from hypothesis import given
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator

from hybridtei.backends.graph.writer import declarations, product_graph

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
