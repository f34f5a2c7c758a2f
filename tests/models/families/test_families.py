"""Every family against transformers, on both engines, alone and among neighbours; and what is not
understood is refused."""

from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

from conformance.families.oracle import (
    ENGINES,
    HIDDEN_TOLERANCE,
    LENGTHS,
    difference,
    open_engine,
    reference,
    states_of,
    texts_of,
)
from conformance.families.variants import VARIANTS
from conformance.small import tiny
from hybridtei.errors import LoadError
from hybridtei.inference.backends.graph.ops import family_graph
from hybridtei.inference.backends.graph.writer import contents
from hybridtei.inference.backends.weights import graph_tensors
from hybridtei.models.checkpoint.spec import read_spec
from hybridtei.models.checkpoint.weights import Weights
from hybridtei.models.families import FAMILIES, SERVED
from hybridtei.models.families.bert import deberta_buckets, distance_buckets
from tests.models.refused import refuses_graph
from tests.near import near, same
from tests.sampled import paired

# As the configurations of older checkpoints are written; others: `conformance/checkpoints`.
OLDER = [
    (
        "gemma3_text",
        {
            "rope_parameters": ...,
            "rope_theta": 500.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    ("gemma3_text", {"layer_types": ..., "sliding_window_pattern": 2}),
    (
        "gemma3_text",
        {"rope_parameters": ..., "rope_theta": 500.0, "layer_types": ["sliding_attention"] * 2},
    ),
    (
        "qwen2",
        {
            "layer_types": ...,
            "use_sliding_window": True,
            "sliding_window": None,
            "max_window_layers": 0,
        },
    ),
    (
        "qwen3",
        {
            "layer_types": ...,
            "use_sliding_window": False,
            "sliding_window": 8,
            "max_window_layers": 0,
        },
    ),
    ("nomic_bert", {"partial_rotary_factor": 0.5}),
    ("eurobert", {"rms_norm_eps": ...}),
    ("nomic_bert", {"head_dim": ...}),
    ("nomic_bert", {"type_vocab_size": ...}),
    ("gte", {"type_vocab_size": ...}),
    ("jina_embeddings_v3", {"type_vocab_size": ...}),
    ("bert", {"layer_norm_eps": ..., "hidden_act": ...}),
]


def opened(engine, spec):
    if engine == "openvino" and find_spec("openvino") is None:
        pytest.skip("openvino is not installed")
    return open_engine(engine, spec)


def equals_transformers(folder, engine="ort", expected=None):
    """States of the common texts, together and alone; `expected`: instead of those that
    transformers reads from the folder."""
    spec = read_spec(folder, pooling="mean")
    texts = texts_of(spec)
    found = difference(
        states_of(opened(engine, spec), texts),
        reference(folder, texts) if expected is None else expected,
        texts,
    )
    assert found.is_within, found


# A family itself on every engine; what its settings change is in the graph, which two engines read,
# and in torch.
EVERY = [
    (*one, engine) for one in VARIANTS for engine in (ENGINES if not one[1] else ("ort", "torch"))
]


@pytest.mark.parametrize(
    ("family", "settings", "engine"),
    EVERY,
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_it_computes_what_transformers_does(tmp_path, family, settings, engine):
    equals_transformers(tiny.write_family(tmp_path, family, **settings), engine)


@pytest.mark.parametrize(("family", "changes"), OLDER, ids=str)
def test_older_configurations_mean_what_they_mean_to_transformers(tmp_path, family, changes):
    folder = tiny.configured(tiny.write_family(tmp_path, family), **changes)
    equals_transformers(folder)


@pytest.mark.parametrize(("family", "engine"), paired(["deberta-v2", "nomic_bert", "t5"], ENGINES))
def test_a_family_without_a_table_of_positions_has_no_longest_text(tmp_path, family, engine):
    """DeBERTa's `max_position_embeddings` says from where on distances are equal."""
    deberta = (
        {"position_biased_input": False, "position_buckets": 8} if family == "deberta-v2" else {}
    )
    length = {} if family == "t5" else {"max_position_embeddings": 24}
    equals_transformers(tiny.write_family(tmp_path, family, **deberta, **length), engine)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("rectangle", [False, True])
def test_it_is_valid_onnx_of_a_few_kilobytes(family, rectangle):
    is_valid(tiny.graph_of(family, rectangle))


def is_valid(graph):
    model = onnx.load_from_string(graph.body)
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(np.zeros(shape, np.float32), name)
        for name, shape in graph.weights.items()
    )
    onnx.checker.check_model(model, full_check=True)
    assert len(graph.body) < 20_000


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_rectangle_gives_the_same(tmp_path, family):
    spec = tiny.family_spec(tmp_path, family)
    in_a_rectangle(spec, reference(tmp_path, texts_of(spec)))


def in_a_rectangle(spec, expected):
    """Texts padded at the end, as other programs' ONNX files take them. The values of padding have
    no effect."""
    graph = family_graph(spec, rectangle=True)
    session = ort.InferenceSession(
        graph.body + contents(graph_tensors(graph, Weights.open(spec.folder)))
    )
    mask = np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]
    ids = np.full(mask.shape, spec.padding_id, dtype=np.int64)
    ids[mask] = np.concatenate([text.input_ids for text in texts_of(spec)])
    feed = {
        "input_ids": ids,
        "attention_mask": mask.astype(np.int64),
        "token_type_ids": np.zeros_like(ids),
    }
    (states,) = session.run(None, {node.name: feed[node.name] for node in session.get_inputs()})
    near(states[mask], expected, HIDDEN_TOLERANCE * np.abs(expected).max())


LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
REFUSED = [
    ("bert", {"hidden_act": "mish"}, "`hidden_act` is 'mish'"),
    ("bert", {"is_decoder": True}, "`is_decoder` is True"),
    ("bert", {"auto_map": {"AutoConfig": "a.BertConfig"}, "an_option": 1}, "`an_option` is 1"),
    ("bert", {"pruned_heads": {"1": [0]}}, "`pruned_heads` is"),
    (
        "llama",
        {"rope_parameters": {**LINEAR, "rope_type": "dynamic"}},
        "`rope_type` is 'dynamic'",
    ),
    (
        "qwen3",
        {"rope_scaling": {"type": "longrope"}, "rope_parameters": ...},
        "`rope_type` is 'longrope'",
    ),
    ("qwen3", {"max_window_layers": "all"}, "`max_window_layers` is 'all'"),
    (
        "llama",
        {"rope_parameters": LINEAR, "partial_rotary_factor": 0.5},
        "`partial_rotary_factor` is 0.5; supported: 1.0",
    ),
    ("mpnet", {"relative_attention_num_buckets": 8}, "`relative_attention_num_buckets` is 8"),
    (
        "embedding_gemma2_text",
        {"per_layer_config": {"1": {"hidden_size": 8}}},
        "per_layer_config.1: `hidden_size` is 8",
    ),
    ("ministral3", {"rope_parameters": ...}, "`rope_parameters` is None"),
    (
        "llama",
        {"rope_parameters": tiny.MINISTRAL_ROPE},
        "`rope_parameters` is '(llama_4_scaling_beta|max_position_embeddings)'",
    ),
]


@pytest.mark.parametrize(("family", "changes", "why"), REFUSED)
def test_a_setting_that_is_not_known_is_refused_by_name(tmp_path, family, changes, why):
    folder = tiny.configured(tiny.write_family(tmp_path, family), **changes)
    refuses_graph(folder, why)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_attention_heads": "4"}, "positive integer"),
        ({"layer_norm_eps": -1}, "positive number"),
        ({"hidden_size": True}, "positive integer"),
    ],
)
def test_a_setting_of_another_type_is_refused_by_name(bert, changes, why):
    spec = read_spec(bert)
    with pytest.raises(LoadError, match=f"`{next(iter(changes))}` is .*{why}"):
        family_graph(replace(spec, config={**spec.config, **changes}))


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["full_attention"]},
        {"layer_types": ["full_attention", "chunked_attention"]},
        {"layer_types": "full_attention"},
        {"rope_parameters": {"rope_type": "linear", "factor": None}},
        {"rope_parameters": 3},
    ],
    ids=str,
)
def test_nested_settings_of_another_form_are_refused(tmp_path, changes):
    for family in ("qwen3", "modernbert", "gemma3_text", "embedding_gemma2_text"):
        folder = tiny.configured(tiny.write_family(tmp_path / family, family), **changes)
        with pytest.raises(LoadError, match=str(folder / "config.json")):
            family_graph(read_spec(folder, pooling="mean"))


def test_every_family_has_a_checkpoint_here():
    # Of which transformers has no class: see test_hub_layouts and test_lfm2
    without = {
        "jina_bert",
        "lfm2_bidirectional",
        "xlm-roberta-flash",
    }
    assert set(SERVED) == {*tiny.FAMILIES, *without}
    assert sorted(SERVED) == [*SERVED]
    assert {*SERVED} < {*FAMILIES}


@pytest.mark.parametrize(("number", "furthest"), [(256, 512), (32, 128), (8, 128), (-1, 20)])
def test_debertas_buckets_are_transformers(number, furthest):
    from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

    side = torch.zeros(1, 600, 1)
    span = number if number > 0 else furthest
    expected = build_relative_position(side, side, bucket_size=number, max_position=furthest)[
        0
    ].numpy()
    ours = deberta_buckets(number, furthest, span, 600)
    distance = np.arange(600)[:, None] - np.arange(600)
    same(ours[distance + 600], np.clip(expected + span, 0, 2 * span - 1))


@pytest.mark.parametrize(("number", "furthest"), [(32, 128), (8, 20), (64, 128), (32, 64)])
def test_buckets_of_distances_are_transformers(number, furthest):
    from transformers.models.mpnet.modeling_mpnet import MPNetEncoder
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = torch.arange(-600, 601)
    ours = distance_buckets(number, furthest)[distance.clamp(-furthest, furthest) + furthest]
    bucket_of = (MPNetEncoder.relative_position_bucket, T5Attention._relative_position_bucket)
    for one in bucket_of:
        same(ours, one(distance, num_buckets=number, max_distance=furthest).numpy())
