"""Rerankers and classifiers of every family against transformers and sentence-transformers, and
what callers can rely on."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, processors
from transformers import CONFIG_MAPPING, AutoModelForSequenceClassification, AutoTokenizer

from conformance.small import tiny, tolerances, vocabulary
from hybridtei.encoder import Encoder
from hybridtei.errors import (
    EmptyInput,
    InvalidInput,
    UnsupportedArchitecture,
    WeightMismatch,
)
from hybridtei.models.checkpoint.spec import read_spec
from hybridtei.models.families import FAMILIES as RECORDS
from hybridtei.models.text.reader import TextReader
from tests.near import near
from tests.sampled import paired, sampled

FAMILIES = [
    name for name in tiny.FAMILIES if name not in ("gemma", "embedding_gemma2_text", "t5", "mt5")
]
# Those that transformers' own modules run, but for the ones that are refused.
OTHERS = [
    name
    for name in tiny.OTHERS
    if name not in ("dpr", "fnet", "lilt", "longformer", "nystromformer")
]
TEXTS = vocabulary.texts(12)
PAIRS = [
    *pairwise(TEXTS),
    ("", "baka"),
    ("baka", ""),
    (TEXTS[3] * 40, "bulo"),
    ("bulo", TEXTS[3] * 40),
    ("baka " * 300, "bulo " * 300),
]
TOLERANCE = tolerances.LOGITS["float32"]


def theirs(folder, inputs, **options):
    """Logits of each input by itself, without padding, as transformers cuts and computes them."""
    words = AutoTokenizer.from_pretrained(folder, **options)
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, attn_implementation="eager"
    ).eval()
    rows = []
    for item in inputs:
        # Lists, or an empty second side would count as none
        sides = ([item],) if isinstance(item, str) else ([item[0]], [item[1]])
        cut = {"truncation": True, "max_length": vocabulary.LONGEST}
        with torch.inference_mode():
            rows.append(model(**words(*sides, **cut, return_tensors="pt")).logits[0])
    return torch.stack(rows).float().numpy()


def ours(encoder, inputs, **options):
    """Logits in the order of the labels."""
    predictions = encoder.classify(inputs, raw_scores=True, **options)
    rows = [{one.label: one.score for one in row} for row in predictions]
    return np.array([[row[label] for label in encoder.spec.labels] for row in rows])


def close(one, other, tolerance=TOLERANCE):
    near(one, other, tolerance)


@pytest.mark.parametrize(
    ("model_type", "labels"),
    [
        *paired(FAMILIES, [1, 3]),
        *sampled(paired(OTHERS, [1, 3]), [("albert", 1), ("big_bird", 1), ("mixtral", 3)]),
    ],
)
def test_logits_are_those_of_transformers(tmp_path, model_type, labels):
    folder = tiny.write_classifier(tmp_path, model_type, labels)
    encoder = Encoder.load(folder)
    assert encoder.spec.role == ("reranker" if labels == 1 else "classifier")
    expected = theirs(folder, [*TEXTS, *PAIRS])
    close(ours(encoder, [*TEXTS, *PAIRS]), expected)
    assert np.ptp(expected, axis=0).min() > 100 * TOLERANCE


def test_a_longformer_that_classifies_is_refused(tmp_path):
    folder = tiny.write_classifier(tmp_path, "longformer")
    with pytest.raises(UnsupportedArchitecture, match=f"{folder}: config.json: a Longformer"):
        Encoder.load(folder)


def test_the_pooling_that_config_names(tmp_path):
    folder = tiny.write_classifier(tmp_path, "ultrabert", 3, classifier_pooling="mean")
    close(ours(Encoder.load(folder), TEXTS), theirs(folder, TEXTS))


@pytest.mark.parametrize("model_type", ["bert", "xlm-roberta", "roberta"])
def test_a_pair_is_cut_on_the_left_as_transformers_does(tmp_path, model_type):
    folder = tiny.write_classifier(tmp_path, model_type)
    found = ours(Encoder.load(folder), PAIRS, truncation_direction="left")
    close(found, theirs(folder, PAIRS, truncation_side="left"))


@pytest.mark.parametrize("model_type", ["bert", "qwen3"])
def test_half_precision_is_about_the_same(tmp_path, model_type):
    folder = tiny.write_classifier(tmp_path, model_type, 3)
    encoder = Encoder.load(folder, backend="torch", dtype="bfloat16")
    close(ours(encoder, TEXTS), theirs(folder, TEXTS), tolerances.LOGITS["bfloat16"])


# --- what callers can rely on


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    return tiny.write_classifier(tmp_path_factory.mktemp("reranker"), "bert")


@pytest.fixture(scope="module")
def encoder(reranker):
    return Encoder.load(reranker)


def test_ten_thousand_documents_are_held_in_parts(encoder, monkeypatch):
    documents = vocabulary.texts(10_000, most=6)
    sizes = []
    read = TextReader.read_pairs

    def spying(self, pairs, **options):
        sizes.append(len(pairs))
        return read(self, pairs, **options)

    monkeypatch.setattr(TextReader, "read_pairs", spying)
    ranked = encoder.rerank("baka", documents, limit=5)
    assert sum(sizes) == 10_000
    assert max(sizes) <= 256
    assert len(ranked) == 5
    for one in ranked:
        close(one.score, encoder.rerank("baka", [one.text])[0].score)


def test_nothing_to_rank_is_no_answer(encoder):
    assert encoder.rerank("baka", []) == []
    assert encoder.classify([]) == []


@pytest.mark.parametrize(
    ("query", "documents", "options", "error"),
    [
        ("", ["baka", ""], {}, EmptyInput),
        ("baka", ["baka " * 500], {"truncate": False}, InvalidInput),
        ("baka", ["baka " * 50_000], {"truncate": False}, InvalidInput),
        ("baka", [3], {}, InvalidInput),
        (None, ["baka"], {}, InvalidInput),
    ],
)
def test_bad_input_is_refused(encoder, query, documents, options, error):
    with pytest.raises(error):
        encoder.rerank(query, documents, **options)


# --- weights, strictly


NARROW = torch.zeros(1, tiny.HIDDEN)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"classifier.weight": None}, "lack `classifier.weight`"),
        ({"bert.pooler.dense.weight": None}, "lack `bert.pooler.dense.weight`"),
        (
            {"classifier.weight": torch.zeros(2, tiny.HIDDEN), "classifier.bias": torch.zeros(2)},
            "gives 2 logits, config.json names 1",
        ),
        ({"classifier.weight": torch.zeros(1, 5)}, r"shape \[1, 5\]"),
        ({"classifier.out_proj.weight": NARROW}, "hold what config.json does not"),
        ({"score.weight": NARROW}, "hold what config.json does not"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(tmp_path, changes, words):
    folder = tiny.without(tiny.write_classifier(tmp_path, "bert"), *changes)
    added = {name: tensor for name, tensor in changes.items() if tensor is not None}
    tiny.change(folder, lambda tensors: {**tensors, **added})
    with pytest.raises(WeightMismatch, match=words):
        Encoder.load(folder)


def appending(folder, end):
    """The folder's tokenizer with a token behind each text."""
    file = folder / "tokenizer.json"
    raw = Tokenizer.from_file(str(file))
    template = {
        "single": f"$A {end}",
        "pair": f"$A $B {end}",
        "special_tokens": [(end, raw.token_to_id(end))],
    }
    raw.post_processor = processors.TemplateProcessing(**template)
    raw.save(str(file))
    return folder


def batched(folder, inputs):
    """Logits of all inputs in one padded batch of transformers."""
    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, attn_implementation="eager"
    ).eval()
    raw.enable_truncation(vocabulary.LONGEST)
    raw.enable_padding(pad_id=model.config.pad_token_id, pad_token="x")
    encodings = raw.encode_batch([*inputs])
    ids, mask = (
        torch.tensor([getattr(one, name) for one in encodings])
        for name in ("ids", "attention_mask")
    )
    with torch.inference_mode():
        return model(input_ids=ids, attention_mask=mask).logits.float().numpy()


@pytest.mark.parametrize(("backend", "labels"), paired(["ort", "openvino", "torch"], [1, 3]))
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_a_decoder_passes_over_padding_that_ends_a_text(tmp_path, model_type, labels, backend):
    folder = appending(tiny.write_classifier(tmp_path, model_type, labels), "<|endoftext|>")
    inputs = [
        TEXTS[0],
        "<|endoftext|>",
        *pairwise(TEXTS[:5]),
        "baka <|endoftext|> bulo",
        "bulo<|endoftext|><|endoftext|>",
    ]
    expected, encoder = batched(folder, inputs), Encoder.load(folder, backend=backend)
    close(ours(encoder, inputs), expected)
    if labels == 1:
        ranked = encoder.rerank(TEXTS[0], [TEXTS[1]], raw_scores=True)
        close(ranked[0].score, expected[2])


@pytest.mark.parametrize("padding", [None, 5])
def test_a_decoder_keeps_an_end_that_is_no_padding(tmp_path, padding):
    folder = appending(
        tiny.write_classifier(tmp_path, "qwen3", pad_token_id=padding), "<|endoftext|>"
    )
    close(ours(Encoder.load(folder), TEXTS), theirs(folder, TEXTS))


def test_padding_of_a_configuration_that_names_none_is_transformers_default():
    decoders = {name: family for name, family in RECORDS.items() if family.is_decoder}
    default = {name: CONFIG_MAPPING[name]().pad_token_id for name in decoders}
    assert default == {name: family.padding for name, family in decoders.items()}


CHAT_MODELS = {
    "ChatML": "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}"
    "{% endfor %}",
    "Llama 3": "{% for message in messages %}{{ message['role'] + '\\n\\n' + message['content'] | trim }}{% endfor %}",
}


@pytest.mark.parametrize("labels", [1, 2, 3])
@pytest.mark.parametrize("name", CHAT_MODELS)
def test_a_classifier_made_from_a_chat_model_reads_texts(tmp_path, name, labels):
    """Its template renders any role, so it says nothing about rankings."""
    folder = tiny.write_classifier(tmp_path, "qwen3", labels)
    (folder / "chat_template.jinja").write_text(CHAT_MODELS[name])
    if labels == 2:
        tiny.configured(folder, id2label={0: "no", 1: "yes"})
    encoder = Encoder.load(folder)
    assert len(encoder.spec.labels) == labels
    close(ours(encoder, TEXTS), theirs(folder, TEXTS))
    if labels > 1:
        pairs = [*pairwise(TEXTS[:4])]
        close(ours(encoder, pairs), theirs(folder, pairs))


def test_of_several_chat_templates_the_default_joins_a_pair(tmp_path):
    folder = tiny.write_classifier(tmp_path, "qwen3")
    template = CHAT_MODELS["ChatML"]
    listed = [
        {"name": "tools", "template": "{{ tools }}"},
        {"name": "default", "template": template},
    ]
    tiny.edit_json(folder / "tokenizer_config.json", chat_template=listed)
    joined = read_spec(folder).kind.template
    tiny.edit_json(folder / "tokenizer_config.json", chat_template=template)
    assert joined == read_spec(folder).kind.template
    assert joined is not None
