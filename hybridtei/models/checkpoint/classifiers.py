"""Heads that score texts or tag tokens, as a checkpoint's files declare them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from hybridtei.errors import LoadError, UnsupportedArchitecture
from hybridtei.models.checkpoint.checkpoint import Checkpoint
from hybridtei.models.checkpoint.files import JsonObject
from hybridtei.models.checkpoint.folder import Folder
from hybridtei.models.checkpoint.modules import (
    StepModule,
    gives_scores,
    read_pooling,
    read_steps,
)
from hybridtei.models.families import family_of, that_have
from hybridtei.models.families.family import (
    Family,
    LanguageModel,
    LinearStep,
    NormStep,
    ScorePooling,
)

Role = Literal["embedding", "reranker", "classifier", "tagger"]

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
    def role(self) -> Role:
        """Return "reranker" for one label, as TEI does, "classifier" for several, "tagger" for
        labels of tokens."""
        if self.pooling == "none":
            return "tagger"
        return "reranker" if len(self.labels) == 1 else "classifier"


def read_classifier(checkpoint: Checkpoint) -> ClassifierHead | None:
    """Return the head that gives logits, or None. A checkpoint with a pooling module and no head
    weights is an embedder: its class name is left over from its base model. Raises LoadError and
    its subclasses."""
    if gives_scores(checkpoint):
        return _in_modules(checkpoint)
    head = _named_head(checkpoint)
    if head is None or checkpoint.module("Pooling") is None:
        return head
    last, weights = head.steps[-1], checkpoint.home.weights
    if weights is None or not isinstance(last, LinearStep) or weights.has(f"{last.name}.weight"):
        return head
    return None


def _named_head(checkpoint: Checkpoint) -> ClassifierHead | None:
    """Return the head that `architectures` names, or None for an embedding model. Raises LoadError
    and its subclasses.

    Some GTE embedding models name `NewForTokenClassification`; they have no labels, or also name
    `NewModel`.
    """
    config, family = checkpoint.config, checkpoint.family
    architectures = checkpoint.architectures
    names = [name for name in architectures if name.endswith("Classification")]
    labelled = config.get("id2label") is not None and config.get("label2id") is not None
    is_tagger = labelled and "NewModel" not in architectures
    names = [name for name in names if name != "NewForTokenClassification" or is_tagger]
    if not names:
        return None
    name = names[0]
    if (
        not name.endswith(("ForSequenceClassification", "ForTokenClassification"))
        or family.scores is None
    ):
        raise UnsupportedArchitecture(
            f"{config.file}: {name} of {checkpoint.model_type!r} is not supported; classifiers "
            f"supported: {that_have('scores')}"
        )
    # Alibaba's name for transformers' gte
    if name.startswith("NewFor"):
        family = family_of("new")
    head = family.tags if name.endswith("ForTokenClassification") else family.scores
    assert head is not None
    try:
        pooling, steps = head(config)
    except UnsupportedArchitecture as error:
        raise UnsupportedArchitecture(f"{checkpoint.home}: {error}") from error
    return ClassifierHead(
        pooling,
        steps,
        f"{family.trunk}.",
        _labels(config),
        config.get("problem_type") == "multi_label_classification",
        config.get("problem_type") == "regression",
    )


def skipped_padding(
    family: Family, head: ClassifierHead | None, config: Mapping[str, Any]
) -> int | None:
    """Return the token id to skip at the end of a text, or None.

    transformers' class reads the rightmost token that is not padding; an appended EOS may be the
    padding token. With causal attention, removing the skipped tokens gives the same result.
    """
    if head is None or head.pooling != "lasttoken":
        return None
    last = head.steps[-1]
    # transformers' generic class of a decoder, not a publisher's own
    is_generic = (
        family.is_decoder
        and isinstance(last, LinearStep)
        and last.name == "score"
        and "pooling" not in config
    )
    both_ways = config.get("is_causal") is False or config.get("use_bidirectional_attention")
    if not is_generic or both_ways:
        return None
    padding = config.get("pad_token_id", family.padding)
    return padding if isinstance(padding, int) else None


def between(head: ClassifierHead, yes: int, no: int, label: str) -> ClassifierHead:
    """Turn a head with two labels into a ranker by the difference of the logits: its sigmoid equals
    the softmax."""
    *first, last = head.steps
    assert isinstance(last, LinearStep)
    return replace(head, steps=(*first, replace(last, rows=(yes, no))), labels=(label,))


def _in_modules(checkpoint: Checkpoint) -> ClassifierHead:
    """Return the head of a cross-encoder whose layers are sentence-transformers modules; the last
    one gives the logits. Labels come from config.json if their number fits. Raises LoadError and
    its subclasses."""
    poolings = read_pooling(checkpoint, None)
    steps = read_steps(checkpoint, checkpoint.hidden_size * len(poolings))
    count, declared = steps[-1].out_features, checkpoint.config.get("id2label")
    if len(poolings) > 1:
        raise UnsupportedArchitecture(
            f"{checkpoint.root}: scores of {len(poolings)} concatenated poolings are not supported"
        )
    labels = tuple(f"LABEL_{i}" for i in range(count))
    if isinstance(declared, dict) and len(declared) == count:
        labels = _labels(checkpoint.config)
    return ClassifierHead(poolings[0], steps, "", labels)


def yes_of_two(head: ClassifierHead) -> ClassifierHead:
    """Turn a head with the labels yes and no into a ranker. Return any other head unchanged."""
    is_yes = [label.lower() in ("yes", "1", "true") for label in head.labels]
    if len(is_yes) != 2 or is_yes.count(True) != 1:
        return head
    yes = is_yes.index(True)
    return between(head, yes, 1 - yes, head.labels[yes])


def language_model(
    home: Folder, model: LanguageModel, config: JsonObject, yes: int, no: int | None
) -> ClassifierHead:
    """Return a ranker by the last token's logit of `yes` minus that of `no`.

    A head in the weights counts before `tie_word_embeddings`, as in transformers.
    """
    tensors = frozenset[str]() if home.weights is None else home.weights.names()
    name = next((head for head in model.heads if f"{head}.weight" in tensors), model.heads[0])
    if f"{name}.weight" not in tensors and config.flag("tie_word_embeddings", model.tied):
        name = model.table
    step = LinearStep(
        name,
        bias=model.bias,
        rows=(yes, no),
        scale=_logit_scale(model, config),
        cap=_logit_cap(model, config),
    )
    trunk = model.table.partition(".")[0]
    return ClassifierHead("lasttoken", (step,), f"{trunk}.", ("yes",))


def _logit_scale(model: LanguageModel, config: JsonObject) -> float:
    if model.divisor is not None:
        return 1 / config.number(*model.divisor)
    return 1.0 if model.factor is None else config.number(*model.factor)


def _logit_cap(model: LanguageModel, config: JsonObject) -> float | None:
    """Return Gemma's cap of logits. Null turns a default off."""
    key, default = model.cap or ("", None)
    if key not in config:
        return default
    return config.number(key) if config.get(key) else None


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
