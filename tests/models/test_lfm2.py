"""LFM2.5 as Liquid AI publishes it, against transformers' layers with the mask removed and the
convolutions centred."""

import numpy as np
import pytest

from conformance.families.lfm2 import ADJUSTED, write
from conformance.families.oracle import (
    ENGINES,
    ENGINES_OF,
    TOLERANCES,
    difference,
    open_engine,
    states_of,
    texts_of,
)
from conformance.small import tiny
from hybridtei.batch import Encoding
from hybridtei.errors import LoadError
from hybridtei.inference.backends.graph.ops import family_graph
from hybridtei.models.checkpoint.spec import read_spec
from tests.inference.backends.outputs import states
from tests.models.families.test_families import in_a_rectangle, is_valid
from tests.models.refused import refuses_graph
from tests.near import near
from tests.precisions import runs_here


@pytest.mark.parametrize(
    ("dtype", "engine"),
    [
        (dtype, engine)
        for dtype in TOLERANCES
        for engine in ENGINES_OF[dtype]
        if runs_here(engine, dtype)
    ],
)
def test_it_computes_transformers_layers_in_both_directions(tmp_path, dtype, engine):
    """Alone, among neighbours, and with a text of 1,500 tokens."""
    folder, expected = write(tmp_path)
    spec = read_spec(folder, pooling="cls")
    texts = texts_of(spec)
    assert max(map(len, texts)) == 1500
    found = difference(states_of(open_engine(engine, spec, dtype), texts), expected, texts)
    assert found.within(TOLERANCES[dtype]), found


@pytest.mark.parametrize(
    "settings",
    [
        ADJUSTED,
        {"layer_types": None, "full_attn_idxs": [0, 2]},
    ],
    ids=str,
)
def test_settings_mean_what_they_mean_to_transformers(tmp_path, settings):
    folder, expected = write(tmp_path, **settings)
    spec = read_spec(folder, pooling="cls")
    texts = texts_of(spec)
    assert difference(states_of(open_engine("ort", spec), texts), expected, texts).is_within


def test_a_rectangle_gives_the_same(tmp_path):
    """For other readers of ONNX files: padding at the end is not seen."""
    folder, expected = write(tmp_path, max_position_embeddings=512)
    is_valid(family_graph(read_spec(folder, pooling="cls")))
    in_a_rectangle(read_spec(folder, pooling="cls"), expected)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_token_that_is_no_key_is_not_seen(tmp_path, engine):
    """As the mask tokens of a late-interaction query; what they are changes no other token."""
    spec = read_spec(write(tmp_path)[0], pooling="cls")
    backend, seen = open_engine(engine, spec), [0, 1, 2, 5, 6]
    one, other = (
        states(
            backend,
            [
                Encoding(np.array([4, 6, 7, token, token]), unseen=2),
                Encoding(np.array([8, 5])),
            ],
        ).values
        for token in (5, 9)
    )
    near(one[seen], other[seen], 1e-6)
    assert np.abs(one - other).max() > 0.01


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"conv_bias": True}, "`conv_bias` is True; supported: False"),
        ({"conv_L_cache": 4}, "`conv_L_cache` is 4; supported: 3"),
        ({"use_pos_enc": False}, "`use_pos_enc` is False; supported: True"),
        ({"an_option_nobody_knows_yet": 1}, "`an_option_nobody_knows_yet` is 1"),
    ],
)
def test_what_is_not_known_is_refused_by_name(tmp_path, changes, why):
    folder, _ = write(tmp_path)
    tiny.configured(folder, **changes)
    refuses_graph(folder, why)


def test_a_causal_one_stays_with_torch(tmp_path):
    folder, _ = write(tmp_path)
    tiny.configured(folder, architectures=["Lfm2Model"], auto_map=...)
    spec = read_spec(folder, pooling="lasttoken")
    assert spec.model_type == "lfm2"
    with pytest.raises(LoadError, match="no family `lfm2`"):
        family_graph(spec)
