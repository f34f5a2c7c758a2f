"""Taggers of every kind of tokenizer against transformers' pipeline, with all five strategies, on
texts full of Unicode."""

import random
from typing import get_args

import pytest
import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer, pipeline

from conformance.small import tiny, tolerances, vocabulary
from hybridtei.encoder import Encoder
from hybridtei.errors import EmptyInput, InvalidInput, WeightMismatch
from hybridtei.inference.tasks.label import Aggregation
from tests.near import near
from tests.sampled import sampled

FAMILIES = [
    "bert",
    "electra",
    "distilbert",
    "deberta-v2",
    "modernbert",
    "nomic_bert",
    "xlm-roberta",
    "camembert",
    "mpnet",
    "gte",
]
FAMILIES += ["roberta", "eurobert", "qwen3", "llama", "jina_embeddings_v3"]
# By transformers' own modules
FAMILIES += ["albert", "ernie", "longformer"]
# Of tokenizers
KINDS = ("bert", "xlm-roberta", "roberta")
LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "ORG", "foo-bar"]
TOLERANCE = tolerances.LOGITS["float32"]
ODD = [
    "U.K.",
    "New",
    "York",
    "É",
    "e\u0301",
    "naïve",
    "İstanbul",
    "ß",
    "東京",
    "日本語",
    "😀",
    "👩‍👩‍👧",
    "🇩🇪",
    "שלום",
    "مرحبا",
]
ODD += [
    "don't",
    "x-y",
    "(",
    ")",
    ",",
    "?",
    "—",
    "Ａ",
    "ﬁ",
    "\u200b",
    "a\u00a0b",
    "12,5",
    "%",
    "[SEP]",
    "</s>",
]
BETWEEN = [" ", " ", " ", " ", "  ", "\n", "\t", "", "\u00a0", "\u3000"]


def sentences(count):
    draw = random.Random(7)
    made = []
    while len(made) < count:
        words = draw.choices(vocabulary.WORDS, k=draw.randint(0, 9)) + draw.choices(
            ODD, k=draw.randint(0, 5)
        )
        draw.shuffle(words)
        words = [word.upper() if draw.random() < 0.15 else word for word in words]
        text = "".join(word + draw.choice(BETWEEN) for word in words)
        if text.strip():
            made.append(text)
    return made


SENTENCES = sentences(70)


def tagger(folder, model_type, **settings):
    names = dict(enumerate(LABELS))
    more = {"id2label": names, "label2id": {name: i for i, name in names.items()}, **settings}
    folder = tiny.write_classifier(
        folder, model_type, len(LABELS), task="TokenClassification", **more
    )
    model = AutoModelForTokenClassification.from_pretrained(folder)
    head = model.score if hasattr(model, "score") else model.classifier
    # So that what is likely is so by more than rounding, and neighbours often agree
    with torch.no_grad():
        head.weight.mul_(3)
        head.bias.copy_(torch.tensor([1.0, 0, 0.5, 0, 0.5, 0.3, 0.2]))
    model.save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
@pytest.mark.parametrize(
    ("model_type", "count"),
    sampled(
        [*((family, 20) for family in FAMILIES), *((family, 70) for family in KINDS)],
        [("bert", 20), ("qwen3", 20), ("albert", 20)],
    ),
)
def test_spans_are_those_of_the_pipeline(tmp_path, model_type, count):
    folder = tagger(tmp_path, model_type)
    texts = SENTENCES[:count]
    encoder, theirs = (
        Encoder.load(folder),
        pipeline("token-classification", model=str(folder), device="cpu"),
    )
    seen = set()
    for strategy in get_args(Aggregation):
        ignored = [] if strategy == "none" else ["O"]
        expected = [
            theirs(text, aggregation_strategy=strategy, ignore_labels=ignored) for text in texts
        ]
        found = encoder.tag(texts, aggregation_strategy=strategy)
        key = "entity" if strategy == "none" else "entity_group"
        for spans, entities in zip(found, expected, strict=True):
            assert [(one.start, one.end, one.label) for one in spans] == [
                (one["start"], one["end"], one[key]) for one in entities
            ]
            near(
                [one.score for one in spans],
                [one["score"] for one in entities],
                TOLERANCE,
            )
            seen |= {one.label for one in spans}
    # Or it would prove little
    assert len(seen) > 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tagger(tmp_path_factory.mktemp("tagger"), "bert")


@pytest.fixture(scope="module")
def encoder(folder):
    return Encoder.load(folder)


@pytest.mark.parametrize("direction", ["left", "right"])
def test_offsets_are_into_the_whole_text_however_it_was_cut(encoder, folder, direction):
    text = " ".join(vocabulary.texts(20, most=60))
    (spans,) = encoder.tag(text, aggregation_strategy="none", truncation_direction=direction)
    words = AutoTokenizer.from_pretrained(folder, truncation_side=direction)
    expected = words(
        text, truncation=True, max_length=vocabulary.LONGEST, return_offsets_mapping=True
    )["offset_mapping"]
    assert [(one.start, one.end) for one in spans] == expected[1:-1]
    huge = "baka " * 20_000 + "bulo"
    (spans,) = encoder.tag(huge, aggregation_strategy="none", truncation_direction=direction)
    assert {huge[one.start : one.end] for one in spans} <= {"baka", "bulo"}
    assert spans[-1].end == (len(huge) if direction == "left" else 126 * 5 - 1)


def test_small_letters_keep_their_places(tmp_path):
    folder = tagger(tmp_path, "bert")
    tiny.write_json(folder / "sentence_bert_config.json", {"do_lower_case": True})
    (spans,) = Encoder.load(folder).tag("İ BAKA", aggregation_strategy="none")
    assert (spans[-1].start, spans[-1].end) == (2, 6)


@pytest.mark.parametrize(
    ("texts", "options", "error"),
    [
        (["baka", ""], {}, EmptyInput),
        ([3], {}, InvalidInput),
        (["baka"], {"aggregation_strategy": "median"}, InvalidInput),
        (["baka " * 500], {"truncate": False}, InvalidInput),
        (["baka " * 20_000], {"truncate": False}, InvalidInput),
    ],
)
def test_bad_input_is_refused(encoder, texts, options, error):
    with pytest.raises(error):
        encoder.tag(texts, **options)


def test_labels_and_weights_must_agree(tmp_path):
    folder = tiny.configured(tagger(tmp_path, "bert"), id2label={"0": "O"})
    with pytest.raises(WeightMismatch, match="names 1 labels"):
        Encoder.load(folder)
