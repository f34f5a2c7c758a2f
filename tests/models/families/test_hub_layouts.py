"""Checkpoints as makers publish them, against transformers' class of the same model, alone and
among neighbours."""

import numpy as np
import pytest
import transformers
from transformers import AutoModelForSequenceClassification

from conformance.families.oracle import ENGINES, alone, reference, texts_of
from conformance.small import published, tiny, tolerances, vocabulary
from hybridtei.batch import Head
from hybridtei.errors import LoadError, UnsupportedArchitecture
from hybridtei.inference.backends.torch.backend import TorchBackend
from hybridtei.models.checkpoint.spec import read_spec
from tests.inference.backends.outputs import run
from tests.models.families.test_families import equals_transformers, opened
from tests.models.refused import refuses_graph
from tests.near import near
from tests.sampled import paired

# Of a factor of 8, for heads of 8
NTK = {
    "rope_type": "linear",
    "rope_theta": 8 * 500.0,
    "factor": 8 ** (2 / 8),
}
# (family, transformers' settings, the maker's settings)
# The class's name says it
PUBLISHED = [
    ("nomic_bert", {}, {}),
    ("nomic_bert", {"hidden_act": "gelu", "type_vocab_size": 1}, {"activation_function": "geglu"}),
    ("nomic_bert", {"layer_norm_eps": 1e-3, "rope_parameters": {"rope_theta": 50.0}}, {}),
    ("nomic_bert", {"intermediate_size": 128}, {"n_inner": None}),
    ("nomic_bert", {"vocab_size": 128}, {"vocab_size": 97, "pad_vocab_size_multiple": 64}),
    ("gte", {}, {}),
    ("gte", {"rope_parameters": {"rope_theta": 10_000.0}}, {"rope_theta": ...}),
    (
        "gte",
        {"rope_parameters": NTK},
        {"rope_theta": 500.0, "rope_scaling": {"type": "ntk", "factor": 8.0}},
    ),
    ("gte", {"type_vocab_size": 2}, {"model_type": "gte"}),
    ("llama", {"is_causal": False}, {}),
    (
        "llama",
        {"is_causal": False},
        {"model_type": "llama", "pooling": ..., "temperature": ...},
    ),
    ("qwen3", {"is_causal": False}, {}),
    ("ministral3", {}, {}),
    ("ultrabert", {}, {}),
    ("ultrabert", {"layer_types": ["full_attention"] * 2}, {"attention_windows": [0, 0]}),
]


@pytest.mark.parametrize("engine", ["ort", "torch"])
@pytest.mark.parametrize(("family", "settings", "changes"), PUBLISHED, ids=str)
def test_it_computes_what_transformers_does(tmp_path, family, settings, changes, engine):
    folder = tiny.write_family(tmp_path, family, **settings)
    expected = reference(folder, texts_of(read_spec(folder, pooling="mean")))
    equals_transformers(published.REWRITES[family](folder, **changes), engine, expected)


@pytest.mark.parametrize(
    ("family", "changes"), [("nomic_bert", {}), ("llama", {"model_type": "llama"})]
)
def test_torch_does_not_fall_back_on_another_model(tmp_path, family, changes):
    """transformers would read Nomic's sizes as its own defaults, and this llama as one that looks
    back only."""
    folder = tiny.write_family(tmp_path, family)
    published.REWRITES[family](folder, an_option=1, **changes)
    with pytest.raises(UnsupportedArchitecture, match=f"{folder}/config.json: `an_option` is 1"):
        TorchBackend(read_spec(folder, pooling="mean"))


def test_a_gte_without_types_has_no_table_of_them(tmp_path):
    """As gte-base-en-v1.5; transformers' class cannot be built so, and adds a row that is zero
    here."""
    table = "embeddings.token_type_embeddings.weight"
    folder = tiny.change(
        tiny.write_family(tmp_path, "gte"), lambda tensors: {**tensors, table: 0 * tensors[table]}
    )
    expected = reference(folder, texts_of(read_spec(folder, pooling="mean")))
    published.as_new(folder, type_vocab_size=0)
    tiny.without(folder, table)
    equals_transformers(folder, expected=expected)


@pytest.mark.parametrize(
    ("family", "rewrite", "engine"),
    [
        ("gte", published.as_new, "ort"),
        *(("xlm-roberta", published.as_jina_flash, engine) for engine in ENGINES),
    ],
)
def test_makers_rerankers_score_as_transformers_does(tmp_path, family, rewrite, engine):
    """Alibaba's, and Jina's, which is an XLM-RoBERTa under other names."""
    folder = tiny.write_classifier(tmp_path, family)
    texts = texts_of(read_spec(folder))
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, attn_implementation="eager"
    ).eval()
    expected = alone(model, texts, "logits")
    spec = read_spec(rewrite(folder))
    assert (spec.role, spec.max_input_length) == ("reranker", vocabulary.LONGEST)
    scores = run(opened(engine, spec), texts).scores
    near(scores, np.stack(expected), tolerances.LOGITS["float32"])


@pytest.mark.parametrize(("engine", "task"), paired(ENGINES, ["QuestionEncoder", "ContextEncoder"]))
def test_a_dpr_embeds_by_its_first_token(tmp_path, task, engine):
    spec = read_spec(tiny.write_family(tmp_path, "dpr", task=task))
    texts = texts_of(spec)
    model_class = getattr(transformers, f"DPR{task}")
    model = model_class.from_pretrained(tmp_path, attn_implementation="eager").eval()
    expected = alone(model, texts, "pooler_output")
    dense = run(opened(engine, spec), texts, frozenset({Head.DENSE})).dense
    near(dense, np.stack(expected), tolerances.HIDDEN["float32"])
    tiny.configured(tmp_path, projection_dim=8)
    with pytest.raises(UnsupportedArchitecture, match="`projection_dim` is 8"):
        read_spec(tmp_path)


REFUSED = [
    ("nomic_bert", {"prenorm": True}, "`prenorm` is True; supported: False"),
    ("nomic_bert", {"rotary_scaling_factor": 2}, "`rotary_scaling_factor` is 2; supported: None"),
    ("nomic_bert", {"rotary_emb_fraction": 0.5}, "`rotary_emb_fraction` is 0.5"),
    ("nomic_bert", {"rotary_emb_fraction": ...}, "`rotary_emb_fraction` is None"),
    ("nomic_bert", {"activation_function": "glu"}, "`activation_function` is 'glu'"),
    ("gte", {"position_embedding_type": "absolute"}, "`position_embedding_type` is 'absolute'"),
    ("gte", {"layer_norm_type": "rms_norm"}, "`layer_norm_type` is 'rms_norm'"),
    (
        "gte",
        {"rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.5}},
        "`rope_scaling` is .*mixed_b",
    ),
    ("gte", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "`rope_type` is 'dynamic'"),
    (
        "ultrabert",
        {"attention_windows": [8, 16], "rope_theta": [1e4, 1e4]},
        "`attention_windows` and `rope_theta` are 16 and 10000.0 in one layer of sliding_attention",
    ),
    ("ultrabert", {"an_option_nobody_knows_yet": 1}, "`an_option_nobody_knows_yet` is 1"),
]


@pytest.mark.parametrize(("family", "changes", "why"), REFUSED)
def test_a_setting_that_is_not_known_is_refused_by_name(tmp_path, family, changes, why):
    folder = published.REWRITES[family](tiny.write_family(tmp_path, family), **changes)
    refuses_graph(folder, why)


@pytest.mark.parametrize("changes", [{"attention_windows": [8]}, {"rope_theta": 1e4}], ids=str)
def test_ultraberts_lists_have_a_number_for_each_layer(tmp_path, changes):
    folder = published.as_ultrabert(tiny.write_family(tmp_path, "ultrabert"), **changes)
    with pytest.raises(LoadError, match=f"`{next(iter(changes))}` is .*a number for each of 2"):
        read_spec(folder, pooling="mean")
