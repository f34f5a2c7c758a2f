"""int8 on OpenVINO: near float32 or refused with figures, blind to neighbours, judged once for
these weights."""

import logging
import re
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("openvino", reason="OpenVINO is not installed")

from conformance.small import tiny
from conformance.small.vocabulary import LONGEST
from hybridtei.batch import Head
from hybridtei.config import ModelConfig
from hybridtei.errors import LoadError
from hybridtei.inference.backends.fidelity import Fidelity, Guard, compare, sample_vectors
from hybridtei.inference.backends.graph import openvino_int8
from hybridtei.inference.backends.graph.int8 import quantized
from hybridtei.inference.backends.graph.openvino_backend import OpenVinoBackend
from hybridtei.inference.backends.graph.openvino_int8 import (
    BY_TOKEN,
    GAIN,
    GROUPS,
    SAFEST,
    divisors,
    group_of,
    int8_form,
    open_bfloat16,
    smoothing,
)
from hybridtei.inference.backends.graph.openvino_model import Int8Form, declared, shared_inputs
from hybridtei.inference.backends.graph.ops import family_graph
from hybridtei.inference.backends.select import open_backend
from hybridtei.inference.load import find_model
from hybridtei.models.checkpoint.spec import read_spec
from hybridtei.models.checkpoint.weights import Weights
from tests.inference.backends.graph.test_int8 import LOOSE, NO_MATRIX, parts
from tests.inference.backends.outputs import run, sixty_four
from tests.near import near
from tests.sampled import paired

pytestmark = pytest.mark.usefixtures("cache")
CLOSE, FAR = Fidelity(0.999, 0.9999, 0.99), Fidelity(0.98, 0.999, 0.99)


def in_form(spec, form=Int8Form(16)):  # noqa: B008
    return OpenVinoBackend(
        spec, family_graph(spec), Weights.open(spec.folder), dtype="int8", int8=form, threads=2
    )


def unit(backend, texts):
    """Unit vectors float32[n, d]."""
    dense = run(backend, texts, frozenset({Head.DENSE})).dense
    return dense / np.linalg.norm(dense, axis=1, keepdims=True)


def alone(backend, texts):
    return np.concatenate([unit(backend, [text]) for text in texts])


def threaded(spec):
    """In float32, in one team of two threads, as `in_form` is."""
    return OpenVinoBackend(spec, family_graph(spec), Weights.open(spec.folder), threads=2)


@given(
    st.integers(1, 5),
    st.integers(1, 4),
    st.sampled_from([1, 16, 48]),
    st.floats(1e-6, 1e6),
    st.integers(0, 99),
)
def test_each_number_is_within_half_a_step(rows, groups, group, size, seed):
    matrix = np.random.default_rng(seed).normal(size=(rows, groups * group)).astype(
        np.float32
    ) * np.float32(size)
    found = quantized(matrix, group)
    assert found.values.shape == (rows, groups, group)
    assert found.scale.shape == (rows, groups, 1)
    assert np.abs(found.values).max(2).min() == 127
    assert (
        np.abs(found.float32() - matrix)
        <= np.repeat(found.scale[..., 0], group, axis=1) * np.float32(0.5001)
    ).all()


def test_a_group_of_zeros_stays_one():
    assert not quantized(np.zeros((2, 32), np.float32), 16).float32().any()


@pytest.mark.parametrize("model_type", tiny.QUICK)
def test_a_model_keeps_its_vectors_with_the_matrices_of_all_layers_in_eight_bits(
    tmp_path, model_type
):
    """Every family in int8 on ONNX Runtime: test_int8.py; every kind of attention here:
    test_engine_laws.py."""
    spec, _ = parts(tiny.write_family(tmp_path, model_type, seed=1))
    graph, backend = family_graph(spec), in_form(spec)
    assert backend.dtype == "int8"
    found = compare(threaded(spec), backend)
    assert found.passes(LOOSE)
    assert found.worst < 1
    matrices = [
        name
        for name, shape in graph.weights.items()
        if len(shape) == 2 and not NO_MATRIX.search(name)
    ]
    ops = [op.rt_info for op in backend._models._express._model.get_runtime_model().get_ops()]
    products = [
        op["runtimePrecision"].astype(str)
        for op in ops
        if op["layerType"].astype(str) == "FullyConnected"
    ]
    assert products == ["i8"] * len(matrices)
    shared = [
        names
        for _, names in shared_inputs(
            declared(openvino_int8.ov.Core(), graph, LONGEST), graph.matrices
        )
    ]
    # Each has one input
    assert sorted(name for names in shared for name in names) == sorted(graph.matrices)


def test_a_matrix_that_also_multiplies_a_table_is_served(tmp_path):
    """DeBERTa v3 projects the embeddings of distances by the matrices of queries and keys."""
    shared = {"share_att_key": True, "norm_rel_ebd": "layer_norm"}
    spec, _ = parts(tiny.write_family(tmp_path, "deberta-v2", **shared))
    assert compare(threaded(spec), in_form(spec)).passes(LOOSE)


def test_neighbours_and_their_order_change_next_to_nothing(hybrid):
    """Only what float32 sums in another order may round otherwise; one scale for a batch would show
    at once."""
    backend = in_form(read_spec(hybrid))
    texts = sixty_four(backend.spec.vocab_size)
    expected = alone(backend, texts)
    assert (unit(backend, texts) * expected).sum(1).min() > 0.9999
    assert (unit(backend, texts[::-1])[::-1] * expected).sum(1).min() > 0.9999


@pytest.mark.parametrize(
    ("instructions", "group"),
    [
        ("avx2 avx512_vnni avx_vnni amx_int8", BY_TOKEN),
        ("avx2 avx_vnni avx512_vnni", 128),
        ("avx2 avx_vnni", SAFEST),
        ("asimddp i8mm", SAFEST),
        ("", SAFEST),
    ],
)
def test_the_form_is_that_of_the_first_instruction_that_the_processor_has(instructions, group):
    assert group_of(instructions.split()) == group
    assert min(size for size in GROUPS.values() if size != BY_TOKEN) == SAFEST


@pytest.mark.parametrize(("group", "lines"), [(BY_TOKEN, 1), (128, 0)])
def test_int8_on_amx_names_bfloat16(bert, group, lines, monkeypatch, caplog):
    monkeypatch.setattr(openvino_int8, "group_of", lambda _: group)
    monkeypatch.setattr(openvino_int8, "judged", lambda *_: CLOSE)
    # Without bfloat16
    with suppress(LoadError):
        openvino_int8.open_int8(*parts(bert), bulk_niceness=0).close()
    assert sum("--dtype bfloat16" in record.getMessage() for record in caplog.records) == lines


@pytest.mark.parametrize(
    ("bad", "group"),
    paired(
        [
            FAR,
            Fidelity(0.999, 0.9999, 0.96),
            Fidelity(float("nan"), 1, 1),
            Fidelity(1, 1, float("nan")),
        ],
        [BY_TOKEN, 128],
    ),
)
def test_a_model_that_loses_too_much_is_refused_with_all_figures(
    bert, cache, bad, group, monkeypatch
):
    monkeypatch.setattr(openvino_int8, "group_of", lambda _: group)
    monkeypatch.setattr(openvino_int8, "judged", lambda *_: bad)
    form = "whole tokens" if group == BY_TOKEN else f"groups of {group}"
    figures = re.escape(f"{bad}; asked for: 0.997 at worst, 0.997 on average, 97% of neighbours")
    with pytest.raises(
        LoadError, match=rf"{bert}: int8 on OpenVINO in {form} is too far from float32.*: {figures}"
    ):
        int8_form(*parts(bert))
    assert not cache.exists()


def test_whole_tokens_are_of_the_products_that_make_more_numbers_than_they_take(bert, monkeypatch):
    spec, weights = parts(bert)
    graph = family_graph(spec)
    every, wide = (divisors(spec, graph, weights, gain=gain) for gain in (0, GAIN))
    assert set(every) == set(graph.matrices)
    assert set(wide) == {name for name in every if re.search("query|key|value", name)}
    monkeypatch.setattr(openvino_int8, "judged", lambda *_: CLOSE)
    for group, found in ((64, every), (BY_TOKEN, wide)):
        monkeypatch.setattr(openvino_int8, "group_of", lambda _, group=group: group)
        form = int8_form(spec, weights)
        assert form.group == group
        assert set(form.divisors or ()) == set(found)


def test_channels_of_outliers_are_divided_and_their_columns_multiplied():
    """Rounding loses less of a product whose input has one large channel."""
    draw = np.random.default_rng(0)
    x, matrix = (draw.normal(size=size).astype(np.float32) for size in ((50, 64), (32, 64)))
    x[:, 3] *= 100
    divisor = smoothing(np.abs(x).max(0), np.abs(matrix).max(0))
    assert np.isclose(np.log(divisor).mean(), 0, atol=1e-5)
    assert divisor.argmax() == 3
    exact = x @ matrix.T
    errors = []
    for size in (None, divisor):
        rounded = quantized(x if size is None else x / size, 64).float32()
        eight = quantized(matrix, 64, divisor=size)
        errors.append(
            np.abs(
                rounded @ (eight.float32() if size is None else eight.float32() * size).T - exact
            ).mean()
        )
    assert errors[1] < errors[0] / 2


def test_whole_tokens_keep_their_vectors_whoever_their_neighbours_are(bert):
    spec, _ = parts(bert)
    try:
        backend = in_form(spec, Int8Form(BY_TOKEN))
    except LoadError as error:
        # No bfloat16
        pytest.skip(str(error))
    found = compare(threaded(spec), backend)
    assert found.passes(LOOSE)
    assert found.worst < 1
    texts = sixty_four(spec.vocab_size)
    assert (unit(backend, texts) * alone(backend, texts)).sum(1).min() > 0.999


def test_a_form_is_judged_once_for_the_weights_it_is_made_of(bert, copied, cache, monkeypatch):
    asked = []

    def judge(spec, *_):
        asked.append(spec.folder)
        return CLOSE

    monkeypatch.setattr(openvino_int8, "judged", judge)
    first, again = (int8_form(*parts(bert)) for _ in range(2))
    assert first.group == again.group
    assert list(first.divisors) == list(again.divisors)
    assert all(
        np.array_equal(first.divisors[name], again.divisors[name]) for name in first.divisors
    )
    other = tiny.change_each(copied(bert), lambda tensor: tensor * 1.01)
    int8_form(*parts(other))
    assert asked == [bert, other]
    # A guard of one's own is asked again
    with pytest.raises(LoadError, match="too far"):
        int8_form(*parts(bert), Guard(worst=1.1))
    for kept in cache.iterdir():
        kept.write_text("{}")
    int8_form(*parts(bert))
    assert asked == [bert, other, bert, bert]


def test_what_passed_another_guard_is_not_kept(bert, cache, monkeypatch):
    monkeypatch.setattr(openvino_int8, "judged", lambda *_: FAR)
    int8_form(*parts(bert), LOOSE)
    assert not cache.exists()
    with pytest.raises(LoadError, match="too far"):
        int8_form(*parts(bert))


def test_a_model_that_openvino_refuses_in_int8_runs_on_onnx_runtime(bert, caplog, monkeypatch):
    monkeypatch.setattr(openvino_int8, "judged", lambda *_: FAR)
    # Random weights
    monkeypatch.setattr("hybridtei.inference.backends.graph.int8.Guard", lambda: LOOSE)
    monkeypatch.setattr("hybridtei.inference.backends.select._sums_exactly", lambda: True)
    with caplog.at_level(logging.WARNING):
        backend = open_backend(ModelConfig(model_id=str(bert), dtype="int8"), read_spec(bert))
    assert (backend.name, backend.dtype) == ("ort", "int8")
    assert "openvino cannot run this model, the next is tried" in caplog.text


@pytest.mark.usefixtures("cache")
def test_bfloat16_that_is_far_from_float32_is_refused_with_figures(bert, monkeypatch):
    """Where the processor lacks bfloat16, one that is near is refused for that."""
    with monkeypatch.context() as patch:
        patch.setattr(openvino_int8, "judged", lambda *_: FAR)
        with pytest.raises(LoadError, match=r"bfloat16 .* too far .* 0\.9800 at worst"):
            open_bfloat16(*parts(bert), bulk_niceness=0)
    monkeypatch.setattr(openvino_int8, "judged", lambda *_: CLOSE)
    # Without bfloat16
    with suppress(LoadError):
        assert open_bfloat16(*parts(bert), bulk_niceness=0).dtype == "bfloat16"


def test_a_long_text_is_judged_beyond_what_bfloat16_counts(bert):
    spec = replace(read_spec(bert), max_input_length=100)
    backend = threaded(spec)
    short, longer = sample_vectors(backend), sample_vectors(backend, with_long=True)
    near(longer[:-1], short, 1e-6)
    assert len(longer) == len(short) + 1


@pytest.mark.slow
def test_the_embedded_model_passes_the_guard():
    spec = find_model(ModelConfig())
    assert int8_form(spec, Weights.open(spec.folder)).divisors
