"""Heads that score texts or tag tokens: labels, and the layers by name, one row a family.

Families that share a trunk do not share a head. ELECTRA's has gelu where RoBERTa's has tanh; BERT's first layer
is the trunk's "pooler"; decoders have one matrix without a bias, on the last token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hybridtei.checkpoint.files import positive
from hybridtei.errors import LoadError, UnsupportedArchitecture

Kind = Literal["embedding", "reranker", "classifier", "tagger"]
# Whose state the layers get: the first token's, the mean, the last token's; "late": each token's, and the mean of what they
# make of it; "none": each token's, and that is the answer.
ScorePooling = Literal["cls", "mean", "lasttoken", "late", "none"]


@dataclass(frozen=True, slots=True)
class LinearStep:
    """A linear layer by its name. `rows`: of all its rows, one less the other is all that counts, or one alone."""

    name: str
    activation: str = "identity"
    bias: bool = True
    rows: tuple[int, int | None] | None = None


@dataclass(frozen=True, slots=True)
class NormStep:
    """A LayerNorm of the head, by the name of its weights."""

    name: str
    eps: float
    bias: bool


Step = LinearStep | NormStep


@dataclass(frozen=True, slots=True)
class ClassifierHead:
    """From hidden states to logits. `trunk`: what the names of all other tensors begin with."""

    pooling: ScorePooling
    steps: tuple[Step, ...]
    trunk: str
    labels: tuple[str, ...]
    multi_label: bool = False

    @property
    def kind(self) -> Kind:
        """TEI's rule: one label ranks, several classify."""
        if self.pooling == "none":
            return "tagger"
        return "reranker" if len(self.labels) == 1 else "classifier"


Config = Mapping[str, Any]
_Recipe = Callable[[Config], tuple[ScorePooling, tuple[Step, ...]]]
LAST = LinearStep("classifier")


def _pooler(trunk: str) -> _Recipe:
    return lambda config: ("cls", (LinearStep(f"{trunk}.pooler.dense", "tanh"), LAST))


def _dense_out(activation: str) -> _Recipe:
    return lambda config: ("cls", (LinearStep("classifier.dense", activation), LinearStep("classifier.out_proj")))


def _deberta(config: Config) -> tuple[ScorePooling, tuple[Step, ...]]:
    return "cls", (LinearStep("pooler.dense", config.get("pooler_hidden_act", "gelu")), LAST)


def _distilbert(config: Config) -> tuple[ScorePooling, tuple[Step, ...]]:
    return "cls", (LinearStep("pre_classifier", "relu"), LAST)


def _modernbert(config: Config) -> tuple[ScorePooling, tuple[Step, ...]]:
    return _one_of(config, {"cls": "cls", "mean": "mean"}, "cls"), (*_modernbert_head(config), LAST)


def _modernbert_head(config: Config) -> tuple[Step, ...]:
    bias, activation = bool(config.get("classifier_bias", False)), config.get("classifier_activation", "gelu")
    norm = NormStep("head.norm", float(config.get("norm_eps", 1e-5)), bool(config.get("norm_bias", False)))
    return LinearStep("head.dense", activation, bias), norm


def _eurobert(config: Config) -> tuple[ScorePooling, tuple[Step, ...]]:
    return _one_of(config, {"bos": "cls", "mean": "mean", "late": "late"}, "late"), (LinearStep("dense", "gelu"), LAST)


def _decoder(config: Config) -> tuple[ScorePooling, tuple[Step, ...]]:
    return "lasttoken", (LinearStep("score", bias=False),)


def _one_of(config: Config, known: Mapping[str, ScorePooling], default: str) -> ScorePooling:
    name = config.get("classifier_pooling", default)
    if name not in known:
        raise UnsupportedArchitecture(f"config.json: `classifier_pooling` {name!r}; served: {', '.join(known)}")
    return known[name]


# transformers' generic class: one matrix on the last token.
DECODERS = frozenset(
    {
        *("gemma", "gemma2", "gemma3_text", "glm", "glm4", "helium", "llama", "ministral", "mistral", "olmo2", "phi3"),
        *("qwen2", "qwen3", "seed_oss", "smollm3", "stablelm", "starcoder2"),
    }
)
# model_type -> (what its trunk's tensors begin with, its head)
SEQUENCE: Mapping[str, tuple[str, _Recipe]] = {
    "bert": ("bert", _pooler("bert")),
    "gte": ("gte", _pooler("gte")),
    "nomic_bert": ("nomic_bert", _pooler("nomic_bert")),
    "roberta": ("roberta", _dense_out("tanh")),
    "xlm-roberta": ("roberta", _dense_out("tanh")),
    "camembert": ("roberta", _dense_out("tanh")),
    "jina_embeddings_v3": ("roberta", _dense_out("tanh")),
    "mpnet": ("mpnet", _dense_out("tanh")),
    "electra": ("electra", _dense_out("gelu")),
    "distilbert": ("distilbert", _distilbert),
    "modernbert": ("model", _modernbert),
    "deberta": ("deberta", _deberta),
    "deberta-v2": ("deberta", _deberta),
    "eurobert": ("model", _eurobert),
    **dict.fromkeys(DECODERS, ("model", _decoder)),
}


def find_classifier(folder: Path, model_type: str, architectures: tuple[str, ...], config: Config) -> ClassifierHead | None:
    """The head that `architectures` names, or None of an embedding model. Raises LoadError and its kinds.

    TEI's trap: some GTE repositories name `NewForTokenClassification` and are embedding models; they have no labels.
    """
    names = [name for name in architectures if name.endswith("Classification")]
    labelled = config.get("id2label") is not None and config.get("label2id") is not None
    names = [name for name in names if name != "NewForTokenClassification" or labelled]
    if not names:
        return None
    file = folder / "config.json"
    name = names[0]
    if not name.endswith(("ForSequenceClassification", "ForTokenClassification")) or model_type not in SEQUENCE:
        served = ", ".join(sorted(SEQUENCE))
        raise UnsupportedArchitecture(f"{file}: {name} of {model_type!r} is not served; classifiers served: {served}")
    trunk, recipe = SEQUENCE[model_type]
    labels = _labels(config, file)
    if name.endswith("ForTokenClassification"):
        return ClassifierHead("none", _token_steps(model_type, config), f"{trunk}.", labels)
    try:
        pooling, steps = recipe(config)
    except UnsupportedArchitecture as error:
        raise UnsupportedArchitecture(f"{folder}: {error}") from error
    return ClassifierHead(pooling, steps, f"{trunk}.", labels, config.get("problem_type") == "multi_label_classification")


def _token_steps(model_type: str, config: Config) -> tuple[Step, ...]:
    if model_type in DECODERS:
        return (LinearStep("score", bias=bool(config.get("token_classification_bias", True))),)
    return (*_modernbert_head(config), LAST) if model_type == "modernbert" else (LAST,)


def between(head: ClassifierHead, yes: int, no: int, label: str) -> ClassifierHead:
    """A head of two labels as a ranker: how much more one is meant than the other, whose sigmoid is their softmax."""
    *first, last = head.steps
    assert isinstance(last, LinearStep)
    return replace(head, steps=(*first, replace(last, rows=(yes, no))), labels=(label,))


def yes_of_two(head: ClassifierHead) -> ClassifierHead:
    """A head whose two labels mean yes and no as a ranker; any other as it is."""
    said = [label.lower() in ("yes", "1", "true") for label in head.labels]
    if len(said) != 2 or said.count(True) != 1:
        return head
    yes = said.index(True)
    return between(head, yes, 1 - yes, head.labels[yes])


def language_model(yes: int, no: int | None, *, tied: bool) -> ClassifierHead:
    """The logit of one token at the end of a text, less that of another: a ranker. `tied`: the table of words is the head."""
    name = "model.embed_tokens" if tied else "lm_head"
    return ClassifierHead("lasttoken", (LinearStep(name, bias=False, rows=(yes, no)),), "model.", ("yes",))


def _labels(config: Config, file: Path) -> tuple[str, ...]:
    """In the order of their numbers; where config.json is silent, what transformers would call them."""
    named = config.get("id2label")
    if named is None:
        count = positive(config, "num_labels", file) if config.get("num_labels") is not None else 2
        return tuple(f"LABEL_{i}" for i in range(count))
    wanted = [str(i) for i in range(len(named))] if isinstance(named, dict) else []
    if not wanted or sorted(named) != sorted(wanted) or not all(isinstance(label, str) for label in named.values()):
        raise LoadError(f'{file}: `id2label` should name a label for each of "0", "1", …, and is {named!r}')
    return tuple(named[key] for key in wanted)
