"""Encoders with rotary positions.

NomicBERT, GTE ("new") and Jina v3's XLM-RoBERTa, with a norm after each block; Jina Reranker v2's,
with the same names but a table of positions; ModernBERT, with norms before each block, and windows
in two of three layers.

Tensors have the publishers' names, which transformers uses too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hybridtei.models.families.ops import Heads, Ops, Rows, linears
from hybridtei.models.families.settings import (
    FULL,
    SLIDING,
    Frequencies,
    Settings,
    frequencies,
)


@dataclass(frozen=True)
class _EncoderForm:
    """Names of the tensors (a layer's below `layer`), and constants. `theta`: None if positions
    come from a table."""

    layer: str
    embedding_norm: str
    qkv: str
    out: str
    norms: tuple[str, str]
    theta: float | None
    has_bias: bool
    # The default number of token types
    types: int = 1


NOMIC = _EncoderForm(
    "encoder.layers.",
    "emb_ln",
    "attn.Wqkv",
    "attn.out_proj",
    ("norm1", "norm2"),
    1_000.0,
    has_bias=False,
    types=2,
)
GTE = _EncoderForm(
    "encoder.layer.",
    "embeddings.LayerNorm",
    "attention.qkv_proj",
    "attention.o_proj",
    ("attn_ln", "mlp_ln"),
    160_000.0,
    has_bias=True,
)
JINA = _EncoderForm(
    "encoder.layers.",
    "emb_ln",
    "mixer.Wqkv",
    "mixer.out_proj",
    ("norm1", "norm2"),
    20_000.0,
    has_bias=True,
)


def nomic_bert(o: Ops, s: Settings) -> Rows:
    """transformers' `NomicBertModel`, with the additions of Nomic's own code: biases, MLPs without
    a gate, and experts instead of every n-th MLP."""
    is_gated, wide = s.get("activation_function") is None, s.count("intermediate_size")
    act = s.activation("hidden_act", "silu") if is_gated else s.activation("activation_function")
    in_bias, out_bias = s.flag("mlp_fc1_bias"), s.flag("mlp_fc2_bias")
    every, count, chosen = _experts(s, is_gated)

    def mlp(x: Rows, name: str, i: int) -> Rows:
        if every and i % every == 1:
            logits = o.linear(x, f"{name}mlp.router.layer", count, bias=False)
            return o.experts(x, logits, f"{name}mlp.experts", wide, chosen=chosen, act=act)
        parts = ("fc11", "fc12") if is_gated else ("fc1",)
        *up, gate = linears(
            o, x, [f"{name}mlp.{part}" for part in parts], [wide] * len(parts), bias=in_bias
        )
        y = o.activate(gate, act)
        return o.linear(o.multiply(y, up[0]) if up else y, f"{name}mlp.fc2", x.width, bias=out_bias)

    return _encoder(o, s, replace(NOMIC, has_bias=s.flag("qkv_proj_bias")), mlp)


def _experts(s: Settings, is_gated: bool) -> tuple[int, int, int]:
    """(n if every n-th layer has experts, the number of experts, the number that a token uses);
    zeros without experts."""
    every, count, chosen = (
        s.get(key, 0) for key in ("moe_every_n_layers", "num_experts", "moe_top_k")
    )
    if not every:
        return 0, 0, 0
    if is_gated:
        raise s.unsupported("moe_every_n_layers", every, (0,))
    count, chosen = s.count("num_experts"), s.count("moe_top_k")
    if chosen > count:
        raise s.unsupported("moe_top_k", chosen, tuple(range(1, count + 1)))
    return s.count("moe_every_n_layers"), count, chosen


def gte(o: Ops, s: Settings) -> Rows:
    """transformers' `GteModel`."""
    act, wide = s.activation("hidden_act"), s.count("intermediate_size")

    def mlp(x: Rows, name: str, _: int) -> Rows:
        up, gate = o.split(o.linear(x, f"{name}mlp.up_gate_proj", 2 * wide, bias=False), [wide] * 2)
        return o.linear(o.multiply(o.activate(gate, act), up), f"{name}mlp.down_proj", x.width)

    return _encoder(o, s, GTE, mlp)


def jina_v3(o: Ops, s: Settings) -> Rows:
    """transformers' `JinaEmbeddingsV3Model`. Its adapters change the weights."""
    return _jina(o, s, JINA)


def xlm_roberta_flash(o: Ops, s: Settings) -> Rows:
    """transformers' `XLMRobertaModel`, with the names of Jina's own code."""
    return _jina(o, s, replace(JINA, theta=None))


def _jina(o: Ops, s: Settings, form: _EncoderForm) -> Rows:
    act, wide = s.activation("hidden_act"), s.count("intermediate_size")

    def mlp(x: Rows, name: str, _: int) -> Rows:
        return o.linear(
            o.activate(o.linear(x, f"{name}mlp.fc1", wide), act), f"{name}mlp.fc2", x.width
        )

    return _encoder(o, s, form, mlp)


def _encoder(
    o: Ops, s: Settings, form: _EncoderForm, mlp: Callable[[Rows, str, int], Rows]
) -> Rows:
    hidden, eps, count = (
        s.count("hidden_size"),
        s.number("layer_norm_eps", 1e-12),
        s.count("num_attention_heads"),
    )
    x = o.embedding("embeddings.word_embeddings.weight", s.count("vocab_size"), hidden, "input_ids")
    if s.get("type_vocab_size", form.types):
        table = "embeddings.token_type_embeddings.weight"
        x = o.add(
            x, o.embedding(table, s.count("type_vocab_size", form.types), hidden, "token_type_ids")
        )
    if form.theta is None:
        positions = s.count("max_position_embeddings")
        x = o.add(
            x,
            o.embedding("embeddings.position_embeddings.weight", positions, hidden, "position_ids"),
        )
    x = o.layer_norm(x, form.embedding_norm, eps)
    heads = Heads(count, count, s.count("head_dim", hidden // count))
    rotation = (
        None if form.theta is None else o.rotation(*frequencies(s, heads.dim, theta=form.theta))
    )
    # Read for `check`: there is no table of angles
    s.get("max_position_embeddings")
    width = count * heads.dim
    for i in range(s.count("num_hidden_layers")):
        layer = f"{form.layer}{i}."
        q, k, v = o.split(o.linear(x, layer + form.qkv, 3 * width, bias=form.has_bias), [width] * 3)
        if rotation is not None:
            q, k = (o.rotate(rows, rotation, heads.dim) for rows in (q, k))
        attended = o.attention(q, k, v, heads)
        y = o.linear(attended, layer + form.out, hidden, bias=form.has_bias)
        x = o.layer_norm(o.add(x, y), layer + form.norms[0], eps)
        x = o.layer_norm(o.add(x, mlp(x, layer, i)), layer + form.norms[1], eps)
    return x


MODERNBERT_THETAS = {FULL: 160_000.0, SLIDING: 10_000.0}


def modernbert(o: Ops, s: Settings) -> Rows:
    """transformers' `ModernBertModel`."""
    hidden, eps, count = (
        s.count("hidden_size", 768),
        s.number("norm_eps", 1e-5),
        s.count("num_attention_heads", 12),
    )
    norm_bias, bias, mlp_bias = s.flag("norm_bias"), s.flag("attention_bias"), s.flag("mlp_bias")
    layers = s.count("num_hidden_layers", 22)
    every = s.count("global_attn_every_n_layers", 3)
    kinds = s.layer_kinds(layers, lambda layer: SLIDING if layer % every else FULL)
    # Checkpoints have the key, but norms use `norm_eps`
    s.get("layer_norm_eps")
    heads = Heads(count, count, hidden // count)
    # Of one kind of layer, if any
    s.has_read("global_rope_theta", "local_rope_theta")
    rotations = {
        kind: o.rotation(*_modernbert_frequencies(s, heads.dim, kind))
        for kind in sorted(set(kinds))
    }
    windows = {FULL: None, SLIDING: s.count("local_attention", 128) // 2 + 1}
    # Read for `check`: there is no table of positions
    s.get("max_position_embeddings")
    x = o.embedding("embeddings.tok_embeddings.weight", s.count("vocab_size"), hidden, "input_ids")
    x = o.layer_norm(x, "embeddings.norm", eps, bias=norm_bias)
    act, wide = s.activation("hidden_activation"), s.count("intermediate_size", 1152)
    for i, kind in enumerate(kinds):
        layer = f"layers.{i}."
        y = o.layer_norm(x, f"{layer}attn_norm", eps, bias=norm_bias) if i else x
        q, k, v = o.split(o.linear(y, f"{layer}attn.Wqkv", 3 * hidden, bias=bias), [hidden] * 3)
        q, k = (o.rotate(rows, rotations[kind], heads.dim) for rows in (q, k))
        attended = o.attention(q, k, v, replace(heads, window=windows[kind]))
        x = o.add(x, o.linear(attended, f"{layer}attn.Wo", hidden, bias=bias))
        y = o.linear(
            o.layer_norm(x, f"{layer}mlp_norm", eps, bias=norm_bias),
            f"{layer}mlp.Wi",
            2 * wide,
            bias=mlp_bias,
        )
        y, gate = o.split(y, [wide] * 2)
        x = o.add(
            x,
            o.linear(o.multiply(o.activate(y, act), gate), f"{layer}mlp.Wo", hidden, bias=mlp_bias),
        )
    return o.layer_norm(x, "final_norm", eps, bias=norm_bias)


def _modernbert_frequencies(s: Settings, dim: int, kind: str) -> Frequencies:
    theta = s.number("global_rope_theta", MODERNBERT_THETAS[FULL])
    # Null means the other layers' value; transformers 5 does not accept it
    if kind == SLIDING:
        theta = s.number(
            "local_rope_theta", theta if s.has("local_rope_theta") else MODERNBERT_THETAS[SLIDING]
        )
    return frequencies(s, dim, theta=theta, kind=kind)
