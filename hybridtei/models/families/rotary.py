"""Transformers with rotary positions.

Encoders: NomicBERT, GTE ("new") and Jina v3's XLM-RoBERTa, with a norm after each block; Jina
Reranker v2's, with the same names but a table of positions; ModernBERT, with norms before each
block, and windows in two of three layers. Language models that embed or rank, causal or not: Llama,
Mistral, Qwen2, Qwen3, EuroBERT, Gemma; Gemma 3, with norms around each block, windows in most
layers, and 1 added to the weights of norms.

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
    plain,
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
            q, k = (o.rotate(one, rotation, heads.dim) for one in (q, k))
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
        q, k = (o.rotate(one, rotations[kind], heads.dim) for one in (q, k))
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


@dataclass(frozen=True)
class _DecoderForm:
    """Differences between the families beyond their sizes."""

    theta: float = 10_000.0
    eps: float = 1e-6
    # Only q, k and v have a bias
    query_bias: bool = False
    head_norms: bool = False
    causal: bool = True
    # Embeddings are multiplied by the root of their width; norms' weights get 1 added
    is_gemma: bool = False


def llama(o: Ops, s: Settings) -> Rows:
    """transformers' `LlamaModel`."""
    return _decoder(o, s, _DecoderForm())


def mistral(o: Ops, s: Settings) -> Rows:
    """transformers' `MistralModel`: a window in every layer or in none."""
    return _decoder(o, s, _DecoderForm(), window=_window(s))


def qwen2(o: Ops, s: Settings) -> Rows:
    """transformers' `Qwen2Model`."""
    return _decoder(o, s, _DecoderForm(query_bias=True), *_qwen_window(s))


def qwen3(o: Ops, s: Settings) -> Rows:
    """transformers' `Qwen3Model`."""
    return _decoder(o, s, _DecoderForm(head_norms=True), *_qwen_window(s))


def eurobert(o: Ops, s: Settings) -> Rows:
    """transformers' `EuroBertModel`."""
    return _decoder(o, s, _DecoderForm(theta=250_000.0, eps=1e-5, causal=False))


# Defaults of Mistral's and Qwen's classes
WINDOW, FIRST_WINDOW = 4096, 28


def gemma(o: Ops, s: Settings) -> Rows:
    """transformers' `GemmaModel`, where "gelu" is the tanh form."""
    return _decoder(o, s, _DecoderForm(is_gemma=True))


def _window(s: Settings) -> int | None:
    is_null = s.has("sliding_window") and s.get("sliding_window") is None
    return None if is_null else s.count("sliding_window", WINDOW)


def _qwen_window(s: Settings) -> tuple[int | None, int]:
    """(window, the first layer with it if `layer_types` is missing)."""
    window, first = _window(s), s.get("max_window_layers", FIRST_WINDOW)
    if not isinstance(first, int):
        raise s.unsupported("max_window_layers", first, ("a number",))
    return window if s.flag("use_sliding_window") else None, first


def is_causal(s: Settings, default: bool) -> bool:
    """False for bidirectional models, by transformers' key or the key of converted embedders."""
    # Reads both, for `check`
    both_ways, causal = (s.flag("use_bidirectional_attention"), s.flag("is_causal", default=True))
    return default and causal and not both_ways


def _decoder(
    o: Ops, s: Settings, form: _DecoderForm, window: int | None = None, first: int = 0
) -> Rows:
    hidden, eps = s.count("hidden_size"), s.number("rms_norm_eps", form.eps)
    count = s.count("num_attention_heads")
    dim = s.count("head_dim", 256 if form.is_gemma else hidden // count)
    causal, bias, mlp_bias = is_causal(s, form.causal), s.flag("attention_bias"), s.flag("mlp_bias")
    heads = Heads(count, s.count("num_key_value_heads", count), dim, causal=causal)
    if window is not None and not causal:
        # Transformers counts a bidirectional decoder's window inclusively
        window += 1
    rotation = o.rotation(*frequencies(s, heads.dim, theta=form.theta))
    # Read for `check`: there is no table of positions
    s.get("max_position_embeddings")
    layers = s.count("num_hidden_layers")
    kinds = s.layer_kinds(layers, lambda layer: SLIDING if window and layer >= first else FULL)
    act, wide = s.activation("hidden_act", "silu"), s.count("intermediate_size")
    x = o.embedding("embed_tokens.weight", s.count("vocab_size"), hidden, "input_ids")
    offset = 0.0
    if form.is_gemma:
        s.only("hidden_activation", "gelu_pytorch_tanh")
        x, offset, act = o.scale(x, hidden**0.5), 1.0, "gelu_tanh" if act == "gelu" else act
    for i in range(layers):
        layer, attn = f"layers.{i}.", f"layers.{i}.self_attn."
        y = o.rms_norm(x, f"{layer}input_layernorm", eps, offset=offset)
        q, k, v = linears(
            o,
            y,
            [f"{attn}{name}_proj" for name in "qkv"],
            heads.widths,
            bias=bias or form.query_bias,
        )
        if form.head_norms:
            q, k = (
                o.rms_norm(one, f"{attn}{name}_norm", eps, dim=heads.dim)
                for one, name in ((q, "q"), (k, "k"))
            )
        q, k = (o.rotate(one, rotation, heads.dim) for one in (q, k))
        attended = o.attention(
            q, k, v, replace(heads, window=window if kinds[i] == SLIDING else None)
        )
        x = o.add(x, o.linear(attended, f"{attn}o_proj", hidden, bias=bias))
        y = o.rms_norm(x, f"{layer}post_attention_layernorm", eps, offset=offset)
        x = o.add(x, gated_mlp(o, y, f"{layer}mlp.", wide, act, bias=mlp_bias))
    return o.rms_norm(x, "norm", eps, offset=offset)


def gated_mlp(o: Ops, x: Rows, name: str, wide: int, act: str, *, bias: bool = False) -> Rows:
    """`down(act(gate(x)) * up(x))`."""
    gate, up = linears(o, x, [f"{name}gate_proj", f"{name}up_proj"], [wide] * 2, bias=bias)
    return o.linear(o.multiply(o.activate(gate, act), up), f"{name}down_proj", x.width, bias=bias)


GEMMA_THETAS = {FULL: 1_000_000.0, SLIDING: 10_000.0}


def gemma3(o: Ops, s: Settings) -> Rows:
    """transformers' `Gemma3TextModel`."""
    hidden, eps = s.count("hidden_size"), s.number("rms_norm_eps", 1e-6)
    count, dim = s.count("num_attention_heads"), s.count("head_dim", 256)
    scale = s.number("query_pre_attn_scalar", 256) ** -0.5
    both_ways, bias = s.flag("use_bidirectional_attention"), s.flag("attention_bias")
    heads = Heads(count, s.count("num_key_value_heads", count), dim, scale, causal=not both_ways)
    window = s.count("sliding_window", 4096)
    windows = {FULL: None, SLIDING: window // 2 + 1 if both_ways else window}
    layers = s.count("num_hidden_layers")
    every = s.count("sliding_window_pattern", s.get("_sliding_window_pattern", 6))
    kinds = s.layer_kinds(layers, lambda layer: SLIDING if (layer + 1) % every else FULL)
    # Of layers without a window, if any
    s.has_read("rope_theta", *(() if s.has("rope_parameters") else ("rope_scaling",)))
    rotations = {kind: o.rotation(*_gemma_frequencies(s, dim, kind)) for kind in sorted(set(kinds))}
    # Read for `check`: there is no table of positions
    s.get("max_position_embeddings")
    act, wide = s.activation("hidden_activation", "gelu_pytorch_tanh"), s.count("intermediate_size")
    x = o.scale(
        o.embedding("embed_tokens.weight", s.count("vocab_size"), hidden, "input_ids"), hidden**0.5
    )

    def norm(x: Rows, name: str, dim: int | None = None) -> Rows:
        return o.rms_norm(x, name, eps, dim=dim, offset=1.0)

    for i, kind in enumerate(kinds):
        layer, attn = f"layers.{i}.", f"layers.{i}.self_attn."
        y = norm(x, f"{layer}input_layernorm")
        q, k, v = linears(o, y, [f"{attn}{name}_proj" for name in "qkv"], heads.widths, bias=bias)
        q, k = (
            o.rotate(norm(one, f"{attn}{name}_norm", dim), rotations[kind], dim)
            for one, name in ((q, "q"), (k, "k"))
        )
        attended = o.attention(q, k, v, replace(heads, window=windows[kind]))
        x = o.add(
            x,
            norm(
                o.linear(attended, f"{attn}o_proj", hidden, bias=bias),
                f"{layer}post_attention_layernorm",
            ),
        )
        y = gated_mlp(o, norm(x, f"{layer}pre_feedforward_layernorm"), f"{layer}mlp.", wide, act)
        x = o.add(x, norm(y, f"{layer}post_feedforward_layernorm"))
    return norm(x, "norm")


def _gemma_frequencies(s: Settings, dim: int, kind: str) -> Frequencies:
    """Older files have one base for layers with a window, and another base with scaling for the
    other layers."""
    local = s.number("rope_local_base_freq", GEMMA_THETAS[SLIDING])
    if kind == SLIDING and SLIDING not in s.get("rope_parameters", {}):
        return plain(dim, local), 1.0
    return frequencies(s, dim, theta=GEMMA_THETAS[kind], kind=kind)
