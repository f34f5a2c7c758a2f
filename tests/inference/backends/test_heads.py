"""The functions that numpy and torch each have for heads, against one another."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import special

from conformance.small import tiny, tolerances
from hybridtei.batch import Head, offsets_of, pack
from hybridtei.inference.backends import heads, numpy_functions
from hybridtei.inference.backends.graph.host import HostHeads
from hybridtei.inference.backends.heads import Segments
from hybridtei.inference.backends.numpy_functions import NUMPY
from hybridtei.inference.backends.torch.backend import TorchBackend
from hybridtei.inference.backends.torch.load import to_tensors
from hybridtei.inference.backends.torch.ops import TORCH
from hybridtei.models.checkpoint import layers, modules
from hybridtei.models.checkpoint.classifiers import CodeLayers, LinearLayer, NormLayer
from hybridtei.models.checkpoint.spec import read_spec
from tests.inference.backends.outputs import random_encodings
from tests.near import near, same
from tests.sampled import paired

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=8)
SIZES = (1, 5, 40, 2, 17)
EXTREMES = [0.0, -0.0, 1e-8, -1e-8, 20.0, -20.0, 88.0, -88.0, 90.0, -90.0, 1e4, -1e4, 1e30, -1e30]


def rows(lengths, width=tiny.HIDDEN, seed=0):
    draw, offsets = np.random.default_rng(seed), offsets_of(list(lengths))
    return draw.normal(size=(sum(lengths), width)).astype(np.float32), Segments(offsets, offsets)


def in_torch(value):
    if isinstance(value, Segments):
        return Segments(value.cu_seqlens, torch.from_numpy(value.offsets))
    return to_tensors(value, torch.float32, torch.device("cpu"))


def agree(formula, *values):
    """What a formula gives in numpy, and in torch as nearly."""
    ours, theirs = formula(NUMPY, *values), formula(TORCH, *map(in_torch, values))
    assert ours.dtype == np.float32
    near(ours, theirs.numpy(), tolerances.WEIGHTS["float32"])
    return np.asarray(ours)


def layer(outputs, inputs, activation="identity", *, bias=True, seed=0):
    draw = np.random.default_rng(seed)
    weight = draw.normal(scale=0.3, size=(outputs, inputs)).astype(np.float32)
    return LinearLayer(
        weight, draw.normal(size=outputs).astype(np.float32) if bias else None, activation
    )


# --- one for each name


def test_every_activation_has_a_twin_in_both():
    assert set(NUMPY.activations) == set(TORCH.activations) == set(layers.ACTIVATIONS)


# In the last place of float32, from the value in float64
UNITS = {"erf": 0.6, "sigmoid": 4}


@pytest.mark.parametrize("name", UNITS)
def test_functions_of_scipy_are_as_exact_here(name):
    x = np.float32(
        [
            *np.linspace(-87, 87, 20_001),
            *np.linspace(-5, 5, 20_001),
            *np.logspace(-37, 2, 2001),
            *EXTREMES,
        ]
    )
    expected = {"erf": special.erf, "sigmoid": special.expit}[name](x.astype(np.float64))
    ours = getattr(numpy_functions, name)(x)
    assert ours.dtype == np.float32
    units = np.abs(ours - expected) / np.spacing(
        np.maximum(np.abs(expected), 2.0**-126).astype(np.float32)
    )
    assert units.max() <= UNITS[name]
    assert np.isnan(getattr(numpy_functions, name)(np.float32([np.nan]))).all()


def test_every_pooling_has_a_formula():
    assert set(heads.POOLINGS) == set(modules.POOLINGS)


@pytest.mark.parametrize("name", layers.ACTIVATIONS)
@given(values=st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=30))
def test_activations_agree(name, values):
    x = np.array(values, dtype=np.float32)
    ours, theirs = NUMPY.activations[name](x), TORCH.activations[name](torch.from_numpy(x))
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, theirs.numpy(), atol=tolerances.WEIGHTS["float32"], rtol=1e-6)


@pytest.mark.parametrize("name", layers.ACTIVATIONS)
def test_activations_agree_and_warn_of_nothing_at_extremes(name):
    x = np.array(EXTREMES, dtype=np.float32)
    theirs = TORCH.activations[name](torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(
        NUMPY.activations[name](x), theirs, atol=tolerances.WEIGHTS["float32"], rtol=1e-6
    )


@pytest.mark.parametrize("mode", modules.POOLINGS)
@given(lengths=LENGTHS, seed=st.integers(0, 9))
def test_poolings_agree(mode, lengths, seed):
    agree(heads.pooled, *rows(lengths, 5, seed), (mode,))


@pytest.mark.parametrize("mode", modules.POOLINGS)
def test_long_texts_are_pooled_as_well(mode):
    hidden, at = rows([3000, 1, 8192], 4)
    ours = heads.pooled(NUMPY, hidden + 1, at, [mode])
    exact = heads.POOLINGS[mode](
        replace(NUMPY, float32=lambda x: x), (hidden + 1).astype(np.float64), at
    )
    np.testing.assert_allclose(ours, exact, rtol=tolerances.WEIGHTS["float32"], atol=0)


# --- heads


@given(values=st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=30))
def test_rounding_agrees(values):
    """To one where a tangent is half a step from two numbers, and the libraries' last digits
    differ."""
    x = np.array(values, dtype=np.float32)
    ours, theirs = heads.rounded(NUMPY, x), heads.rounded(TORCH, torch.from_numpy(x)).numpy()
    assert ours.dtype == theirs.dtype == np.float32
    exact = 127 * np.tanh(x.astype(np.float64))
    for one in (ours, theirs):
        assert np.abs(one - exact).max() <= 0.5 + 1e-4
        same(one, np.round(one))


@pytest.mark.parametrize("scale", [1e-4, 1, 50])
def test_layer_norm_agrees(scale):
    words = rows(SIZES)[0] * np.float32(scale) + np.float32(3 * scale)
    plain = agree(lambda f, x: f.layer_norm(x, None, None, 1e-5), words)
    scaled = agree(lambda f, x: f.layer_norm(x, 2 + 0 * x[0], 1 + 0 * x[0], 1e-5), words)
    near(scaled, 2 * plain + 1, 1e-6)


@pytest.mark.parametrize("activation", [None, *layers.ACTIVATIONS])
def test_lexical_agrees(activation):
    inputs, _ = rows(SIZES)
    first, last = (
        layer(8, tiny.HIDDEN, activation or "identity"),
        layer(1, 8 if activation else tiny.HIDDEN, seed=1),
    )
    ours = agree(heads.lexical, inputs, None, ("hidden",), (first, last) if activation else (last,))
    assert (ours >= 0).all()
    assert (ours > 0).any()


@pytest.mark.parametrize("eps", [None, 1e-5])
def test_codes_agree(eps):
    latents = layer(30, tiny.HIDDEN)
    found = agree(heads.code, rows(SIZES)[0], CodeLayers(latents.weight, latents.bias, 4, eps))
    assert ((found > 0).sum(1) <= 4).all()
    assert (found > 0).any()


def test_no_head_writes_into_its_input():
    hidden, at = rows(SIZES)
    before = hidden.copy()
    for mode in modules.POOLINGS:
        heads.dense(NUMPY, hidden, at, [mode], [layer(3, tiny.HIDDEN, "relu")])
    for name in layers.ACTIVATIONS:
        NUMPY.activations[name](hidden)
    ones = np.ones(tiny.HIDDEN, dtype=np.float32)
    heads.through(NUMPY, hidden, [NormLayer(ones, ones, 1e-5)])
    same(hidden, before)


CLASSIFIERS = {
    "bert": {},
    "distilbert": {},
    "deberta-v2": {},
    "modernbert": {"classifier_pooling": "mean", "classifier_bias": True, "norm_bias": True},
    "eurobert": {"classifier_pooling": "late"},
    "qwen3": {},
}


@pytest.mark.parametrize(
    ("model_type", "task"),
    paired([*CLASSIFIERS], ["SequenceClassification", "TokenClassification"]),
)
def test_classifiers_agree(tmp_path, model_type, task):
    folder = tiny.write_classifier(tmp_path, model_type, 3, task=task, **CLASSIFIERS[model_type])
    spec = read_spec(folder)
    texts = random_encodings(spec, (3, 40, 1, 17))
    batch = pack(texts, spec.heads | {Head.TOKENS}, spec.positions)
    theirs = TorchBackend(spec).forward(batch)
    ours = HostHeads(spec).outputs(batch, theirs.tokens.values)
    if spec.role == "tagger":
        near(ours.tags.values, theirs.tags.values, 1e-5)
    else:
        near(ours.scores, theirs.scores, 1e-5)
