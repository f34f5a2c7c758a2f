"""A hint for bfloat16 reaches every number of a graph, so none may come from a position, a distance
or an index.

Where the processor has bfloat16, `test_engine_laws` holds OpenVINO's own to transformers. Here all
numbers are rounded by `rounded`, which runs everywhere.
"""

import numpy as np
import pytest

pytest.importorskip("openvino", reason="OpenVINO is not installed")

from conformance.families.oracle import open_engine
from conformance.small import tiny, tolerances
from hybridtei.batch import Encoding
from hybridtei.errors import BackendError
from hybridtei.inference.backends.graph import openvino_backend
from hybridtei.models.checkpoint.spec import read_spec
from tests.inference.backends.graph.rounded import round_all
from tests.inference.backends.outputs import states
from tests.inference.backends.test_engine_laws import MODELS, POSITIONS, family

LONG = 600
FAMILIES = {
    **MODELS,
    **{
        name: family(name)
        for name in ("qwen3", "llama", "gemma", "eurobert", "gte", "jina_embeddings_v3")
    },
}


@pytest.fixture
def rounds(monkeypatch):
    """Opens a model with every number rounded to bfloat16."""
    plain = openvino_backend.model_of

    def open_rounded(spec):
        with monkeypatch.context() as patch:

            def rounded(*values, **options):
                model = plain(*values, **options)
                round_all(model)
                return model

            patch.setattr(openvino_backend, "model_of", rounded)
            return open_engine("openvino", spec)

    return open_rounded


def hidden(backend, ids):
    return states(backend, [Encoding(ids)]).values


def cosines(ours, theirs):
    lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    return (ours * theirs).sum(1) / lengths


@pytest.mark.parametrize("name", FAMILIES)
def test_a_long_text_is_as_near_to_float32_as_a_short_one(rounds, tmp_path, name):
    spec = read_spec(FAMILIES[name](tmp_path / "model"), pooling="mean")
    ids = np.random.default_rng(0).integers(5, spec.vocab_size, LONG)
    exact, rounded = open_engine("openvino", spec), rounds(spec)
    for length in (40, LONG):
        ours, theirs = hidden(rounded, ids[:length]), hidden(exact, ids[:length])
        assert (ours != theirs).any()
        assert cosines(ours, theirs).min() >= tolerances.ROUNDED_TOKEN
        means = ours.mean(0, keepdims=True), theirs.mean(0, keepdims=True)
        assert cosines(*means).min() >= tolerances.ROUNDED_VECTOR


def test_heads_that_look_at_positions_alone_keep_them(rounds, tmp_path):
    """Queries and keys are one constant, so a rounded position is a token at another place."""
    folder = family("qwen2")(tmp_path / "model")

    def constant(tensors):
        for name, tensor in tensors.items():
            if ".q_proj." in name or ".k_proj." in name:
                tensors[name] = tensor * 0 + (1.6 if name.endswith("bias") else 0)
        return tensors

    spec = read_spec(tiny.change(folder, constant), pooling="lasttoken")
    ids = np.random.default_rng(0).integers(5, spec.vocab_size, LONG)
    near = cosines(hidden(rounds(spec), ids), hidden(open_engine("openvino", spec), ids))
    assert near.min() >= tolerances.ROUNDED_TOKEN


def test_a_position_outside_the_table_is_refused(tmp_path):
    spec = read_spec(family("modernbert")(tmp_path / "model"), pooling="mean")
    backend = open_engine("openvino", spec)
    with pytest.raises(BackendError, match=f"positions from 0 to {POSITIONS}, in a table"):
        hidden(backend, np.full(POSITIONS + 1, 5))
    assert np.isfinite(hidden(backend, np.full(9, 5))).all()
