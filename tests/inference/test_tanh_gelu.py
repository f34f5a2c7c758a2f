"""TEI's GELU on request: as if the checkpoint had asked for the tanh form itself."""

import shutil

import numpy as np
import pytest

from conformance.small import tiny, tolerances
from hybridtei import Encoder
from hybridtei.config import ModelConfig
from hybridtei.errors import LoadError
from hybridtei.inference.backends.graph.onnx_export import export_model
from hybridtei.inference.load import find_model
from tests.near import near

TEXTS = ["the boundary layer on a flat plate", "a query", "wing " * 20]
BACKENDS = ["ort", "openvino", "torch"]


def twin(folder, key):
    """The same checkpoint, whose configuration asks for the tanh form."""
    other = folder.with_name(f"{folder.name}-tanh")
    shutil.copytree(folder, other)
    tiny.configured(other, **{key: "gelu_pytorch_tanh"})
    return other


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a shape whose graph ships."""
    return tiny.write_bert(
        tmp_path_factory.mktemp("gelu") / "small", **tiny.SHIPPED, hidden_act="gelu"
    )


@pytest.fixture(scope="module")
def expected(folder):
    return (
        Encoder.load(twin(folder, "hidden_act"), backend="torch")
        .encode(TEXTS, normalize=False)
        .dense
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_computes_what_a_checkpoint_of_that_form_gives(folder, expected, backend):
    exact, ours = (
        Encoder.load(folder, backend=backend, gelu=gelu).encode(TEXTS, normalize=False).dense
        for gelu in ("checkpoint", "tanh")
    )
    # Ten tolerances: or this would show nothing
    assert np.abs(exact - expected).max() > 1e-4
    near(ours, expected, tolerances.HIDDEN["float32"])


def test_the_head_of_a_splade_model_follows(tmp_path):
    folder = tiny.write_family(tmp_path / "splade", "distilbert", task="ForMaskedLM")
    ours, expected = (
        Encoder.load(each, pooling="splade", backend="torch", **options)
        .encode(TEXTS, ["sparse"])
        .sparse
        for each, options in ((folder, {"gelu": "tanh"}), (twin(folder, "activation"), {}))
    )
    near(ours.to_dense(), expected.to_dense(), tolerances.WEIGHTS["float32"])


def test_the_head_of_a_classifier_follows(tmp_path):
    folder = tiny.write_classifier(tmp_path / "ranker", "modernbert", labels=1)
    other = tiny.configured(
        twin(folder, "hidden_activation"), classifier_activation="gelu_pytorch_tanh"
    )
    expected = Encoder.load(other, backend="torch").rerank("a query", TEXTS, raw_scores=True)
    ours = Encoder.load(folder, backend="torch", gelu="tanh").rerank(
        "a query", TEXTS, raw_scores=True
    )
    near([r.score for r in ours], [r.score for r in expected], 1e-5)


def export(folder, out, **options):
    export_model(find_model(ModelConfig(model_id=str(folder), **options)), out, "float32")


def test_a_checkpoints_own_graph_cannot_follow(tmp_path):
    folder = tiny.write_bert(tmp_path / "m")
    out = tmp_path / "exported"
    export(folder, out)
    with pytest.raises(LoadError, match="--gelu tanh needs the checkpoint's weights"):
        Encoder.load(out, backend="ort", gelu="tanh")


def test_an_export_can_follow(tmp_path):
    folder = tiny.write_bert(tmp_path / "m")
    for gelu in ("tanh", "checkpoint"):
        export(folder, tmp_path / gelu, gelu=gelu)
        ours = Encoder.load(tmp_path / gelu, backend="ort").encode(TEXTS).dense
        expected = Encoder.load(folder, backend="torch", gelu=gelu).encode(TEXTS).dense
        near(ours, expected, 1e-5)
