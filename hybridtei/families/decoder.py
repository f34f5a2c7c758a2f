"""Language models that embed or rank, causal or not: Llama, Mistral, Qwen2, Qwen3, EuroBERT, Gemma 3."""

from __future__ import annotations

from dataclasses import dataclass

from hybridtei.families.ops import Heads, Ops, Rows
from hybridtei.families.rope import frequencies
from hybridtei.families.settings import FULL, SLIDING, Settings


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
