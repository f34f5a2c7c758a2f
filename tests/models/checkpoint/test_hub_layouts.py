"""Makers' words in config.json, translated; what contradicts itself is refused."""

import json

import pytest

from conformance.small import published, tiny
from hybridtei.errors import LoadError, UnsupportedArchitecture
from hybridtei.models.checkpoint.hub_layouts import own_code, translate
from hybridtei.models.checkpoint.kinds import Labels
from hybridtei.models.checkpoint.spec import read_spec
from tests import jina


@pytest.mark.parametrize(
    "model_type", [name for name in tiny.FAMILIES if name not in ("t5", "mt5")]
)
def test_transformers_own_words_stay(tmp_path, model_type):
    file = tiny.write_family(tmp_path, model_type) / "config.json"
    config = json.loads(file.read_text())
    assert translate(config, file) == config


def test_nomics_sizes_are_the_models(tmp_path):
    spec = read_spec(
        published.as_nomic(tiny.write_family(tmp_path, "nomic_bert"), max_trained_positions=64),
        pooling="mean",
    )
    assert (spec.hidden_size, spec.vocab_size, spec.has_token_types) == (tiny.HIDDEN, 99, True)
    # max_trained_positions: longer texts need rotary_scaling_factor
    assert spec.max_input_length == 64


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"hidden_size": 64}, "`n_embd` is 32, but `hidden_size` is 64"),
        ({"hidden_act": "relu"}, "`activation_function` is 'silu', but `hidden_act` is 'relu'"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            "`rotary_emb_base` is 1000.0, but `rope_parameters`",
        ),
        ({"rotary_emb_base": ...}, "`rotary_emb_base` is None, should be a positive number"),
        ({"n_embd": "32"}, "`hidden_size` is '32', should be a whole number above zero"),
        ({"vocab_size": True}, "`vocab_size` is True, should be a whole number above zero"),
    ],
)
def test_contradictions_are_refused(tmp_path, changes, why):
    folder = published.as_nomic(tiny.write_family(tmp_path, "nomic_bert"), **changes)
    with pytest.raises(LoadError, match=f"{folder}/config.json: {why}"):
        read_spec(folder, pooling="mean")


def test_alibabas_reranker_has_its_head_beside_new(tmp_path):
    spec = read_spec(published.as_new(tiny.write_classifier(tmp_path, "gte")))
    assert isinstance(spec.kind, Labels)
    assert (spec.role, spec.kind.head.trunk) == ("reranker", "new.")


@pytest.mark.parametrize(
    ("theirs", "ours"), [("avg", "mean"), ("cls", "cls"), ("last", "lasttoken"), (..., "mean")]
)
def test_nvidias_pooling(tmp_path, theirs, ours):
    folder = published.as_llama_bidirec(tiny.write_family(tmp_path, "llama"), pooling=theirs)
    assert read_spec(folder).pooling == (ours,)
    assert read_spec(folder, pooling="cls").pooling == ("cls",)
    tiny.write_modules(folder, pooling="max")
    assert read_spec(folder).pooling == ("max",)


def test_nvidias_other_poolings_are_refused(tmp_path):
    folder = published.as_llama_bidirec(
        tiny.write_family(tmp_path, "llama"), pooling="weighted_avg"
    )
    with pytest.raises(
        UnsupportedArchitecture, match=f"{folder}/config.json: pooling 'weighted_avg'"
    ):
        read_spec(folder)


def test_nvidias_ranker_pools_before_its_matrix(tmp_path):
    folder = published.as_llama_bidirec(tiny.write_classifier(tmp_path, "llama"), temperature=1.0)
    spec = read_spec(folder)
    assert isinstance(spec.kind, Labels)
    assert (spec.role, spec.kind.head.pooling, spec.config["is_causal"]) == (
        "reranker",
        "mean",
        False,
    )
    tiny.configured(folder, temperature=0.5)
    with pytest.raises(
        UnsupportedArchitecture, match=f"{folder}/config.json: `temperature` is 0.5; supported: 1.0"
    ):
        read_spec(folder)


@pytest.mark.parametrize(
    ("changes", "is_causal"),
    [
        ({"architectures": ["Qwen2BidirectionalModel"]}, False),
        ({"architectures": ["Qwen2BidirectionalModel"], "is_causal": True}, True),
        ({"architectures": ["Qwen2Model"]}, None),
        ({"architectures": None}, None),
    ],
)
def test_the_name_of_a_class_says_that_it_sees_both_ways(tmp_path, changes, is_causal):
    folder = tiny.configured(tiny.write_family(tmp_path, "qwen2"), **changes)
    assert read_spec(folder, pooling="lasttoken").config.get("is_causal") is is_causal


FLASH = "jinaai/xlm-roberta-flash-implementation--"


@pytest.mark.parametrize(
    ("model_type", "code", "is_known"),
    [
        ("gte", "Alibaba-NLP/new-impl--modeling.NewModel", True),
        ("gte", "modeling_hf_alibaba_nlp_gte.GteModel", True),
        ("nomic_bert", "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel", True),
        ("nomic_bert", "modeling_hf_nomic_bert.NomicBertForPreTraining", True),
        ("jina_bert", "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel", True),
        ("bert", "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel", False),
        ("jina_embeddings_v3", FLASH + "modeling_lora.XLMRobertaLoRA", True),
        ("jina_embeddings_v3", FLASH + "modeling_xlm_roberta.XLMRobertaModel", True),
        ("xlm-roberta", FLASH + "modeling_xlm_roberta.XLMRobertaModel", False),
        ("llama", "llama_bidirectional_model.LlamaBidirectionalForSequenceClassification", True),
        ("qwen3", "modeling.PPLXQwen3Model", True),
        ("eurobert", "modeling_eurobert.EuroBertModel", True),
        ("qwen2", "modeling_qwen.Qwen2Model", True),
        ("qwen2", "modeling_mine.Qwen2Model", False),
        ("qwen3", "modeling_qwen.Qwen2Model", False),
        ("bert", "modeling_own.OwnModel", False),
        ("bert", "", False),
    ],
)
def test_publishers_classes_that_a_family_computes(model_type, code, is_known):
    config = {
        "model_type": model_type,
        "auto_map": {"AutoModel": code, "AutoConfig": "configuration_own.OwnConfig"},
    }
    assert own_code(config) == (None if is_known else code)
    assert own_code(config, "AutoModelForMaskedLM") is None


def test_a_long_name_of_a_class_is_no_work():
    """The pattern takes the square of the length."""
    config = {"model_type": "bert", "auto_map": {"AutoModel": "ForA" * 5_000 + "!"}}
    assert len(own_code(config) or "") < 400


def test_without_a_class_of_a_model_there_is_no_own_code():
    for auto_map in (None, "modeling.X", ["x"], {}, {"AutoModel": None}, {"AutoConfig": "a.B"}):
        assert own_code({"model_type": "bert", "auto_map": auto_map}) is None


def test_gte_qwen2_sees_both_ways_where_a_key_says_so(tmp_path):
    folder = tiny.configured(
        tiny.write_family(tmp_path, "qwen2"), auto_map={"AutoModel": "modeling_qwen.Qwen2Model"}
    )
    assert "is_causal" not in read_spec(folder, pooling="lasttoken").config
    tiny.configured(folder, is_causal=False)
    assert read_spec(folder, pooling="lasttoken").config["is_causal"] is False


def test_a_head_by_own_code_is_refused(tmp_path):
    folder = tiny.configured(
        tiny.write_classifier(tmp_path, "bert"),
        auto_map={"AutoModelForSequenceClassification": "modeling_own.OwnForScores"},
    )
    with pytest.raises(
        UnsupportedArchitecture,
        match=f"{folder}/config.json: `auto_map` names `modeling_own.OwnForScores`",
    ):
        read_spec(folder)


NTK = {"type": "ntk", "factor": 8.0}
WRITERS = [
    lambda folder: published.as_new(tiny.write_family(folder, "gte"), rope_scaling=NTK),
    lambda folder: published.as_nomic(tiny.write_family(folder, "nomic_bert")),
    published.write_nomic,
    published.write_jina,
    jina.write,
    lambda folder: published.as_llama_bidirec(
        tiny.write_classifier(folder, "llama"), temperature=1.0
    ),
    lambda folder: published.as_pplx(tiny.write_family(folder, "qwen3")),
]
STRANGE = [..., None, -1, 0, 10**30, "x", [None], True, float("inf"), {**NTK, "factor": 0}]


@pytest.mark.parametrize("write", WRITERS)
def test_no_strange_value_ends_in_another_error(tmp_path, write):
    """A value that is missing, of another type or beyond all bounds: served where it changes
    nothing, or refused by file."""
    file = write(tmp_path) / "config.json"
    config = json.loads(file.read_text())
    refused = []
    for key in config:
        for value in STRANGE:
            tiny.write_json(
                file, {name: one for name, one in {**config, key: value}.items() if one is not ...}
            )
            try:
                read_spec(tmp_path, pooling="mean")
            except LoadError as error:
                refused.append(str(error))
    assert len(refused) > 50
    assert all(str(tmp_path) in why for why in refused)
