"""The head of a language model that ranks: what transformers' class does between the last state and
the logits of words."""

import json

import numpy as np
import pytest
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from conformance.small import tiny, tolerances, vocabulary
from hybridtei.encoder import Encoder
from hybridtei.errors import MissingArtifact, UnsupportedArchitecture, WeightMismatch
from hybridtei.models.checkpoint.rankers import OWN_FILE
from hybridtei.models.checkpoint.spec import read_spec
from hybridtei.models.families import FAMILIES
from tests.models.language import logits_of
from tests.near import scores_of

LANGUAGE_MODELS = {name: family.words for name, family in FAMILIES.items() if family.words}

TEMPLATE = {"prefix": "", "body": "{query} bulo {document}", "suffix": " mo", "yes": "ba"}
QUERY, *DOCUMENTS = dict.fromkeys(vocabulary.texts(9, seed=7))
OUR_OWN = ("cohere", "cohere2", "granite", "gpt_neox")


def ranker(folder, model_type, no="be", **settings):
    """A tiny language model with logits of several units, and a template of our own."""
    words = vocabulary.tokenizer("bytes")
    words.save_pretrained(folder)
    ids = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": words.pad_token_id}
    shape = {**tiny.ENCODER, "vocab_size": len(words), "num_key_value_heads": 2, "head_dim": 8}
    if model_type == "gpt_neox":
        shape = {**tiny.ENCODER, "vocab_size": len(words)}
    config = transformers.AutoConfig.for_model(model_type, **{**shape, **ids, **settings})
    model = AutoModelForCausalLM.from_config(config)
    tiny.randomise(model, 3)
    model.eval().save_pretrained(folder)
    tiny.write_json(folder / OWN_FILE, {**TEMPLATE, "no": no})
    return folder


def expected(folder, no="be"):
    yes, *others = logits_of(folder, {**TEMPLATE, "no": no}, QUERY, DOCUMENTS).T
    return yes - sum(others)


def check(folder, backend="torch", no="be"):
    wanted = expected(folder, no)
    encoder = Encoder.load(folder, backend=backend)
    ranked = encoder.rerank(QUERY, DOCUMENTS, raw_scores=True)
    encoder.close()
    assert np.ptp(wanted) > 0.05
    np.testing.assert_allclose(
        scores_of(ranked), wanted, atol=tolerances.LOGITS["float32"], rtol=1e-5
    )


CAPS = (
    ("gemma2", {"final_logit_softcapping": 2.0}),
    ("gemma2", {"final_logit_softcapping": None}),
    ("gemma2", {}),
    ("gemma3_text", {"final_logit_softcapping": 2.0, **tiny.GEMMA}),
    ("granite", {"logits_scaling": 0.25}),
    ("cohere", {"logit_scale": 3.0}),
    ("cohere2", {"tie_word_embeddings": False}),
    ("gpt_neox", {"tie_word_embeddings": True}),
    ("phi", {"tie_word_embeddings": False}),
)


@pytest.mark.parametrize(("model_type", "settings"), CAPS)
@pytest.mark.parametrize("no", ["be", None])
def test_logits_are_scaled_and_capped(tmp_path, model_type, settings, no):
    check(ranker(tmp_path, model_type, no, **settings), no=no)


@pytest.mark.parametrize("backend", ["ort", "openvino"])
def test_the_cap_holds_in_a_graph_too(tmp_path, backend):
    settings = {**tiny.GEMMA, "final_logit_softcapping": 0.5}
    check(ranker(tmp_path, "gemma3_text", **settings), backend)


@pytest.mark.parametrize("model_type", sorted(LANGUAGE_MODELS))
def test_the_defaults_are_those_of_the_class(model_type):
    config = transformers.AutoConfig.for_model(model_type)
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    (head, table), *_ = model_class._tied_weights_keys.items()
    model = LANGUAGE_MODELS[model_type]
    assert config.tie_word_embeddings is model.tied
    assert (head, table) == ("lm_head.weight", f"{model.table}.weight")


@pytest.mark.parametrize("model_type", ["gemma", "smollm3", "gpt_neox", "granite"])
def test_a_config_without_the_key_has_the_default_of_its_class(tmp_path, model_type):
    folder = ranker(tmp_path, model_type)
    config = json.loads((folder / "config.json").read_text())
    del config["tie_word_embeddings"]
    tiny.write_json(folder / "config.json", config)
    check(folder)


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_in_the_file_counts_before_the_config(tmp_path, tied):
    folder = ranker(tmp_path, "qwen3", tie_word_embeddings=False)
    assert "lm_head.weight" in load_file(folder / "model.safetensors")
    tiny.configured(folder, tie_word_embeddings=tied)
    check(folder, "ort")


def test_a_head_that_is_nowhere_is_refused(tmp_path):
    folder = tiny.configured(
        ranker(tmp_path, "qwen3", tie_word_embeddings=True), tie_word_embeddings=False
    )
    with pytest.raises(WeightMismatch, match=r"lm_head\.weight"):
        Encoder.load(folder)


@pytest.mark.parametrize("model_type", OUR_OWN)
def test_models_that_transformers_runs_can_rank(tmp_path, model_type):
    check(ranker(tmp_path, model_type))


def test_a_language_model_whose_head_is_unknown_is_named(tmp_path):
    folder = ranker(tmp_path, "olmoe", num_experts=4)
    with pytest.raises(UnsupportedArchitecture, match=r"'olmoe' as a language model that ranks"):
        read_spec(folder)
    (folder / OWN_FILE).unlink()
    with pytest.raises(MissingArtifact) as refused:
        read_spec(folder)
    assert OWN_FILE not in str(refused.value)
