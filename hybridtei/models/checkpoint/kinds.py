"""The kinds of models: what each gives for a text, and how a folder declares it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hybridtei.batch import Head
from hybridtei.models.checkpoint.checkpoint import Checkpoint
from hybridtei.models.checkpoint.classifiers import (
    ClassifierHead,
    Role,
    read_classifier,
    skipped_padding,
)
from hybridtei.models.checkpoint.heads import (
    MultivectorHead,
    SparseHead,
    find_heads,
    read_coder,
    read_splade,
    token_projection,
)
from hybridtei.models.checkpoint.hub_layouts import (
    PPLX,
    check_head_code,
)
from hybridtei.models.checkpoint.late import (
    USUAL,
    Side,
    is_late,
    read_late,
)
from hybridtei.models.checkpoint.modules import (
    CODER,
    QUANTIZER,
    DenseModule,
    StepModule,
    pools_prompts,
    read_pooling,
    read_steps,
)
from hybridtei.models.checkpoint.rankers import PairTemplate, language_ranker
from hybridtei.models.checkpoint.sentence import score_activation
from hybridtei.models.families.family import Pooling


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What every kind may have: the pooling and the steps to a dense vector of `width` numbers, and
    other heads on a text's tokens.

    `pools_prompts`: prompts' tokens are pooled too. `is_rounded`: pooled vectors are `round(127
    tanh(x))`. `skipped_padding`: from `classifiers.skipped_padding`. `template`: the prompt of a
    language model that ranks. `query`, `document`: how the two sides are read.
    """

    pooling: tuple[Pooling, ...] = ()
    steps: tuple[StepModule, ...] = ()
    width: int = 0
    sparse: SparseHead | None = None
    multivector: MultivectorHead | None = None
    pools_prompts: bool = True
    is_rounded: bool = False
    skipped_padding: int | None = None
    template: PairTemplate | None = None
    query: Side = USUAL
    document: Side = USUAL
    # sentence-transformers' tasks of its Transformer
    tasks: ClassVar[tuple[str, ...]] = ("feature-extraction",)

    @property
    def role(self) -> Role:
        """What the model does."""
        return "embedding"

    @property
    def heads(self) -> frozenset[Head]:
        """All outputs."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Embedding(Kind):
    """A dense vector, and what head files add."""

    @property
    def heads(self) -> frozenset[Head]:
        """Dense vectors, states, and those with layers."""
        optional = {Head.SPARSE: self.sparse, Head.MULTIVECTOR: self.multivector}
        added = {head for head, layers in optional.items() if layers is not None}
        return frozenset({Head.DENSE, Head.TOKENS, *added})


@dataclass(frozen=True, kw_only=True)
class Static(Embedding):
    """The mean of the rows of a table."""


@dataclass(frozen=True, kw_only=True)
class Splade(Kind):
    """A weight for each vocabulary entry, by the masked-language-model head. `default`: "query" if
    texts whose type the request does not name are looked up in the table."""

    sparse: SparseHead
    default: str | None = None
    tasks: ClassVar[tuple[str, ...]] = ("fill-mask",)

    @property
    def heads(self) -> frozenset[Head]:
        """Sparse vectors."""
        return frozenset({Head.SPARSE})


@dataclass(frozen=True, kw_only=True)
class TokenCodes(Kind):
    """A SparseAutoEncoder of each token's state, without a pooling."""

    sparse: SparseHead

    @property
    def heads(self) -> frozenset[Head]:
        """Sparse vectors and states."""
        return frozenset({Head.SPARSE, Head.TOKENS})


@dataclass(frozen=True, kw_only=True)
class Late(Kind):
    """Token vectors alone, for late interaction."""

    multivector: MultivectorHead

    @property
    def heads(self) -> frozenset[Head]:
        """Multi-vectors and states."""
        return frozenset({Head.MULTIVECTOR, Head.TOKENS})


@dataclass(frozen=True, kw_only=True)
class Labels(Kind):
    """Logits of a text, a pair or each token. `activation`: sentence-transformers' function of a
    reranker's logit, for information only, since scores follow TEI's rule. `judges_pairs`: a text
    alone has no meaning."""

    head: ClassifierHead
    activation: str | None = None
    judges_pairs: bool = False
    tasks: ClassVar[tuple[str, ...]] = (
        "sequence-classification",
        "text-generation",
        "feature-extraction",
    )

    @property
    def role(self) -> Role:
        return self.head.role

    @property
    def heads(self) -> frozenset[Head]:
        """Scores, or tags."""
        return frozenset({Head.TAGS if self.role == "tagger" else Head.SCORES})


def read_kind(checkpoint: Checkpoint) -> Kind:
    """Return the first kind that the files declare. Raises LoadError and its subclasses."""
    kind = _splade(checkpoint) or _labels(checkpoint)
    check_head_code(
        checkpoint.config,
        checkpoint.config.file,
        has_head=kind is not None,
    )
    return kind or _late(checkpoint) or _token_codes(checkpoint) or _embedding(checkpoint)


def _splade(checkpoint: Checkpoint) -> Kind | None:
    head = read_splade(checkpoint)
    if head is None:
        return None
    width = checkpoint.config.count("vocab_size")
    return Splade(sparse=head, width=width, default=checkpoint.default)


def _labels(checkpoint: Checkpoint) -> Kind | None:
    classifier = read_classifier(checkpoint)
    head, template = language_ranker(checkpoint, classifier)
    if head is None:
        return None
    is_rendered = classifier is None or checkpoint.renders_messages
    return Labels(
        head=head,
        template=template,
        skipped_padding=skipped_padding(checkpoint.family, head, checkpoint.config),
        activation=score_activation(checkpoint.config, checkpoint.root.sentence),
        judges_pairs=template is not None and is_rendered,
    )


def _late(checkpoint: Checkpoint) -> Kind | None:
    if not is_late(checkpoint.root):
        return None
    query, document = read_late(checkpoint)
    return Late(query=query, document=document, multivector=token_projection(checkpoint))


def _token_codes(checkpoint: Checkpoint) -> Kind | None:
    if checkpoint.module(CODER) is None or checkpoint.module("Pooling") is not None:
        return None
    return TokenCodes(sparse=read_coder(checkpoint, checkpoint.hidden_size, of_tokens=True))


def _embedding(checkpoint: Checkpoint) -> Kind:
    hidden_size, flags, root = checkpoint.hidden_size, checkpoint.flags, checkpoint.root
    sparse, multivector = find_heads(root.path, hidden_size, flags.heads_file)
    pooling = read_pooling(checkpoint, flags.pooling)
    width = hidden_size * len(pooling)
    steps = read_steps(checkpoint, width, flags=flags) or _projection(checkpoint, width)
    if steps:
        width = steps[-1].out_features
    if checkpoint.module(CODER) is not None:
        sparse = read_coder(checkpoint, width)
    is_pplx = checkpoint.published.get("model_type") == PPLX
    return Embedding(
        pooling=pooling,
        steps=steps,
        width=cut_width(checkpoint, width),
        sparse=sparse,
        multivector=multivector,
        pools_prompts=pools_prompts(checkpoint),
        is_rounded=is_pplx or checkpoint.module(QUANTIZER) is not None,
    )


def cut_width(checkpoint: Checkpoint, width: int) -> int:
    """Return the numbers of a dense vector, which the files may cut."""
    sentence = checkpoint.root.sentence
    return min(width, sentence.count_if_any("truncate_dim") or width)


def _projection(checkpoint: Checkpoint, pooled_width: int) -> tuple[DenseModule, ...]:
    """Return Qwen3's own projection of pooled vectors, to `num_labels` numbers, as TEI has it; few
    checkpoints have one."""
    config, home = checkpoint.config, checkpoint.home
    if checkpoint.model_type != "qwen3" or config.get("num_labels") is None:
        return ()
    if home.weights is None or not home.weights.has("linear.weight"):
        return ()
    return (
        DenseModule(
            home.path,
            pooled_width,
            config.count("num_labels"),
            False,
            "torch.nn.modules.linear.Identity",
        ),
    )
