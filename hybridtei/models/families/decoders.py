"""Blocks of language models with rotary positions, causal or not, that embed or rank.

Llama, Mistral, Ministral 3, Qwen2, Qwen3, EuroBERT, Gemma; UltraBERT, with windows in two of three
layers; Gemma 3, with norms around each block, windows in most layers, and 1 added to the weights of
norms.

Tensors have the publishers' names, which transformers uses too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hybridtei.models.families.ops import Heads, Ops, Rotation, Rows, linears
from hybridtei.models.families.settings import (
    FULL,
    SLIDING,
    Frequencies,
    Settings,
    frequencies,
    plain,
)

# The window of layers that have one, and the first of these if `layer_types` is missing
Window = tuple[int | None, int]
# Defaults of Mistral's and Qwen's classes
WINDOW, FIRST_WINDOW = 4096, 28


def no_window(s: Settings) -> Window:
    """Every layer sees whole texts."""
    return None, 0


def mistral_window(s: Settings) -> Window:
    """A window in every layer, or with null in none."""
    is_null = s.has("sliding_window") and s.get("sliding_window") is None
    return (None if is_null else s.count("sliding_window", WINDOW)), 0


def qwen_window(s: Settings) -> Window:
    """A window only if `use_sliding_window` says so."""
    window, first = mistral_window(s)[0], s.get("max_window_layers", FIRST_WINDOW)
    if not isinstance(first, int):
        raise s.unsupported("max_window_layers", first, ("a number",))
    return window if s.flag("use_sliding_window") else None, first


def ministral_window(s: Settings) -> Window:
    """A window only if there is a number."""
    # Its class has yarn as the default, which transformers writes out
    if not s.get("rope_parameters"):
        raise s.unsupported("rope_parameters", None, ("an object that names `rope_type`",))
    return (s.count("sliding_window") if s.get("sliding_window") is not None else None), 0


def ultrabert_window(s: Settings) -> Window:
    """A window in every layer but each n-th."""
    return s.count("sliding_window", 128), 0


@dataclass(frozen=True)
class Decoder:
    """A family of Llama's kind, by its differences beyond sizes. It computes the last hidden
    states of transformers' class."""

    theta: float = 10_000.0
    # The base of layers with a window, if it is another one
    local_theta: float | None = None
    window: Callable[[Settings], Window] = no_window
    # Without `layer_types` every n-th layer has no window
    every: int = 0
    # Without their keys: numbers of a head, by default the width's share, and heads of keys
    dim: int | None = None
    key_count: int | None = None
    eps: float = 1e-6
    # Queries grow with their position, by `llama_4_scaling_beta`
    grows: bool = False
    # Only q, k and v have a bias
    query_bias: bool = False
    head_norms: bool = False
    causal: bool = True
    # Embeddings are multiplied by the root of their width; norms' weights get 1 added; "gelu" is
    # the tanh form
    is_gemma: bool = False

    def __call__(self, o: Ops, s: Settings) -> Rows:
        window, first = self.window(s)
        hidden, eps = s.count("hidden_size"), s.number("rms_norm_eps", self.eps)
        count = s.count("num_attention_heads")
        # Null means the width's share, a missing key the family's default
        dim, key_count = hidden // count, count
        if self.dim is not None and not s.has("head_dim"):
            dim = self.dim
        if self.key_count is not None and not s.has("num_key_value_heads"):
            key_count = self.key_count
        dim = s.count("head_dim", dim)
        causal, bias, mlp_bias = (
            is_causal(s, self.causal),
            s.flag("attention_bias"),
            s.flag("mlp_bias"),
        )
        heads = Heads(count, s.count("num_key_value_heads", key_count), dim, causal=causal)
        if window is not None and not causal:
            # Transformers counts a bidirectional decoder's window inclusively
            window += 1
        layers = s.count("num_hidden_layers")

        def usual(layer: int) -> str:
            is_full = (
                window is None or layer < first or (self.every and (layer + 1) % self.every == 0)
            )
            return FULL if is_full else SLIDING

        kinds = s.layer_kinds(layers, usual)
        rotations = _rotations(o, s, self, heads.dim, kinds)
        # Read for `check`: there is no table of positions
        s.get("max_position_embeddings")
        act, wide = s.activation("hidden_act", "silu"), s.count("intermediate_size")
        x = o.embedding("embed_tokens.weight", s.count("vocab_size"), hidden, "input_ids")
        offset = 0.0
        if self.is_gemma:
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
                bias=bias or self.query_bias,
            )
            if self.head_norms:
                q, k = (
                    o.rms_norm(rows, f"{attn}{name}_norm", eps, dim=heads.dim)
                    for rows, name in ((q, "q"), (k, "k"))
                )
            of_queries, of_keys = rotations[kinds[i]]
            q, k = o.rotate(q, of_queries, heads.dim), o.rotate(k, of_keys, heads.dim)
            attended = o.attention(
                q,
                k,
                v,
                replace(heads, window=window if kinds[i] == SLIDING else None),
            )
            x = o.add(x, o.linear(attended, f"{attn}o_proj", hidden, bias=bias))
            y = o.rms_norm(x, f"{layer}post_attention_layernorm", eps, offset=offset)
            x = o.add(x, gated_mlp(o, y, f"{layer}mlp.", wide, act, bias=mlp_bias))
        return o.rms_norm(x, "norm", eps, offset=offset)


def is_causal(s: Settings, default: bool) -> bool:
    """False for bidirectional models, by transformers' key or the key of converted embedders."""
    # Reads both, for `check`
    both_ways, causal = (s.flag("use_bidirectional_attention"), s.flag("is_causal", default=True))
    return default and causal and not both_ways


def _rotations(
    o: Ops, s: Settings, form: Decoder, dim: int, kinds: list[str]
) -> dict[str, tuple[Rotation, Rotation]]:
    """The rotations of queries and of keys, for each kind of layer."""
    if form.local_theta is not None:
        thetas = {FULL: form.theta, SLIDING: form.local_theta}
        rotations = {
            kind: o.rotation(*frequencies(s, dim, theta=thetas[kind], kind=kind))
            for kind in sorted(set(kinds))
        }
        return {kind: (rotation, rotation) for kind, rotation in rotations.items()}
    own = GROWTH if form.grows else ()
    angles = frequencies(s, dim, theta=form.theta, ignored=own)
    of_keys = of_queries = o.rotation(*angles)
    growth = _growth(s) if form.grows else None
    if growth is not None:
        of_queries = o.rotation(*angles, growth)
    return dict.fromkeys(kinds, (of_queries, of_keys))


# Ministral's parameters of rotary positions beside those of all families
GROWTH = ("llama_4_scaling_beta", "max_position_embeddings")


def _growth(s: Settings) -> tuple[float, int] | None:
    parameters = s.nested(s.get("rope_parameters"), "rope_parameters")
    if not parameters.get("llama_4_scaling_beta"):
        return None
    length = parameters.count("original_max_position_embeddings")
    return parameters.number("llama_4_scaling_beta"), length


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
