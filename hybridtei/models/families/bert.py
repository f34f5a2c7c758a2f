"""BERT, its variants with other positions, embedding widths or names, and the encoder of T5.

RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA and DistilBERT (without token types) have a table of
positions. MPNet, T5, JinaBERT and DeBERTa v2 and v3 add the distance of two tokens to the attention
scores. MPNet and T5 look up a bias by the distance's bucket, the same in all layers. JinaBERT's
scores fall with the distance, and most JinaBERTs have gated MLPs. DeBERTa adds products of contents
and distances to the products of contents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from hybridtei.models.families.ops import Heads, Ops, Rows, linears
from hybridtei.models.families.settings import Settings


@dataclass(frozen=True)
class _Names:
    """A layer's tensors: queries, keys and values, attention's output and norm, the MLP's two
    matrices and its norm."""

    prefix: str
    qkv: Sequence[str]
    out: str
    norm: str
    wide: str
    narrow: str
    last_norm: str


_AFTER = (
    "attention.output.dense",
    "attention.output.LayerNorm",
    "intermediate.dense",
    "output.dense",
    "output.LayerNorm",
)
BERT = _Names(
    "encoder.layer.", [f"attention.self.{name}" for name in ("query", "key", "value")], *_AFTER
)
DEBERTA = _Names(
    "encoder.layer.", [f"attention.self.{name}_proj" for name in ("query", "key", "value")], *_AFTER
)
DISTILBERT = _Names(
    "transformer.layer.",
    [f"attention.{name}_lin" for name in "qkv"],
    "attention.out_lin",
    "sa_layer_norm",
    "ffn.lin1",
    "ffn.lin2",
    "output_layer_norm",
)
MPNET = _Names(
    "encoder.layer.",
    [f"attention.attn.{name}" for name in "qkv"],
    "attention.attn.o",
    "attention.LayerNorm",
    *_AFTER[2:],
)
# Of queries, keys, values, and the layer's prefix
Attend = Callable[[Rows, Rows, Rows, str], Rows]


def bert(o: Ops, s: Settings) -> Rows:
    """transformers' `BertModel`. RoBERTa's offset of positions is in the batch's `position_ids`."""
    return _bert(o, s, s.count("hidden_size"))


def electra(o: Ops, s: Settings) -> Rows:
    """transformers' `ElectraModel`."""
    return _bert(o, s, s.count("embedding_size", 128))


def _bert(o: Ops, s: Settings, embedding_size: int) -> Rows:
    hidden, eps, count = (
        s.count("hidden_size"),
        s.number("layer_norm_eps", 1e-12),
        s.count("num_attention_heads"),
    )
    x = _embeddings(o, s, embedding_size, eps)
    if x.width != hidden:
        x = o.linear(x, "embeddings_project", hidden)
    heads = Heads(count, count, hidden // count)
    act, wide = s.activation("hidden_act"), s.count("intermediate_size")
    return _layers(
        o, x, BERT, heads, layers=s.count("num_hidden_layers"), wide=wide, act=act, eps=eps
    )


def _embeddings(
    o: Ops, s: Settings, width: int, eps: float, *, types: bool = True, places: bool = True
) -> Rows:
    """The normed sum of the rows of words and, if the family has them, of token types and
    positions."""
    rows = [
        o.embedding("embeddings.word_embeddings.weight", s.count("vocab_size"), width, "input_ids")
    ]
    if types:
        table = "embeddings.token_type_embeddings.weight"
        rows.append(o.embedding(table, s.count("type_vocab_size", 2), width, "token_type_ids"))
    if places:
        table = "embeddings.position_embeddings.weight"
        rows.append(
            o.embedding(table, s.count("max_position_embeddings", 512), width, "position_ids")
        )
    return o.layer_norm(reduce(o.add, rows), "embeddings.LayerNorm", eps)


def _layers(
    o: Ops,
    x: Rows,
    names: _Names,
    heads: Heads,
    *,
    layers: int,
    wide: int,
    act: str,
    eps: float,
    attend: Attend | None = None,
) -> Rows:
    """Layers with a norm after attention and after the MLP. `attend`: attention other than the
    plain one."""
    hidden = x.width
    for layer in (f"{names.prefix}{i}." for i in range(layers)):
        q, k, v = linears(o, x, [layer + name for name in names.qkv], [heads.count * heads.dim] * 3)
        attended = attend(q, k, v, layer) if attend else o.attention(q, k, v, heads)
        x = o.layer_norm(
            o.add(o.linear(attended, layer + names.out, hidden), x), layer + names.norm, eps
        )
        y = o.linear(
            o.activate(o.linear(x, layer + names.wide, wide), act), layer + names.narrow, hidden
        )
        x = o.layer_norm(o.add(y, x), layer + names.last_norm, eps)
    return x


EPS = 1e-12


def distilbert(o: Ops, s: Settings) -> Rows:
    """transformers' `DistilBertModel`."""
    hidden, count = s.count("dim", 768), s.count("n_heads", 12)
    x, heads = _embeddings(o, s, hidden, EPS, types=False), Heads(count, count, hidden // count)
    act, wide = s.activation("activation"), s.count("hidden_dim", 4 * hidden)
    return _layers(
        o, x, DISTILBERT, heads, layers=s.count("n_layers", 6), wide=wide, act=act, eps=EPS
    )


BUCKETS, MAX_DISTANCE = 32, 128


def mpnet(o: Ops, s: Settings) -> Rows:
    """transformers' `MPNetModel`."""
    hidden, eps, count = (
        s.count("hidden_size", 768),
        s.number("layer_norm_eps", 1e-12),
        s.count("num_attention_heads", 12),
    )
    x, heads = _embeddings(o, s, hidden, eps, types=False), Heads(count, count, hidden // count)
    # Checkpoints have the key, but MPNet has no types
    s.get("type_vocab_size")
    # Transformers uses it only as the table's size
    s.only("relative_attention_num_buckets", BUCKETS)
    bias = o.buckets(
        distance_buckets(BUCKETS, MAX_DISTANCE), "encoder.relative_attention_bias.weight", count
    )

    def attend(q: Rows, k: Rows, v: Rows, _: str) -> Rows:
        return o.attention(q, k, v, heads, bias)

    act, wide = s.activation("hidden_act"), s.count("intermediate_size", 4 * hidden)
    return _layers(
        o,
        x,
        MPNET,
        heads,
        layers=s.count("num_hidden_layers", 12),
        wide=wide,
        act=act,
        eps=eps,
        attend=attend,
    )


def distance_buckets(number: int, furthest: int) -> NDArray[np.int64]:
    """The bucket of each distance (key minus query): exact if near, then logarithmic; one bucket
    from `furthest` on."""
    distance = np.arange(-furthest, furthest + 1)
    half = number // 2
    exact = half // 2
    far = np.maximum(np.abs(distance), 1).astype(np.float32)
    steps = (
        np.log(far / np.float32(exact))
        / np.float32(math.log(furthest / exact))
        * np.float32(half - exact)
    )
    large = np.minimum(exact + steps.astype(np.int64), half - 1)
    return np.where(distance > 0, half, 0) + np.where(
        np.abs(distance) < exact, np.abs(distance), large
    )


def t5(o: Ops, s: Settings) -> Rows:
    """transformers' `T5EncoderModel`: no biases, RMS norms before each block, and unscaled
    scores."""
    hidden, eps, count = (
        s.count("hidden_size"),
        s.number("layer_norm_epsilon", 1e-6),
        s.count("num_attention_heads"),
    )
    heads = Heads(count, count, s.count("head_dim"), factor=1.0)
    number, furthest = (
        s.count("relative_attention_num_buckets", 32),
        s.count("relative_attention_max_distance", 128),
    )
    # Nearer distances have a bucket each, further ones share the rest
    if number < 4 or furthest <= number // 4:
        raise s.unsupported(
            "relative_attention_num_buckets",
            number,
            ("4 to less than 4 relative_attention_max_distance",),
        )
    # The first layer's, used by all layers
    table = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    bias = o.buckets(distance_buckets(number, furthest), table, count)
    act, wide, is_gated = (
        s.activation("hidden_act"),
        s.count("intermediate_size"),
        s.flag("is_gated_act"),
    )
    x = o.embedding("shared.weight", s.count("vocab_size"), hidden, "input_ids")
    for i in range(s.count("num_hidden_layers")):
        attn, mlp = f"encoder.block.{i}.layer.0.", f"encoder.block.{i}.layer.1."
        y = o.rms_norm(x, f"{attn}layer_norm", eps)
        q, k, v = linears(
            o, y, [f"{attn}SelfAttention.{name}" for name in "qkv"], heads.widths, bias=False
        )
        attended = o.attention(q, k, v, heads, bias)
        x = o.add(x, o.linear(attended, f"{attn}SelfAttention.o", hidden, bias=False))
        y = o.rms_norm(x, f"{mlp}layer_norm", eps)
        parts = ("wi_0", "wi_1") if is_gated else ("wi",)
        gate, *up = linears(
            o, y, [f"{mlp}DenseReluDense.{part}" for part in parts], [wide] * len(parts), bias=False
        )
        y = o.activate(gate, act)
        x = o.add(
            x,
            o.linear(
                o.multiply(y, up[0]) if up else y, f"{mlp}DenseReluDense.wo", hidden, bias=False
            ),
        )
    return o.rms_norm(x, "encoder.final_layer_norm", eps)


# feed_forward_type -> the function of the gate
GATES = {"geglu": "gelu", "reglu": "relu"}
PLAIN = "original"


@dataclass(frozen=True)
class _Mlp:
    """Names of a layer's tensors, and the split of the first product."""

    wide: str
    narrow: str
    norm: str
    wide_bias: bool = False
    gate_first: bool = True


# (queries and keys have norms, the MLP has a gate) -> the MLP
MLPS = {
    (False, True): _Mlp("mlp.gated_layers", "mlp.wo", "mlp.layernorm"),
    (False, False): _Mlp("intermediate.dense", "output.dense", "output.LayerNorm", wide_bias=True),
    (True, True): _Mlp("mlp.up_gated_layer", "mlp.down_layer", "layer_norm_2", gate_first=False),
    (True, False): _Mlp("mlp.up_layer", "mlp.down_layer", "layer_norm_2"),
}


def jina_bert(o: Ops, s: Settings) -> Rows:
    """jinaai/jina-bert-implementation; with `qk_norm` jinaai/jina-bert-v2-qk-post-norm, which adds
    attention's input twice."""
    hidden, eps, count = (
        s.count("hidden_size"),
        s.number("layer_norm_eps", 1e-12),
        s.count("num_attention_heads"),
    )
    heads, qk_norm = Heads(count, count, hidden // count), s.flag("qk_norm")
    # Read for `check`: there is no table of positions
    s.get("max_position_embeddings")
    x = _embeddings(o, s, hidden, eps, places=False)
    bias = o.alibi(slopes(count))
    for i in range(s.count("num_hidden_layers")):
        layer, attn = f"encoder.layer.{i}.", f"encoder.layer.{i}.attention."
        q, k, v = linears(
            o, x, [f"{attn}self.{name}" for name in ("query", "key", "value")], [hidden] * 3
        )
        if qk_norm:
            q, k = (
                o.layer_norm(one, f"{attn}self.layer_norm_{name}", eps)
                for one, name in ((q, "q"), (k, "k"))
            )
        y = o.linear(o.attention(q, k, v, heads, bias), f"{attn}output.dense", hidden)
        y = o.layer_norm(o.add(y, x), f"{attn}output.LayerNorm", eps)
        x = o.layer_norm(o.add(y, x), f"{layer}layer_norm_1", eps) if qk_norm else y
        x = _mlp(o, s, x, layer, eps, qk_norm=qk_norm)
    return x


def _mlp(o: Ops, s: Settings, x: Rows, layer: str, eps: float, *, qk_norm: bool) -> Rows:
    kind = s.get("feed_forward_type", PLAIN)
    s.only("feed_forward_type", PLAIN, *GATES)
    is_gated, size, act = kind in GATES, s.count("intermediate_size"), s.activation("hidden_act")
    mlp = MLPS[qk_norm, is_gated]
    y = o.linear(x, layer + mlp.wide, 2 * size if is_gated else size, bias=mlp.wide_bias)
    # A fixed function; `hidden_act` has no effect
    if is_gated:
        one, other = o.split(y, [size] * 2)
        gate, up = (one, other) if mlp.gate_first else (other, one)
        y = o.multiply(o.activate(gate, GATES[kind]), up)
    else:
        y = o.activate(y, act)
    return o.layer_norm(o.add(o.linear(y, layer + mlp.narrow, x.width), x), layer + mlp.norm, eps)


def slopes(heads: int) -> NDArray[np.float32]:
    """ALiBi's slope of each head: powers of 2 ** (-8 / n) if the number n of heads is a power of
    two. Otherwise the slopes of the power below, then every second slope of the power above."""
    below = 1 << (heads.bit_length() - 1)
    between = _powers(2 * below)[::2][: heads - below]
    return np.array([*_powers(below), *between], dtype=np.float32)


def _powers(heads: int) -> list[float]:
    return [2.0 ** (-8 * (head + 1) / heads) for head in range(heads)]


def deberta_v2(o: Ops, s: Settings) -> Rows:
    """transformers' `DebertaV2Model`."""
    s.only("conv_kernel_size", 0)
    hidden, eps, count = (
        s.count("hidden_size"),
        s.number("layer_norm_eps", 1e-7),
        s.count("num_attention_heads"),
    )
    x = _deberta_embeddings(o, s, hidden, eps)
    kinds = s.get("pos_att_type") or []
    kinds = kinds.split("|") if isinstance(kinds, str) else kinds
    relative = s.flag("relative_attention")
    dim = s.count("attention_head_size", hidden // count)
    heads = Heads(
        count, count, dim, factor=(dim * (1 + ("c2p" in kinds) + ("p2c" in kinds))) ** -0.5
    )
    positions = s.count("max_position_embeddings", 512)
    furthest = s.get("max_relative_positions", -1)
    furthest = furthest if furthest > 0 else positions
    number = s.get("position_buckets", -1)
    span = number if number > 0 else furthest
    table = _distances(o, s, 2 * span, hidden, eps) if relative else None
    # Equal from there on
    places = deberta_buckets(number, furthest, span, max(positions, furthest + 1))
    shared, all_heads = s.flag("share_att_key"), heads.count * heads.dim
    act, wide = s.activation("hidden_act"), s.count("intermediate_size")

    def attend(q: Rows, k: Rows, v: Rows, layer: str) -> Rows:
        bias = None
        if table is not None:
            key, query = (
                ("key_proj", "query_proj") if shared else ("pos_key_proj", "pos_query_proj")
            )
            c2p = (
                o.linear(table, f"{layer}attention.self.{key}", all_heads)
                if "c2p" in kinds
                else None
            )
            p2c = (
                o.linear(table, f"{layer}attention.self.{query}", all_heads)
                if "p2c" in kinds
                else None
            )
            bias = o.disentangled(q, k, heads, places, (c2p, p2c))
        return o.attention(q, k, v, heads, bias)

    return _layers(
        o,
        x,
        DEBERTA,
        heads,
        layers=s.count("num_hidden_layers"),
        wide=wide,
        act=act,
        eps=eps,
        attend=attend,
    )


def _deberta_embeddings(o: Ops, s: Settings, hidden: int, eps: float) -> Rows:
    width = s.count("embedding_size", hidden)
    x = o.embedding("embeddings.word_embeddings.weight", s.count("vocab_size"), width, "input_ids")
    if s.flag("position_biased_input", default=True):
        positions = s.count("max_position_embeddings", 512)
        x = o.add(
            x,
            o.embedding("embeddings.position_embeddings.weight", positions, width, "position_ids"),
        )
    if s.get("type_vocab_size", 0):
        table = "embeddings.token_type_embeddings.weight"
        x = o.add(x, o.embedding(table, s.count("type_vocab_size"), width, "token_type_ids"))
    if width != hidden:
        x = o.linear(x, "embeddings.embed_proj", hidden, bias=False)
    return o.layer_norm(x, "embeddings.LayerNorm", eps)


def _distances(o: Ops, s: Settings, rows: int, hidden: int, eps: float) -> Rows:
    table = o.parameter_rows("encoder.rel_embeddings.weight", rows, hidden)
    norms = [part.strip() for part in s.get("norm_rel_ebd", "none").lower().split("|")]
    return o.layer_norm(table, "encoder.LayerNorm", eps) if "layer_norm" in norms else table


def deberta_buckets(number: int, furthest: int, span: int, longest: int) -> NDArray[np.int64]:
    """The row of the distance table for each distance (query minus key) from -longest to longest:
    exact if near, logarithmic if far."""
    distance = np.arange(-longest, longest + 1)
    place = distance
    if number > 0 and furthest > 0:
        middle = number // 2
        far = np.where(np.abs(distance) < middle, middle - 1, np.abs(distance)).astype(np.float32)
        steps = (
            np.log(far / np.float32(middle))
            / np.log(np.float32((furthest - 1) / middle))
            * np.float32(middle - 1)
        )
        place = np.where(
            far <= middle,
            distance,
            ((np.ceil(steps) + middle) * np.sign(distance)).astype(np.int64),
        )
    return np.clip(place + span, 0, 2 * span - 1).astype(np.int64)
