"""Heads that score texts or tag tokens: their labels, and the names of their layers, one row a
family.

Families with the same trunk have different heads: ELECTRA's uses gelu, RoBERTa's tanh; BERT's first
layer is the trunk's "pooler"; decoders apply one matrix without a bias to the last token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hybridtei.errors import LoadError, UnsupportedArchitecture
from hybridtei.models.checkpoint.files import JsonObject
from hybridtei.models.checkpoint.modules import (
    Modules,
    Pooling,
    StepModule,
    gives_scores,
    module_path,
    read_pooling,
    read_steps,
)
from hybridtei.models.checkpoint.weights import Weights, has_weights

Kind = Literal["embedding", "reranker", "classifier", "tagger"]
# The input of the layers: the first token's state, the mean, or the last token's. "late": every
# token's state, and the logits are averaged; "none": every token's state, without pooling.
ScorePooling = Pooling | Literal["late", "none"]


# numpy's, or torch's on a device
Array = Any


@dataclass(frozen=True, slots=True, eq=False)
class LinearLayer:
    """`activation(weight x + bias)`; weight [out, in], bias [out] or None."""

    weight: Array
    bias: Array | None = None
    activation: str = "identity"


@dataclass(frozen=True, slots=True, eq=False)
class NormLayer:
    """LayerNorm: weight [h], bias [h] or None."""

    weight: Array
    bias: Array | None
    eps: float


Layer = LinearLayer | NormLayer


@dataclass(frozen=True, slots=True, eq=False)
class CodeLayers:
    """`top_k(latents x + bias)` of a pooled vector x, normalised first if `eps` is set.
    `SparseHead` describes it."""

    latents: Array
    bias: Array
    active: int
    eps: float | None


@dataclass(frozen=True, slots=True)
class LinearStep:
    """A linear layer by its name. `rows`: use only this row, or the difference of two rows.

    `scale`, `cap`: a row's logit x becomes `scale * x`, then `cap * tanh(x / cap)`, before the
    difference.
    """

    name: str
    activation: str = "identity"
    bias: bool = True
    rows: tuple[int, int | None] | None = None
    scale: float = 1.0
    cap: float | None = None


@dataclass(frozen=True, slots=True)
class NormStep:
    """A LayerNorm of the head, by the name of its weights."""

    name: str
    eps: float
    bias: bool


Step = LinearStep | NormStep | StepModule


@dataclass(frozen=True, slots=True)
class ClassifierHead:
    """The layers from hidden states to logits. `trunk`: the name prefix of the trunk's tensors."""

    pooling: ScorePooling
    steps: tuple[Step, ...]
    trunk: str
    labels: tuple[str, ...]
    multi_label: bool = False
    is_regression: bool = False

    @property
    def kind(self) -> Kind:
        """Return "reranker" for one label, as TEI does, "classifier" for several, "tagger" for
        labels of tokens."""
        if self.pooling == "none":
            return "tagger"
        return "reranker" if len(self.labels) == 1 else "classifier"


Config = Mapping[str, Any]
_Recipe = Callable[[Config], tuple[ScorePooling, tuple[Step, ...]]]
LAST, OUT_PROJ = LinearStep("classifier"), LinearStep("classifier.out_proj")


def _two_layers(name: str, activation: str, last: LinearStep = LAST, key: str = "") -> _Recipe:
    """Two layers on the first token. `activation`: the first layer's, unless config.json has
    another one under `key`."""
    return lambda config: ("cls", (LinearStep(name, config.get(key, activation)), last))


def _longformer(config: Config) -> tuple[ScorePooling, tuple[Step, ...]]:
    raise UnsupportedArchitecture(
        "config.json: a Longformer that classifies lets all tokens see the first, which its trunk "
        "does not; use another model"
    )


def _modernbert(config: Config) -> tuple[ScorePooling, tuple[Step, ...]]:
    pooling = _one_of(config, {"cls": "cls", "mean": "mean"}, "cls")
    return pooling, (*_modernbert_head(config), LAST)


def _modernbert_head(config: Config) -> tuple[Step, ...]:
    bias = bool(config.get("classifier_bias", False))
    activation = config.get("classifier_activation", "gelu")
    norm = NormStep(
        "head.norm", float(config.get("norm_eps", 1e-5)), bool(config.get("norm_bias", False))
    )
    return LinearStep("head.dense", activation, bias), norm


def _eurobert(config: Config) -> tuple[ScorePooling, tuple[Step, ...]]:
    pooling = _one_of(config, {"bos": "cls", "mean": "mean", "late": "late"}, "late")
    return pooling, (LinearStep("dense", "gelu"), LAST)


def _ultrabert(config: Config) -> tuple[ScorePooling, tuple[Step, ...]]:
    return _one_of(config, {"cls": "cls", "mean": "mean"}, "cls"), (LAST,)


def _decoder(config: Config) -> tuple[ScorePooling, tuple[Step, ...]]:
    poolings: Mapping[str, ScorePooling] = {"mean": "mean", "cls": "cls", "lasttoken": "lasttoken"}
    return _one_of(config, poolings, "lasttoken", key="pooling"), (LinearStep("score", bias=False),)


def _one_of(
    config: Config, kinds: Mapping[str, ScorePooling], default: str, key: str = "classifier_pooling"
) -> ScorePooling:
    name = config.get(key, default)
    if not isinstance(name, str) or name not in kinds:
        raise UnsupportedArchitecture(
            f"config.json: `{key}` {name!r}; supported: {', '.join(kinds)}"
        )
    return kinds[name]


# transformers' generic class: one matrix on the last token, or on the vector that NVIDIA's class
# pools.
DECODERS = frozenset(
    {
        "arcee",
        "exaone4",
        "gemma",
        "gemma2",
        "gemma3_text",
        "glm",
        "glm4",
        "helium",
        "llama",
        "ministral",
        "ministral3",
        "mistral",
        "mixtral",
        "nemotron",
        "olmo",
        "olmo2",
        "olmo3",
        "persimmon",
        "phi",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "seed_oss",
        "smollm3",
        "stablelm",
        "starcoder2",
    }
)
ROBERTAS = (
    "roberta",
    "xlm-roberta",
    "xlm-roberta-flash",
    "xlm-roberta-xl",
    "camembert",
    "jina_embeddings_v3",
)
# The default `pad_token_id` of transformers' configurations.
PADDING = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), 0),
    **dict.fromkeys(("glm", "glm4"), 151_329),
    **dict.fromkeys(("olmo", "olmo2", "olmo3", "seed_oss"), 1),
    "helium": 3,
    "ministral3": 11,
    "phi3": 32_000,
    "smollm3": 128_004,
}
_DENSE_TANH = _two_layers("classifier.dense", "tanh", OUT_PROJ)
_DENSE_AS_HIDDEN = _two_layers("classifier.dense", "gelu", OUT_PROJ, "hidden_act")
# model_type -> (prefix of its trunk's tensors, its head)
SEQUENCE = {
    **{
        name: (name, _two_layers(f"{name}.pooler.dense", "tanh"))
        for name in ("bert", "ernie", "gte", "new", "nomic_bert")
    },
    **dict.fromkeys(
        ("jina_bert", "megatron-bert"), ("bert", _two_layers("bert.pooler.dense", "tanh"))
    ),
    "rembert": ("rembert", _two_layers("rembert.pooler.dense", "tanh")),
    "albert": ("albert", _two_layers("albert.pooler", "tanh")),
    **dict.fromkeys(ROBERTAS, ("roberta", _DENSE_TANH)),
    "data2vec-text": ("data2vec_text", _DENSE_TANH),
    "mpnet": ("mpnet", _DENSE_TANH),
    "roformer": ("roformer", _DENSE_AS_HIDDEN),
    "big_bird": ("bert", _DENSE_AS_HIDDEN),
    "longformer": ("longformer", _longformer),
    "electra": ("electra", _two_layers("classifier.dense", "gelu", OUT_PROJ)),
    "distilbert": ("distilbert", _two_layers("pre_classifier", "relu")),
    "modernbert": ("model", _modernbert),
    **dict.fromkeys(
        ("deberta", "deberta-v2"),
        ("deberta", _two_layers("pooler.dense", "gelu", key="pooler_hidden_act")),
    ),
    "eurobert": ("model", _eurobert),
    "ultrabert": ("model", _ultrabert),
    **dict.fromkeys(DECODERS, ("model", _decoder)),
}


def read_classifier(
    folder: Path, home: Path, modules: Modules, config: JsonObject, hidden_size: int
) -> ClassifierHead | None:
    """Return the head that gives logits, or None. A checkpoint with a pooling module and no head
    weights is an embedder: its class name is left over from its base model. Raises LoadError and
    its subclasses."""
    if gives_scores(folder, modules):
        return in_modules(folder, modules, config, hidden_size)
    head = find_classifier(
        home, str(config["model_type"]), tuple(config.get("architectures") or ()), config
    )
    if head is None or module_path(modules, "Pooling") is None or not has_weights(home):
        return head
    last = head.steps[-1]
    if isinstance(last, LinearStep) and not Weights.open(home).has(f"{last.name}.weight"):
        return None
    return head


def find_classifier(
    folder: Path, model_type: str, architectures: tuple[str, ...], config: JsonObject
) -> ClassifierHead | None:
    """Return the head that `architectures` names, or None for an embedding model. Raises LoadError
    and its subclasses.

    Some GTE embedding models name `NewForTokenClassification`; they have no labels, or also name
    `NewModel`.
    """
    names = [name for name in architectures if name.endswith("Classification")]
    labelled = config.get("id2label") is not None and config.get("label2id") is not None
    is_tagger = labelled and "NewModel" not in architectures
    names = [name for name in names if name != "NewForTokenClassification" or is_tagger]
    if not names:
        return None
    name = names[0]
    if (
        not name.endswith(("ForSequenceClassification", "ForTokenClassification"))
        or model_type not in SEQUENCE
    ):
        served = ", ".join(sorted(SEQUENCE))
        raise UnsupportedArchitecture(
            f"{config.file}: {name} of {model_type!r} is not supported; classifiers supported: "
            f"{served}"
        )
    # Alibaba's name for transformers' gte
    trunk, recipe = SEQUENCE["new" if name.startswith("NewFor") else model_type]
    labels = _labels(config)
    if name.endswith("ForTokenClassification"):
        tags: tuple[Step, ...] = (LAST,)
        if model_type in DECODERS:
            has_bias = bool(config.get("token_classification_bias", True))
            tags = (LinearStep("score", bias=has_bias),)
        elif model_type == "modernbert":
            tags = (*_modernbert_head(config), LAST)
        return ClassifierHead("none", tags, f"{trunk}.", labels)
    try:
        pooling, steps = recipe(config)
    except UnsupportedArchitecture as error:
        raise UnsupportedArchitecture(f"{folder}: {error}") from error
    return ClassifierHead(
        pooling,
        steps,
        f"{trunk}.",
        labels,
        config.get("problem_type") == "multi_label_classification",
        config.get("problem_type") == "regression",
    )


def skipped_padding(head: ClassifierHead | None, config: Config) -> int | None:
    """Return the token id to skip at the end of a text, or None.

    transformers' class reads the rightmost token that is not padding; an appended EOS may be the
    padding token. With causal attention, removing the skipped tokens gives the same result.
    """
    if head is None or head.pooling != "lasttoken":
        return None
    model_type = str(config.get("model_type"))
    last = head.steps[-1]
    # transformers' generic class of a decoder, not a publisher's own
    is_generic = (
        model_type in DECODERS
        and isinstance(last, LinearStep)
        and last.name == "score"
        and "pooling" not in config
    )
    both_ways = config.get("is_causal") is False or config.get("use_bidirectional_attention")
    if not is_generic or both_ways:
        return None
    padding = config.get("pad_token_id", PADDING.get(model_type))
    return padding if isinstance(padding, int) else None


def between(head: ClassifierHead, yes: int, no: int, label: str) -> ClassifierHead:
    """Turn a head with two labels into a ranker by the difference of the logits: its sigmoid equals
    the softmax."""
    *first, last = head.steps
    assert isinstance(last, LinearStep)
    return replace(head, steps=(*first, replace(last, rows=(yes, no))), labels=(label,))


def in_modules(
    folder: Path, modules: Modules, config: JsonObject, hidden_size: int
) -> ClassifierHead:
    """Return the head of a cross-encoder whose layers are sentence-transformers modules; the last
    one gives the logits. Labels come from config.json if their number fits. Raises LoadError and
    its subclasses."""
    poolings = read_pooling(folder, None, modules, "", config)
    steps = read_steps(folder, modules, None, hidden_size * len(poolings))
    count, declared = steps[-1].out_features, config.get("id2label")
    if len(poolings) > 1:
        raise UnsupportedArchitecture(
            f"{folder}: scores of {len(poolings)} concatenated poolings are not supported"
        )
    labels = tuple(f"LABEL_{i}" for i in range(count))
    if isinstance(declared, dict) and len(declared) == count:
        labels = _labels(config)
    return ClassifierHead(poolings[0], steps, "", labels)


def yes_of_two(head: ClassifierHead) -> ClassifierHead:
    """Turn a head with the labels yes and no into a ranker. Return any other head unchanged."""
    is_yes = [label.lower() in ("yes", "1", "true") for label in head.labels]
    if len(is_yes) != 2 or is_yes.count(True) != 1:
        return head
    yes = is_yes.index(True)
    return between(head, yes, 1 - yes, head.labels[yes])


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """What transformers' class of a language model does after its last state. `tied`: its default
    of `tie_word_embeddings`."""

    tied: bool = False
    bias: bool = False
    table: str = "model.embed_tokens"
    heads: tuple[str, ...] = ("lm_head",)


TIED = LanguageModel(tied=True)
# The last four are run by transformers' own class.
LANGUAGE_MODELS = {
    **dict.fromkeys(DECODERS, LanguageModel()),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "smollm3", "starcoder2"), TIED),
    "phi": LanguageModel(bias=True),
    **dict.fromkeys(("cohere", "cohere2"), TIED),
    "granite": LanguageModel(),
    "gpt_neox": LanguageModel(table="gpt_neox.embed_in", heads=("embed_out", "lm_head")),
}


def language_model(folder: Path, config: JsonObject, yes: int, no: int | None) -> ClassifierHead:
    """Return a ranker by the last token's logit of `yes` minus that of `no`.

    A head in the weights counts before `tie_word_embeddings`, as in transformers.
    """
    model_type = str(config["model_type"])
    model = LANGUAGE_MODELS[model_type]
    tensors = Weights.open(folder).names() if has_weights(folder) else frozenset[str]()
    name = next((head for head in model.heads if f"{head}.weight" in tensors), model.heads[0])
    if f"{name}.weight" not in tensors and config.flag("tie_word_embeddings", model.tied):
        name = model.table
    step = LinearStep(
        name,
        bias=model.bias,
        rows=(yes, no),
        scale=_logit_scale(model_type, config),
        cap=_logit_cap(model_type, config),
    )
    trunk = model.table.partition(".")[0]
    return ClassifierHead("lasttoken", (step,), f"{trunk}.", ("yes",))


def _logit_scale(model_type: str, config: JsonObject) -> float:
    if model_type == "granite":
        return 1 / config.number("logits_scaling", 1.0)
    if model_type in ("cohere", "cohere2"):
        return config.number("logit_scale", 0.0625)
    return 1.0


def _logit_cap(model_type: str, config: JsonObject) -> float | None:
    """Return Gemma's cap of logits. Null turns off the default of Gemma 2."""
    if model_type == "gemma2" and "final_logit_softcapping" not in config:
        return 30.0
    if model_type in ("gemma2", "gemma3_text") and config.get("final_logit_softcapping"):
        return config.number("final_logit_softcapping")
    return None


def _labels(config: JsonObject) -> tuple[str, ...]:
    """Return the labels by number. Without labels in config.json they get transformers' default
    names."""
    labels = config.get("id2label")
    if labels is None:
        return tuple(f"LABEL_{i}" for i in range(config.count("num_labels", 2)))
    in_order: list[Any] = []
    if isinstance(labels, dict):
        in_order = [labels.get(str(i)) for i in range(len(labels))]
    if not in_order or not all(isinstance(label, str | int | float) for label in in_order):
        raise LoadError(
            f'{config.file}: `id2label` should name a label for each of "0", "1", …, and is '
            f"{labels!r}"
        )
    return tuple(map(str, in_order))
