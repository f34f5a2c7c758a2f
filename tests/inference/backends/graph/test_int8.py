"""Eight bits: close enough or refused with figures, blind to neighbours, made once for these
weights."""

import re

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from conformance.small import tiny, tolerances
from hybridtei.errors import LoadError
from hybridtei.inference.backends.base import made_up
from hybridtei.inference.backends.fidelity import Guard, compare
from hybridtei.inference.backends.graph import int8
from hybridtei.inference.backends.graph.int8 import int8_graph, make_int8
from hybridtei.inference.backends.graph.onnx_backend import OnnxBackend
from hybridtei.inference.backends.graph.ops import family_graph
from hybridtei.inference.backends.graph.writer import integer_product_graph
from hybridtei.models.checkpoint.spec import read_spec
from hybridtei.models.checkpoint.weights import Weights
from tests.near import same
from tests.sampled import sampled

# Random weights lose more
LOOSE = Guard(worst=0.9, mean=0.98) if tolerances.EXACT_INT8 else Guard(worst=0.8, mean=0.93)


# Tables, and what DeBERTa multiplies one of them by, once.
NO_MATRIX = re.compile(
    r"(embeddings|embed_tokens|shared|relative_attention_bias|pos_key_proj|pos_query_proj)\.weight$"
)

pytestmark = pytest.mark.usefixtures("cache")
# Each other form of a layer's products
INT8_FAMILIES = (
    *tiny.QUICK,
    "deberta-v2",
    "t5",
    "gemma3_text",
    "gte",
)


def parts(folder):
    return read_spec(folder, pooling="mean"), Weights.open(folder)


@pytest.mark.parametrize("model_type", sampled(INT8_FAMILIES, tiny.QUICK))
def test_a_model_keeps_its_vectors_with_the_matrices_of_all_layers_in_eight_bits(
    tmp_path, model_type
):
    """The quick run has those of `tiny.QUICK`."""
    spec, weights = parts(tiny.write_family(tmp_path, model_type, seed=1))
    graph = family_graph(spec)
    made, fidelity = make_int8(spec, weights, LOOSE)
    assert fidelity.passes(LOOSE)
    backend = OnnxBackend(spec, made, weights)
    assert backend.dtype == "int8"
    assert compare(OnnxBackend(spec, graph, weights), backend) == fidelity
    matrices = {
        name
        for name, shape in graph.weights.items()
        if len(shape) == 2 and not NO_MATRIX.search(name)
    }
    assert set(made.held) == matrices
    assert set(made.weights) == set(graph.weights) - matrices
    model = onnx.load_from_string(made.body)
    eight = [
        tensor for tensor in model.graph.initializer if tensor.data_type == onnx.TensorProto.INT8
    ]
    assert sorted(tuple(tensor.dims)[::-1] for tensor in eight) == sorted(
        graph.weights[name] for name in made.held
    )
    assert not [node for node in model.graph.node if set(node.input) & set(made.held)]


@pytest.mark.parametrize(
    ("labels", "task"), [(1, "SequenceClassification"), (5, "TokenClassification")]
)
def test_a_model_without_vectors_of_texts_is_judged_by_its_states(tmp_path, labels, task):
    folder = tiny.write_classifier(tmp_path, "bert", labels, task=task, seed=1)
    spec, weights = read_spec(folder), Weights.open(folder)
    made, fidelity = make_int8(spec, weights, LOOSE)
    assert fidelity.passes(LOOSE)
    batch = made_up(spec, [9], spec.heads)
    expected, found = (
        one.scores if labels == 1 else one.tags.values
        for one in (
            OnnxBackend(spec, graph, weights).forward(batch) for graph in (family_graph(spec), made)
        )
    )
    assert 0 < np.abs(found - expected).max() < 0.1 * max(1.0, float(np.abs(expected).max()))


def test_a_model_that_loses_too_much_is_refused_with_the_figures(bert):
    spec, weights = parts(bert)
    with pytest.raises(
        LoadError,
        match=rf"{bert}: int8 is too far.*0\.\d+ at worst, 0\.\d+ on average.*0\.99999 at worst",
    ):
        make_int8(spec, weights, Guard(worst=0.99999))


def test_a_graph_is_made_once_for_the_weights_it_is_made_of(bert, copied, cache, monkeypatch):
    made = []
    make = int8.make_int8

    def counted(spec, weights, guard):
        made.append(guard)
        return make(spec, weights, LOOSE)

    monkeypatch.setattr(int8, "make_int8", counted)
    first = int8_graph(*parts(bert))
    assert int8_graph(*parts(bert)) == first
    assert len(made) == len(list(cache.iterdir())) == 1
    other = tiny.change_each(copied(bert), lambda tensor: tensor * 1.01)
    assert int8_graph(*parts(other)) != first
    assert len(made) == len(list(cache.iterdir())) == 2


def test_products_of_the_largest_weights_are_exact_here():
    """Where pairs of products saturate at 16 bits, weights of 127 would give a sum that is too
    small."""
    session = ort.InferenceSession(integer_product_graph(), providers=["CPUExecutionProvider"])
    rows, matrix = np.full((4, 64), 255, np.uint8), np.full((64, 64), int8.max_weight(), np.int8)
    (product,) = session.run(None, {"rows": rows, "matrix": matrix})
    same(product, rows.astype(np.int32) @ matrix.astype(np.int32))
