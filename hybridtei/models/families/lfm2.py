"""LFM2.5's encoders: gated convolutions over a token and its two neighbours, and grouped attention
in some layers, all in both directions."""

from __future__ import annotations

from hybridtei.models.families.ops import Heads, Ops, Rows, linears
from hybridtei.models.families.settings import FULL, Settings, frequencies

CONV = "conv"


def lfm2(o: Ops, s: Settings) -> Rows:
    """Liquid AI's `Lfm2BidirectionalModel`: transformers' `Lfm2Model` without its causal mask, and
    with centred convolutions."""
    hidden, eps = s.count("hidden_size", 2560), s.number("norm_eps", 1e-5)
    count, layers = s.count("num_attention_heads", 32), s.count("num_hidden_layers", 32)
    dim = s.count("head_dim", hidden // count)
    heads = Heads(count, s.count("num_key_value_heads", 8), dim)
    s.only("conv_bias", False)
    s.only("conv_L_cache", 3)
    attending = s.get("full_attn_idxs", range(layers))
    kinds = s.layer_kinds(layers, lambda i: FULL if i in attending else CONV, other=CONV)
    rotation = o.rotation(*frequencies(s, dim, theta=1_000_000.0))
    # Read for `check`: there is no table of positions
    s.get("max_position_embeddings")
    wide = _wide(s)
    x = o.embedding("embed_tokens.weight", s.count("vocab_size"), hidden, "input_ids")
    for i, kind in enumerate(kinds):
        layer, attn = f"layers.{i}.", f"layers.{i}.self_attn."
        y = o.rms_norm(x, f"{layer}operator_norm", eps)
        if kind == CONV:
            y = o.linear(y, f"{layer}conv.in_proj", 3 * hidden, bias=False)
            before, after, y = o.split(y, [hidden] * 3)
            y = o.convolve(o.multiply(before, y), f"{layer}conv.conv")
            y = o.linear(o.multiply(after, y), f"{layer}conv.out_proj", hidden, bias=False)
        else:
            q, k, v = linears(
                o, y, [f"{attn}{part}_proj" for part in "qkv"], heads.widths, bias=False
            )
            q = o.rotate(o.rms_norm(q, f"{attn}q_layernorm", eps, dim=dim), rotation, dim)
            k = o.rotate(o.rms_norm(k, f"{attn}k_layernorm", eps, dim=dim), rotation, dim)
            y = o.linear(o.attention(q, k, v, heads), f"{attn}out_proj", hidden, bias=False)
        x = o.add(x, y)
        y = o.rms_norm(x, f"{layer}ffn_norm", eps)
        mlp = f"{layer}feed_forward."
        gate, up = linears(o, y, [f"{mlp}w1", f"{mlp}w3"], [wide] * 2, bias=False)
        y = o.multiply(o.activate(gate, "silu"), up)
        x = o.add(x, o.linear(y, f"{mlp}w2", hidden, bias=False))
    return o.rms_norm(x, "embedding_norm", eps)


def _wide(s: Settings) -> int:
    """The MLP's width: two thirds of the declared one, rounded up, unless it is taken as it is."""
    wide, multiple = s.count("intermediate_size", 12_288), s.count("block_multiple_of", 256)
    factor = s.number("block_ffn_dim_multiplier", 1.0)
    if s.flag("block_auto_adjust_ff_dim", True):
        wide = -(-int(factor * int(2 * wide / 3)) // multiple) * multiple
    return wide
