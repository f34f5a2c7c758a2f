"""Language models that embed or rank, causal or not: Llama, Mistral, Qwen2, Qwen3, EuroBERT, Gemma 3.

Gemma 3 has norms around each block, windows in most layers, and weights of norms that are added to one.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridtei.families.ops import Heads, Ops, Rows
from hybridtei.families.settings import FULL, SLIDING, Frequencies, Settings, frequencies, plain


@dataclass(frozen=True)
class _Form:
    """What the families differ in beyond their numbers."""

    theta: float = 10_000.0
    query_bias: bool = False  # of q, k and v alone
    head_norms: bool = False
    causal: bool = True


def llama(o: Ops, s: Settings) -> Rows:
    """After `LlamaModel`."""
    return _decoder(o, s, _Form())


def mistral(o: Ops, s: Settings) -> Rows:
    """After `MistralModel`: a window in every layer, if in any."""
    return _decoder(o, s, _Form(), window=_window(s))


def qwen2(o: Ops, s: Settings) -> Rows:
    """After `Qwen2Model`."""
    return _decoder(o, s, _Form(query_bias=True), window=_qwen_window(s))


def qwen3(o: Ops, s: Settings) -> Rows:
    """After `Qwen3Model`."""
    return _decoder(o, s, _Form(head_norms=True), window=_qwen_window(s))


def eurobert(o: Ops, s: Settings) -> Rows:
    """After `EuroBertModel`."""
    return _decoder(o, s, _Form(theta=250_000.0, causal=False))


def _window(s: Settings) -> int | None:
    return None if s.get("sliding_window") is None else s.count("sliding_window")


def _qwen_window(s: Settings) -> int | None:
    window = _window(s)
    s.get("max_window_layers")  # `layer_types` says which layers have the window
    return window if s.flag("use_sliding_window") else None


def is_causal(s: Settings, default: bool) -> bool:
    """Both spellings of a model that sees both ways: transformers' and that of converted embedders."""
    both_ways, causal = s.flag("use_bidirectional_attention"), s.flag("is_causal", default=True)  # each is read: see `check`
    return default and causal and not both_ways


def _decoder(o: Ops, s: Settings, form: _Form, window: int | None = None) -> Rows:
    hidden, eps = s.count("hidden_size"), s.number("rms_norm_eps", 1e-6)
    count = s.count("num_attention_heads")
    heads = Heads(count, s.count("num_key_value_heads", count), s.count("head_dim", hidden // count))
    causal, bias, mlp_bias = is_causal(s, form.causal), s.flag("attention_bias"), s.flag("mlp_bias")
    if window is not None and not causal:
        window += 1  # transformers counts a window inclusively once a decoder sees both ways
    rotation = o.rotation(*frequencies(s, heads.dim, theta=form.theta))
    s.get("max_position_embeddings")  # no table is that long
    layers = s.count("num_hidden_layers")
    kinds = s.layer_kinds(layers, lambda _: SLIDING if window else FULL)
    act, wide = s.activation("hidden_act", "silu"), s.count("intermediate_size")
    x = o.embedding("embed_tokens.weight", s.count("vocab_size"), hidden, "input_ids")
    for i in range(layers):
        layer, attn = f"layers.{i}.", f"layers.{i}.self_attn."
        y = o.rms_norm(x, f"{layer}input_layernorm", eps)
        q, k, v = o.linears(y, [f"{attn}{name}_proj" for name in "qkv"], heads.widths, bias=bias or form.query_bias)
        if form.head_norms:
            q, k = (o.rms_norm(one, f"{attn}{name}_norm", eps, dim=heads.dim) for one, name in ((q, "q"), (k, "k")))
        q, k = (o.rotate(one, rotation, heads.dim) for one in (q, k))
        seen = window if kinds[i] == SLIDING else None
        attended = o.attention(q, k, v, heads, scale=heads.dim**-0.5, causal=causal, window=seen)
        x = o.add(x, o.linear(attended, f"{attn}o_proj", hidden, bias=bias))
        y = o.rms_norm(x, f"{layer}post_attention_layernorm", eps)
        x = o.add(x, gated_mlp(o, y, f"{layer}mlp.", wide, act, bias=mlp_bias))
    return o.rms_norm(x, "norm", eps)


def gated_mlp(o: Ops, x: Rows, name: str, wide: int, act: str, *, bias: bool = False) -> Rows:
    """`down(act(gate(x)) * up(x))`."""
    gate, up = o.linears(x, [f"{name}gate_proj", f"{name}up_proj"], [wide] * 2, bias=bias)
    return o.linear(o.multiply(o.activate(gate, act), up), f"{name}down_proj", x.width, bias=bias)


GEMMA_THETAS = {FULL: 1_000_000.0, SLIDING: 10_000.0}


def gemma3(o: Ops, s: Settings) -> Rows:
    """After `Gemma3TextModel`."""
    hidden, eps = s.count("hidden_size"), s.number("rms_norm_eps", 1e-6)
    count, dim = s.count("num_attention_heads"), s.count("head_dim", 256)
    heads = Heads(count, s.count("num_key_value_heads", count), dim)
    scale = s.number("query_pre_attn_scalar", 256) ** -0.5
    both_ways, bias = s.flag("use_bidirectional_attention"), s.flag("attention_bias")
    window = s.count("sliding_window", 4096)
    windows = {FULL: None, SLIDING: window // 2 + 1 if both_ways else window}
    layers = s.count("num_hidden_layers")
    every = s.count("sliding_window_pattern", s.get("_sliding_window_pattern", 6))
    kinds = s.layer_kinds(layers, lambda layer: SLIDING if (layer + 1) % every else FULL)
    rotations = {kind: o.rotation(*_gemma_frequencies(s, dim, kind)) for kind in sorted(set(kinds))}
    s.get("max_position_embeddings")  # no table is that long
    act, wide = s.activation("hidden_activation", "gelu_pytorch_tanh"), s.count("intermediate_size")
    x = o.scale(o.embedding("embed_tokens.weight", s.count("vocab_size"), hidden, "input_ids"), hidden**0.5)

    def norm(x: Rows, name: str, dim: int | None = None) -> Rows:
        return o.rms_norm(x, name, eps, dim=dim, offset=1.0)

    for i, kind in enumerate(kinds):
        layer, attn = f"layers.{i}.", f"layers.{i}.self_attn."
        y = norm(x, f"{layer}input_layernorm")
        q, k, v = o.linears(y, [f"{attn}{name}_proj" for name in "qkv"], heads.widths, bias=bias)
        q, k = (o.rotate(norm(one, f"{attn}{name}_norm", dim), rotations[kind], dim) for one, name in ((q, "q"), (k, "k")))
        attended = o.attention(q, k, v, heads, scale=scale, causal=not both_ways, window=windows[kind])
        x = o.add(x, norm(o.linear(attended, f"{attn}o_proj", hidden, bias=bias), f"{layer}post_attention_layernorm"))
        y = gated_mlp(o, norm(x, f"{layer}pre_feedforward_layernorm"), f"{layer}mlp.", wide, act)
        x = o.add(x, norm(y, f"{layer}post_feedforward_layernorm"))
    return norm(x, "norm")


def _gemma_frequencies(s: Settings, dim: int, kind: str) -> Frequencies:
    """Older files have one base for windows, and one with its scaling for the other layers."""
    local = s.number("rope_local_base_freq", GEMMA_THETAS[SLIDING])
    if kind == SLIDING and SLIDING not in s.get("rope_parameters", {}):
        return plain(dim, local), 1.0
    return frequencies(s, dim, theta=GEMMA_THETAS[kind], kind=kind)
