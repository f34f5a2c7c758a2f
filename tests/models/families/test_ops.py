"""Adapters against transformers' native class with merged weights, alone and among neighbours of
other adapters."""

from dataclasses import replace

import numpy as np
import onnx
import pytest

from conformance.families.oracle import ENGINES, HIDDEN_TOLERANCE, reference, texts_of
from conformance.small import tiny
from hybridtei.errors import UnsupportedArchitecture
from hybridtei.inference.backends.fidelity import Guard
from hybridtei.inference.backends.graph.int8 import make_int8
from hybridtei.inference.backends.graph.ops import family_graph
from hybridtei.models.checkpoint.spec import read_spec
from hybridtei.models.checkpoint.weights import Weights
from tests import jina
from tests.inference.backends.outputs import states
from tests.models.families.test_families import is_valid, opened
from tests.near import near

NUMBERS = range(len(jina.ADAPTERS) + 1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return jina.write(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def expected(checkpoint, tmp_path_factory):
    """States of each text under each adapter."""
    texts = texts_of(read_spec(checkpoint))
    folders = [
        jina.merged(checkpoint, tmp_path_factory.mktemp(f"merged-{number}"), number)
        for number in NUMBERS
    ]
    return [[reference(folder, [text]) for text in texts] for folder in folders]


def under(spec, number):
    return [replace(text, adapter=number) for text in texts_of(spec)]


@pytest.mark.parametrize("engine", ENGINES)
def test_each_text_has_its_adapter_alone_and_among_others(checkpoint, expected, engine):
    spec = read_spec(checkpoint)
    backend = opened(engine, spec)
    limit = HIDDEN_TOLERANCE * max(np.abs(each).max() for one in expected for each in one)
    for number in NUMBERS:
        alone = [states(backend, [text]).values for text in under(spec, number)]
        for ours, theirs in zip(alone, expected[number], strict=True):
            near(ours, theirs, limit)
    mixed = [(number, place) for place in range(len(expected[0])) for number in reversed(NUMBERS)]
    together = states(backend, [under(spec, number)[place] for number, place in mixed]).values
    theirs = np.concatenate([expected[number][place] for number, place in mixed])
    near(together, theirs, limit)


def test_adapters_differ(expected):
    """Or the oracle would say nothing."""
    longest = [each[-1] for each in expected]
    for number in NUMBERS:
        for other in range(number):
            assert np.abs(longest[number] - longest[other]).max() > 0.1


def test_the_graph_is_valid_onnx(checkpoint):
    graph = family_graph(read_spec(checkpoint))
    is_valid(graph)
    assert "adapter_ids" in {value.name for value in onnx.load_from_string(graph.body).graph.input}
    assert "adapter_ids" not in {
        value.name for value in onnx.load_from_string(tiny.graph_of("bert").body).graph.input
    }


def test_int8_keeps_adapters_in_float32(checkpoint):
    spec = read_spec(checkpoint)
    graph, fidelity = make_int8(spec, Weights.open(checkpoint), Guard())
    assert not [name for name in graph.held if "lora" in name]
    factors = [name for name in family_graph(spec).weights if "lora" in name]
    assert len(factors) == 2 * (2 + 4 * tiny.SMALL["num_hidden_layers"])
    assert set(factors) <= set(graph.weights)
    assert fidelity.worst > 0.99


def test_files_for_others_are_refused(checkpoint):
    with pytest.raises(UnsupportedArchitecture, match="cannot choose one"):
        family_graph(read_spec(checkpoint), rectangle=True)
