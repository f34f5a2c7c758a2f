"""Blocks of language models with rotary positions, causal or not, that embed or rank.

Llama, Mistral, Qwen2, Qwen3, EuroBERT, Gemma; Gemma 3, with norms around each block, windows in
most layers, and 1 added to the weights of norms.

Tensors have the publishers' names, which transformers uses too.
"""

from __future__ import annotations

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
                o.rms_norm(rows, f"{attn}{name}_norm", eps, dim=heads.dim)
                for rows, name in ((q, "q"), (k, "k"))
            )
        q, k = (o.rotate(rows, rotation, heads.dim) for rows in (q, k))
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
            o.rotate(norm(rows, f"{attn}{name}_norm", dim), rotations[kind], dim)
            for rows, name in ((q, "q"), (k, "k"))
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
