"""Decoders with one score: a template that the folder declares is applied, and a ranker without one
says so."""

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder
from transformers import AutoTokenizer

from conformance.small import tiny, tolerances, vocabulary
from hybridtei.config import EngineConfig
from hybridtei.encoder import Encoder
from hybridtei.inference.load import text_reader
from hybridtei.models.checkpoint.rankers import NVIDIA, OWN_FILE, template_source
from hybridtei.models.checkpoint.spec import read_spec
from tests.near import near, scores_of

QUERY, *DOCUMENTS = dict.fromkeys(vocabulary.texts(7, seed=9))
BY_ROLE = (
    "<|endoftext|>{% for m in messages %}{% if m.role == 'query' %}ba {{ m.content }}\n"
    "{% elif m.role == 'document' %}mo {{ m.content }}{% endif %}{% endfor %}<|endoftext|>lo"
)
BY_PLACE = "question:{{ messages[0].content }} \n passage:{{ messages[1].content }}"
FOR_TALK = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}mo"
)
STRICT = "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('roles') }}{% endif %}{% endfor %}"


def scores(folder):
    return scores_of(Encoder.load(folder).rerank(QUERY, DOCUMENTS, raw_scores=True))


def close(ours, theirs):
    assert np.ptp(theirs) > 0.01
    near(ours, theirs, tolerances.LOGITS["float32"])


def source(spec):
    return template_source(spec.folder, spec.kind.template)


@pytest.mark.parametrize("template", [BY_ROLE, BY_PLACE])
def test_a_chat_template_of_pairs_is_applied(tmp_path, template):
    folder = tiny.write_classifier(tmp_path, "qwen3")
    (folder / "chat_template.jinja").write_text(template)
    theirs = CrossEncoder(str(folder), device="cpu")
    pairs = [(QUERY, document) for document in DOCUMENTS]
    close(scores(folder), theirs.predict(pairs, activation_fn=torch.nn.Identity()))
    assert source(read_spec(folder)) == "chat_template.jinja"


def test_a_template_names_tokens_of_special_tokens_map_too(tmp_path):
    folder = tiny.write_classifier(tmp_path, "qwen3")
    (folder / "chat_template.jinja").write_text("{{ bos_token }}" + BY_PLACE)
    token = {"content": "<|endoftext|>", "lstrip": False}
    tiny.write_json(folder / "special_tokens_map.json", {"bos_token": token})
    template = read_spec(folder).kind.template
    assert template.prefix == "<|endoftext|>"


@pytest.mark.parametrize("template", [FOR_TALK, STRICT])
def test_a_chat_template_without_both_texts_is_none(tmp_path, template, caplog):
    folder = tiny.write_classifier(tmp_path, "qwen3")
    (folder / "chat_template.jinja").write_text(template)
    spec = read_spec(folder)
    assert spec.kind.template is None
    assert source(spec) is None
    assert caplog.text.count(OWN_FILE) == 1


def test_nvidias_ranker_has_the_template_of_its_card(tmp_path):
    folder = tiny.write_classifier(tmp_path, "llama")
    code = "llama_bidirectional_model.LlamaBidirectional"
    tiny.configured(
        folder,
        model_type="llama_bidirec",
        architectures=["LlamaBidirectionalForSequenceClassification"],
        pooling="last",
        auto_map={"AutoModelForSequenceClassification": f"{code}ForSequenceClassification"},
    )
    spec = read_spec(folder)
    assert spec.kind.template.body == NVIDIA.body
    assert source(spec) == "LlamaBidirectionalForSequenceClassification"
    words = AutoTokenizer.from_pretrained(folder)
    pairs = [(QUERY, document) for document in DOCUMENTS]
    encodings = text_reader(spec, EngineConfig()).ask(spec.kind.template, pairs, truncate=True)
    for document, encoding in zip(DOCUMENTS, encodings, strict=True):
        text = f"question:{QUERY} \n \n passage:{document}"
        assert encoding.input_ids.tolist() == words(text)["input_ids"]
