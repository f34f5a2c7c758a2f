"""Variants of checkpoints with a head: rerankers, classifiers, taggers, SPLADE, late interaction,
static tables."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import CrossEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.cross_encoder.modules.logit_score import LogitScore
from transformers import AutoTokenizer

from conformance.checkpoints.build import (
    Case,
    Step,
    as_bin,
    case,
    chain,
    config,
    sbert,
    tensors,
    words,
)
from conformance.checkpoints.tokenizers import llama_template
from conformance.checkpoints.words import UNTYPED, write_tokenizer

# As TEI pools where nothing is declared
CLS = (chain("Pooling", pooling_mode_cls_token=True),)
RANKS = {"num_labels": 1}
LABELS = {"num_labels": 3}
POOLED = {"classifier_pooling": "mean"}
NAMES = {"id2label": {0: "no", 1: "yes"}, "label2id": {"no": 0, "yes": 1}, "num_labels": 2}
HEADED = (
    "bert",
    "roberta",
    "xlmr",
    "camembert",
    "distilbert",
    "electra",
    "deberta-v3",
    "deberta-v1",
    "albert",
    "modernbert",
    "nomic",
    "gte",
    "jina3",
    "eurobert",
    "qwen2",
    "qwen3",
    "mistral",
    "llama",
    "gemma2",
    "gemma3-text",
    "phi3",
    "longformer",
    "big-bird",
    "xlnet",
    "ernie",
    "t5-encoder",
    "bart",
    "roformer",
    "mobilebert",
    "mixtral",
    "smollm3",
    "data2vec-text",
)


def scored(kind: str, labels: Mapping[str, Any], base: str, *steps: Step, **settings: Any) -> Case:
    return Case(base, {**labels, **settings}, steps, kind, "ForSequenceClassification")


ranker = partial(scored, "reranker", RANKS)
classifier = partial(scored, "classifier", LABELS)


def tagger(base: str) -> Case:
    return Case(base, LABELS, (), "tagger", "ForTokenClassification")


def families() -> dict[str, Case]:
    found = {}
    for name in HEADED:
        found[f"ce-{name}"], found[f"cls3-{name}"] = ranker(name), classifier(name)
    for name in ("modernbert", "eurobert"):
        found[f"ce-{name}-mean"], found[f"cls3-{name}-mean"] = (
            ranker(name, **POOLED),
            classifier(name, **POOLED),
        )
    found["ce-eurobert-bos"] = ranker("eurobert", classifier_pooling="bos")
    found["cls3-eurobert-late"] = classifier("eurobert", classifier_pooling="late")
    found["cls3-modernbert-biases"] = classifier("modernbert", classifier_bias=True, norm_bias=True)
    tagged = (
        "bert",
        "bert-cased",
        "qwen2",
        "llama",
        "eurobert",
        "albert",
        "nomic",
        "gte",
        "longformer",
        "ernie",
        "deberta-v1",
    )
    return found | {f"tag-{name}": tagger(name) for name in tagged}


def saved(folder: Path) -> None:
    """Save a CrossEncoder in sentence-transformers 6's layout."""
    CrossEncoder(str(folder), device="cpu").save_pretrained(str(folder))


def other_words(kind: str) -> Step:
    """Another family's tokenizer, of fewer pieces than the model has rows."""
    return lambda folder: write_tokenizer(folder, kind, longest=128)


def causal(base: str, **prompts: str) -> Case:
    """A language model that ranks by two tokens, as sentence-transformers 6 saves it."""

    def step(folder: Path) -> None:
        yes, no = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(["ba", "be"])
        template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
        (folder / "chat_template.jinja").write_text(template)
        steps = [Transformer(str(folder), transformer_task="text-generation"), LogitScore(yes, no)]
        CrossEncoder(
            modules=steps, device="cpu", num_labels=1, prompts=prompts or None
        ).save_pretrained(str(folder))

    return Case(base, steps=(step,), kind="reranker", task="ForCausalLM", options={"plain": True})


def heads() -> dict[str, Case]:
    classes = {str(i): f"label-{i}" for i in range(3)}
    act = {"hidden_act": "relu"}
    old_act = {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}
    twins = config(id2label=dict.fromkeys(classes, "x"))
    one_name = case(
        "bert",
        twins,
        kind="classifier",
        task="ForSequenceClassification",
        settings=LABELS,
        by_design="labels of one name",
    )
    others = {
        name: Case("bert", {}, (), "embedding", f"For{name}", oracle=CLS)
        for name in (
            "QuestionAnswering",
            "MultipleChoice",
            "NextSentencePrediction",
            "MaskedLM",
            "PreTraining",
        )
    }
    return {
        "multi-label": classifier("bert", config(problem_type="multi_label_classification")),
        "regression-3": classifier("bert", config(problem_type="regression")),
        "no-id2label": classifier("bert", config(id2label=..., label2id=..., num_labels=3)),
        "only-id2label": classifier("bert", config(label2id=..., id2label=classes)),
        "id2label-int-labels": classifier("bert", config(id2label={"0": 0, "1": 1}), num_labels=2),
        "id2label-duplicate": one_name,
        "id2label-unordered": classifier("bert", config(id2label=dict(reversed(classes.items())))),
        "ce-activation-old": ranker("bert", config(**old_act)),
        "ce-max-length-small": ranker("bert", words(model_max_length=32)),
        "ce-sbert-config": ranker("bert-cased", sbert(max_seq_length=32, do_lower_case=True)),
        "ce-no-type-ids": ranker("bert", words(model_input_names=UNTYPED)),
        "ce-bert-with-roberta-tokenizer": ranker("bert", other_words("roberta"), vocab_size=600),
        "ce-bert-with-xlmr-tokenizer": ranker("bert", other_words("unigram")),
        "ce-prefix-none": ranker(
            "bert",
            tensors(lambda found: {name.removeprefix("bert."): one for name, one in found.items()}),
        ),
        "ce-bin": ranker("bert", as_bin()),
        "ce-missing-classifier": ranker(
            "bert",
            tensors(
                lambda found: {
                    name: one for name, one in found.items() if not name.startswith("classifier")
                }
            ),
        ),
        "ce-extra-head": ranker(
            "bert", tensors(lambda found: {**found, "cls.predictions.bias": torch.zeros(4)})
        ),
        "ce-own-arch": ranker("bert", config(architectures=["MyReranker"])),
        "ce-no-arch": ranker("bert", config(architectures=...)),
        "electra-act": ranker("electra", **act),
        "deberta-pooler-act": ranker("deberta-v3", pooler_hidden_act="tanh"),
        "deberta-pooler-size": ranker("deberta-v3", pooler_hidden_size=32),
        "modernbert-act": ranker("modernbert", classifier_activation="relu"),
        "modernbert-2": classifier("modernbert", **NAMES),
        "distilbert-act": ranker("distilbert", activation="relu"),
        "qwen3-2-labels": classifier("qwen3", **NAMES),
        "qwen3-pad-other": classifier("qwen3", pad_token_id=1),
        "llama-pad-is-eos": classifier("llama", llama_eos),
        "llama-bidirectional": ranker("llama", config(is_causal=False)),
        "xlmr-wrong-arch-roberta": ranker(
            "xlmr", config(architectures=["RobertaForSequenceClassification"])
        ),
        "label-names-score": ranker("xlmr", config(id2label={"0": "score"}, label2id={"score": 0})),
        **{f"st6-{base}": ranker(base, saved) for base in ("bert", "xlmr", "modernbert")},
        "st6-max-length": ranker("bert", words(model_max_length=32), saved),
        "qwen3-causal-plain": Case("qwen3", task="ForCausalLM"),
        **{f"bert-for-{name.replace('Prediction', '')}": one for name, one in others.items()},
    }


def llama_eos(folder: Path) -> None:
    """EOS after each text, which pads as well."""
    llama_template(bos=True, eos=True)(folder)


HEADS = {**families(), **{f"h-{name}": one for name, one in heads().items()}}
