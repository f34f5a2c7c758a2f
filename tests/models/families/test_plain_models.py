"""Models of which transformers has no class, against plain numpy, on both engines, alone and among
neighbours."""

import itertools
import json

import numpy as np
import pytest

from conformance.families.oracle import HIDDEN_TOLERANCE, states_of, texts_of
from conformance.small import published, tiny, tolerances
from hybridtei.errors import LoadError, UnsupportedArchitecture
from hybridtei.inference.backends.graph.int8 import Guard, make_int8
from hybridtei.inference.backends.graph.onnx_backend import OnnxBackend
from hybridtei.inference.backends.graph.ops import family_graph
from hybridtei.models.checkpoint.spec import read_spec
from hybridtei.models.checkpoint.weights import Weights
from hybridtei.models.families.bert import slopes
from tests.inference.backends.outputs import run
from tests.models.families import plain
from tests.models.families.test_families import (
    equals_transformers,
    in_a_rectangle,
    is_valid,
    opened,
)
from tests.models.refused import refuses_graph
from tests.near import near, same

JINA = [
    {},
    {"feed_forward_type": "reglu", "hidden_act": "silu", "type_vocab_size": 1},
    {"feed_forward_type": "original", "layer_norm_eps": 1e-3},
    {"hidden_size": 36, "num_attention_heads": 6},
    {"code": True},
    {"code": True, "feed_forward_type": "reglu", "hidden_size": 36, "num_attention_heads": 3},
    {"code": True, "feed_forward_type": "original"},
]
BIASES = {"qkv_proj_bias": True, "mlp_fc1_bias": True, "mlp_fc2_bias": True}
# Of nomic-embed-text-v2-moe.
EXPERTS = {
    **BIASES,
    "activation_function": "gelu",
    "add_pooling_layer": False,
    "expert_choice_router": False,
    "ffn_div": 1,
    "moe_impl": "megablocks",
    "moe_normalize_expert_weights": False,
    "moe_resid_pdrop": 0.0,
    "moe_top_k": 2,
    "num_experts": 8,
    "num_shared_experts": 0,
    "router_aux_loss_coef": 0.1,
}
NOMIC = [
    {},
    BIASES,
    # They are there unless it is said that they are not
    dict.fromkeys(BIASES, ...),
    {**BIASES, "activation_function": "gelu"},
    {"activation_function": "gelu", "mlp_fc2_bias": True},
    {**EXPERTS, "moe_every_n_layers": 2},
    {**EXPERTS, "moe_every_n_layers": 3, "n_layer": 5, "moe_top_k": 1},
    {**EXPERTS, "moe_every_n_layers": 0},
]


def written(folder, *, experts):
    return (
        published.write_nomic(folder, **EXPERTS, moe_every_n_layers=2)
        if experts
        else published.write_jina(folder)
    )


def matches(folder, model, engine):
    texts = texts_of(read_spec(folder, pooling="mean"))
    equals_transformers(folder, engine, plain.states(model, *held(folder), texts))


def held(folder):
    """The configuration, and the tensors by name."""
    config, weights = json.loads((folder / "config.json").read_text()), Weights.open(folder)
    return config, {name: weights.float32(name) for name in weights.names()}


@pytest.mark.parametrize(
    ("settings", "engine"),
    [*itertools.product(JINA, ("ort", "torch")), (JINA[0], "openvino")],
    ids=str,
)
def test_jina_is_what_its_makers_code_computes(tmp_path, settings, engine):
    matches(published.write_jina(tmp_path, **settings), plain.jina, engine)


@pytest.mark.parametrize(
    ("settings", "engine"),
    [*itertools.product(NOMIC, ("ort", "torch")), (NOMIC[0], "openvino"), (NOMIC[5], "openvino")],
)
def test_nomic_is_what_its_makers_code_computes(tmp_path, settings, engine):
    matches(published.write_nomic(tmp_path, **settings), plain.nomic, engine)


def test_slopes_of_any_number_of_heads():
    """The numbers of jina-embeddings-v2-base-en: a power of two, and four between."""
    powers, between = 2.0 ** -np.arange(1, 9), 2.0 ** -np.arange(0.5, 4)
    np.testing.assert_allclose(slopes(12), [*powers, *between], rtol=1e-6)
    same(slopes(8), powers.astype(np.float32))
    assert len(slopes(1)) == 1


@pytest.mark.parametrize("rectangle", [False, True])
@pytest.mark.parametrize("write", [published.write_jina, published.write_nomic])
def test_it_is_valid_onnx_of_a_few_kilobytes(tmp_path, write, rectangle):
    is_valid(family_graph(read_spec(write(tmp_path), pooling="mean"), rectangle=rectangle))


@pytest.mark.parametrize("experts", [False, True])
def test_int8_stays_near_and_apart_from_neighbours(tmp_path, experts):
    spec = read_spec(written(tmp_path, experts=experts), pooling="mean")
    weights = Weights.open(spec.folder)
    graph, fidelity = make_int8(spec, weights, Guard())
    states = states_of(OnnxBackend(spec, graph, weights), texts_of(spec))
    near(states.together, states.alone, HIDDEN_TOLERANCE)
    assert fidelity.worst > 0.99


def test_a_rectangle_has_the_same_experts_and_distances(tmp_path):
    for experts in (False, True):
        spec = read_spec(written(tmp_path / str(experts), experts=experts), pooling="mean")
        in_a_rectangle(spec, states_of(opened("ort", spec), texts_of(spec)).together)


@pytest.mark.parametrize("code", [False, True])
def test_a_copy_of_the_code_beside_the_weights_is_told_by_them(tmp_path, code):
    copied = {
        "_name_or_path": "somewhere",
        "auto_map": {"AutoConfig": "configuration_bert.JinaBertConfig"},
    }
    folder = published.write_jina(tmp_path, code=code, **copied)
    assert read_spec(folder, pooling="mean").config["qk_norm"] is code
    matches(folder, plain.jina, "ort")


def test_its_pooling_is_the_mean_where_no_file_says_another(tmp_path):
    spec = read_spec(published.write_jina(tmp_path))
    assert (spec.model_type, spec.pooling, spec.has_token_types) == ("jina_bert", ("mean",), True)
    tiny.configured(tmp_path, emb_pooler="max_of_something")
    with pytest.raises(UnsupportedArchitecture, match=r"config.json: pooling 'max_of_something'"):
        read_spec(tmp_path)


def test_a_jina_reranker_has_berts_head(tmp_path):
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    folder = published.write_jina(
        tmp_path, code=True, architectures=["JinaBertForSequenceClassification"], **labels
    )
    config, trunk = held(folder)
    shapes = {
        "bert.pooler.dense.weight": (32, 32),
        "bert.pooler.dense.bias": (32,),
        "classifier.weight": (1, 32),
    }
    head = published.random_tensors({**shapes, "classifier.bias": (1,)})
    published.save_file(
        {**{f"bert.{name}": one for name, one in trunk.items()}, **head},
        folder / "model.safetensors",
    )
    spec = read_spec(folder)
    texts = texts_of(spec)
    states = plain.states(plain.jina, config, trunk, texts)
    first = states[np.cumsum([0, *(len(text) for text in texts[:-1])])]
    pooled = np.tanh(first @ head["bert.pooler.dense.weight"].T + head["bert.pooler.dense.bias"])
    expected = pooled @ head["classifier.weight"].T + head["classifier.bias"]
    scores = run(opened("ort", spec), texts).scores
    assert (spec.role, scores is None) == ("reranker", False)
    near(scores, expected, tolerances.LOGITS["float32"])


OTHER_EXPERTS = [
    (
        {"moe_normalize_expert_weights": True},
        "`moe_normalize_expert_weights` is True; supported: False",
    ),
    ({"num_shared_experts": 1}, "`num_shared_experts` is 1"),
    ({"expert_choice_router": True}, "`expert_choice_router` is True"),
    ({"moe_top_k": 9}, "`moe_top_k` is 9"),
    ({"moe_top_k": ...}, "`moe_top_k` is None, should be a positive integer"),
    ({"activation_function": "swiglu"}, "`moe_every_n_layers` is 2; supported: 0"),
]
OTHER_JINA = [
    (
        {"feed_forward_type": "swiglu"},
        "`feed_forward_type` is 'swiglu'; supported: 'original', 'geglu', 'reglu'",
    ),
    ({"alibi_scaling": 2}, "`alibi_scaling` is 2"),
    (
        {"auto_map": ..., "_name_or_path": "else"},
        "`position_embedding_type` is 'alibi'; supported if `auto_map` names",
    ),
    ({"position_embedding_type": "relative_key"}, "`position_embedding_type` 'relative_key'"),
    ({"position_embedding_type": "absolute"}, "`emb_pooler` is 'mean'"),
]


@pytest.mark.parametrize(
    ("experts", "changes", "why"),
    [*((True, *one) for one in OTHER_EXPERTS), *((False, *one) for one in OTHER_JINA)],
)
def test_other_settings_are_refused_by_name(tmp_path, experts, changes, why):
    folder = tiny.configured(written(tmp_path, experts=experts), **changes)
    refuses_graph(folder, why, LoadError)
