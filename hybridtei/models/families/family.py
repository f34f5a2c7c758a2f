"""A record of what is known of a family of models, and the names of the layers of its heads.

Families with the same trunk have different heads: ELECTRA's uses gelu, RoBERTa's tanh; BERT's first
layer is the trunk's "pooler"; decoders apply one matrix without a bias to the last token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hybridtei.errors import UnsupportedArchitecture
from hybridtei.models.families.ops import Ops, Rows
from hybridtei.models.families.settings import Settings

Pooling = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
# The input of the layers: the first token's state, the mean, or the last token's. "late": every
# token's state, and the logits are averaged; "none": every token's state, without pooling.
ScorePooling = Pooling | Literal["late", "none"]


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


Config = Mapping[str, Any]
NamedStep = LinearStep | NormStep
# A head of scores or of tags
Named = tuple[ScorePooling, tuple[NamedStep, ...]]
Head = Callable[[Config], Named]
LAST, OUT_PROJ = LinearStep("classifier"), LinearStep("classifier.out_proj")


def two_layers(name: str, activation: str, last: LinearStep = LAST, key: str = "") -> Head:
    """Two layers on the first token. `activation`: the first layer's, unless config.json has
    another one under `key`."""
    return lambda config: ("cls", (LinearStep(name, config.get(key, activation)), last))


def longformer(config: Config) -> Named:
    """Refuse the head."""
    raise UnsupportedArchitecture(
        "config.json: a Longformer that classifies lets all tokens see the first, which its trunk "
        "does not; use another model"
    )


def modernbert(config: Config) -> Named:
    """transformers' `ModernBertForSequenceClassification`."""
    pooling = _one_of(config, {"cls": "cls", "mean": "mean"}, "cls")
    return pooling, (*_modernbert_head(config), LAST)


def modernbert_tags(config: Config) -> Named:
    """transformers' `ModernBertForTokenClassification`."""
    return "none", (*_modernbert_head(config), LAST)


def _modernbert_head(config: Config) -> tuple[NamedStep, ...]:
    bias = bool(config.get("classifier_bias", False))
    activation = config.get("classifier_activation", "gelu")
    norm = NormStep(
        "head.norm", float(config.get("norm_eps", 1e-5)), bool(config.get("norm_bias", False))
    )
    return LinearStep("head.dense", activation, bias), norm


def eurobert(config: Config) -> Named:
    """transformers' `EuroBertForSequenceClassification`."""
    pooling = _one_of(config, {"bos": "cls", "mean": "mean", "late": "late"}, "late")
    return pooling, (LinearStep("dense", "gelu"), LAST)


def ultrabert(config: Config) -> Named:
    """transformers' `UltrabertForSequenceClassification`."""
    return _one_of(config, {"cls": "cls", "mean": "mean"}, "cls"), (LAST,)


def decoder(config: Config) -> Named:
    """transformers' generic class: one matrix on the last token, or on the vector that NVIDIA's
    class pools."""
    poolings: Mapping[str, ScorePooling] = {"mean": "mean", "cls": "cls", "lasttoken": "lasttoken"}
    return _one_of(config, poolings, "lasttoken", key="pooling"), (LinearStep("score", bias=False),)


def decoder_tags(config: Config) -> Named:
    """transformers' generic class of tags."""
    return "none", (LinearStep("score", bias=bool(config.get("token_classification_bias", True))),)


def tags(config: Config) -> Named:
    """One layer on every token."""
    return "none", (LAST,)


def _one_of(
    config: Config, kinds: Mapping[str, ScorePooling], default: str, key: str = "classifier_pooling"
) -> ScorePooling:
    name = config.get(key, default)
    if not isinstance(name, str) or name not in kinds:
        raise UnsupportedArchitecture(
            f"config.json: `{key}` {name!r}; supported: {', '.join(kinds)}"
        )
    return kinds[name]


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """What transformers' class of a language model does after its last state. `tied`: its default
    of `tie_word_embeddings`. `factor`, `divisor`, `cap`: (key, default) of a factor, a divisor and
    a cap of logits; null turns a cap off."""

    tied: bool = False
    bias: bool = False
    table: str = "model.embed_tokens"
    heads: tuple[str, ...] = ("lm_head",)
    factor: tuple[str, float] | None = None
    divisor: tuple[str, float] | None = None
    cap: tuple[str, float | None] | None = None


# Key of config.json and transformers' default; without a key the value is fixed
Setting = tuple[str, Any]


@dataclass(frozen=True, slots=True)
class MaskedHead:
    """The names of the parts of a masked-language-model head."""

    dense: str
    norm: str
    decoder: str
    bias: str
    activation: Setting
    epsilon: Setting = ("layer_norm_eps", 1e-12)
    decoder_bias: Setting = ("", True)


def predictions(norm: str, activation: str = "gelu", epsilon: float = 1e-12) -> MaskedHead:
    """BERT's names."""
    names = ("transform.dense", f"transform.{norm}", "decoder", "bias")
    dense, norm, decoder, bias = (f"cls.predictions.{name}" for name in names)
    return MaskedHead(
        dense,
        norm,
        decoder,
        bias,
        ("hidden_act", activation),
        ("layer_norm_eps", epsilon),
    )


def lm_head(norm: str = "layer_norm") -> MaskedHead:
    """RoBERTa's names."""
    return MaskedHead(
        "lm_head.dense", f"lm_head.{norm}", "lm_head.decoder", "lm_head.bias", ("", "gelu")
    )


Positions = Literal["after padding", "after 1", "absolute", "table", "computed", "relative"]


@dataclass(frozen=True, slots=True)
class Family:
    """What is known of a `model_type`.

    `run`: computes the last hidden states; without it only torch does, by transformers' class.
    `code`: classes of publishers' own code that compute the same. Names lack the final "Model" or
    "For…"; a name that also exists in transformers includes its module.
    `positions`: from a table, which begins after the padding id (of mpnet, after 1) or at 0, if
    "absolute" without other forms; "computed"; or "relative", for any length. `token_types`: the
    second text of a pair has another type. `tokenizer`: transformers' default class, without
    "Tokenizer". `padding`: the default of `pad_token_id`. `width`: key and default of the width of
    states. `is_wide`: states exceed float16's largest number, 65,504. `shares_layers`: all layers
    have one set of weights.
    `turns`: a class named "Bidirectional" is not causal, though no key says so.

    `trunk`: the prefix of the trunk's tensors beside a head. `scores`, `tags`: the head of a
    sequence and of tokens. `words`: the head of a language model; `masked`: of a masked one.
    """

    run: Callable[[Ops, Settings], Rows] | None = None
    code: tuple[str, ...] = ()
    positions: Positions = "table"
    token_types: bool = False
    tokenizer: str = ""
    padding: int | None = None
    width: tuple[str, int | None] = ("hidden_size", None)
    is_wide: bool = False
    shares_layers: bool = False
    turns: bool = False
    trunk: str = "model"
    scores: Head | None = None
    tags: Head = tags
    words: LanguageModel | None = None
    masked: MaskedHead | None = None

    @property
    def is_decoder(self) -> bool:
        """True if transformers' generic class puts a head on the last token."""
        return self.scores is decoder

    @property
    def after_padding(self) -> bool:
        """True if positions begin after the padding id."""
        return self.positions in ("after padding", "after 1")

    @property
    def is_absolute(self) -> bool:
        """True if a table is the only form of positions that transformers 5 runs, though models
        can be trained with others."""
        return self.after_padding or self.positions == "absolute"
