"""The kind of a checkpoint, by TEI's rules; its labels in order; and refusals by name."""

import pytest

from conformance.small import tiny
from hybridtei.batch import Head
from hybridtei.errors import LoadError, UnsupportedArchitecture
from hybridtei.models.checkpoint.spec import read_spec
from tests.models.refused import raised


def told(folder, **settings):
    """A copy of a model that says other things of itself, and has no modules, which would say that
    it embeds."""
    (folder / "modules.json").unlink(missing_ok=True)
    tiny.configured(folder, **settings)
    return folder


def names(count):
    return {
        "id2label": {str(i): f"l{i}" for i in range(count)},
        "label2id": {f"l{i}": i for i in range(count)},
    }


@pytest.mark.parametrize(
    ("architecture", "labels", "kind", "head"),
    [
        ("BertModel", 5, "embedding", Head.DENSE),
        ("BertForMaskedLM", 1, "embedding", Head.DENSE),
        ("BertForSequenceClassification", 1, "reranker", Head.SCORES),
        ("BertForSequenceClassification", 2, "classifier", Head.SCORES),
        ("BertForTokenClassification", 1, "tagger", Head.TAGS),
        ("NewForTokenClassification", 2, "tagger", Head.TAGS),
    ],
)
def test_the_kind_is_told_by_architecture_and_labels(
    bert, copied, architecture, labels, kind, head
):
    spec = read_spec(told(copied(bert), architectures=[architecture], **names(labels)))
    assert spec.role == kind
    assert head in spec.heads
    assert spec.labels == (() if kind == "embedding" else tuple(f"l{i}" for i in range(labels)))


@pytest.mark.parametrize("lost", ["id2label", "label2id"])
def test_a_gte_that_calls_itself_a_tagger_without_labels_embeds(bert, copied, lost):
    folder = told(
        copied(bert), architectures=["NewForTokenClassification"], **{**names(2), lost: ...}
    )
    assert read_spec(folder).role == "embedding"


def test_splade_is_asked_for_before_the_architectures_are(splade, copied):
    folder = told(
        copied(splade),
        architectures=["BertForMaskedLM", "BertForSequenceClassification"],
        **names(1),
    )
    assert read_spec(folder, pooling="splade").is_splade
    assert read_spec(folder).role == "reranker"


@pytest.mark.parametrize(
    ("settings", "labels"),
    [
        ({}, ("LABEL_0", "LABEL_1")),
        ({"num_labels": 1}, ("LABEL_0",)),
        ({"id2label": {"1": "no", "0": "yes"}}, ("yes", "no")),
        (
            {"id2label": {str(i): f"l{i}" for i in (10, 2, 1, 0, 3, 4, 5, 6, 7, 8, 9)}},
            tuple(f"l{i}" for i in range(11)),
        ),
    ],
)
def test_labels_come_in_the_order_of_their_numbers(bert, copied, settings, labels):
    folder = told(copied(bert), architectures=["BertForSequenceClassification"], **settings)
    assert read_spec(folder).labels == labels


def test_labels_that_are_none(folder):
    for value in ({}, {"0": "a", "2": "b"}, {"a": "b"}, {"0": ["a"]}, ["a"], "a", {"00": "a"}):
        told(folder, architectures=["BertForSequenceClassification"], id2label=value)
        assert "id2label" in raised(LoadError, folder, "config.json")


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [
        ("xlnet", "XLNetForSequenceClassification"),
        ("bert", "BertForImageClassification"),
        ("layoutlm", "LayoutLMForTokenClassification"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(bert, copied, model_type, architecture):
    folder = told(copied(bert), model_type=model_type, architectures=[architecture])
    assert architecture in raised(UnsupportedArchitecture, folder, "config.json")


@pytest.mark.parametrize("pooling", ["max", 5, None])
def test_a_pooling_of_classifiers_that_is_not_known(tmp_path, pooling):
    folder = told(tiny.write_classifier(tmp_path, "modernbert", 3), classifier_pooling=pooling)
    assert "classifier_pooling" in raised(UnsupportedArchitecture, folder, "")


@pytest.mark.parametrize(
    ("settings", "activation"),
    [
        ({}, None),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            "Identity",
        ),
        (
            {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"},
            "Sigmoid",
        ),
    ],
)
def test_what_sentence_transformers_would_put_on_a_score(bert, copied, settings, activation):
    folder = told(
        copied(bert), architectures=["BertForSequenceClassification"], **names(1), **settings
    )
    assert read_spec(folder).kind.activation == activation
