"""Models of which transformers has no class, in plain numpy of 64 bits, a text at a time, after the
code of their makers.

The oracle of families: it shares nothing with them, and takes config.json as the maker writes it.
Sources: `modeling_bert.py` of jinaai/jina-bert-implementation and jinaai/jina-bert-v2-qk-post-norm;
`modeling_hf_nomic_bert.py` of nomic-ai/contrastors and nomic-ai/nomic-bert-2048.
"""

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]
Tensors = Mapping[str, Doubles]


def states(model, config, tensors, texts):
    """Hidden states float32[t, h] by `jina` or `nomic`."""
    wide = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    return np.concatenate(
        [model(config, wide, np.asarray(text.input_ids)) for text in texts]
    ).astype(np.float32)


def jina(config, w, ids):
    """`JinaBertModel` of either implementation, told apart by their tensors. All tokens are of type
    0."""
    eps, heads = config["layer_norm_eps"], config["num_attention_heads"]
    x = (
        w["embeddings.word_embeddings.weight"][ids]
        + w["embeddings.token_type_embeddings.weight"][0]
    )
    x = norm(x, w, "embeddings.LayerNorm", eps)
    bias = jina_bias(heads, len(ids))
    for number in range(config["num_hidden_layers"]):
        layer = {
            name.removeprefix(f"encoder.layer.{number}."): tensor for name, tensor in w.items()
        }
        q, k, v = (linear(x, layer, f"attention.self.{name}") for name in ("query", "key", "value"))
        is_code = "attention.self.layer_norm_q.weight" in layer
        if is_code:
            q, k = (
                norm(q, layer, "attention.self.layer_norm_q", eps),
                norm(k, layer, "attention.self.layer_norm_k", eps),
            )
        attended = linear(attention(q, k, v, heads, bias), layer, "attention.output.dense")
        attended = norm(attended + x, layer, "attention.output.LayerNorm", eps)
        x = (
            jina_code_mlp(config, layer, x, attended, eps)
            if is_code
            else jina_mlp(config, layer, attended, eps)
        )
    return x


def jina_mlp(config, layer, x, eps):
    if config["feed_forward_type"] == "original":
        y = linear(gelu(linear(x, layer, "intermediate.dense")), layer, "output.dense")
        return norm(y + x, layer, "output.LayerNorm", eps)
    both = linear(x, layer, "mlp.gated_layers")
    gated, non_gated = both[:, : both.shape[1] // 2], both[:, both.shape[1] // 2 :]
    y = linear(function(config["feed_forward_type"])(gated) * non_gated, layer, "mlp.wo")
    return norm(y + x, layer, "mlp.layernorm", eps)


def jina_code_mlp(config, layer, before, attended, eps):
    residual = norm(before + attended, layer, "layer_norm_1", eps)
    if config["feed_forward_type"] == "original":
        y = gelu(linear(residual, layer, "mlp.up_layer"))
    else:
        both = linear(residual, layer, "mlp.up_gated_layer")
        up, gated = both[:, : both.shape[1] // 2], both[:, both.shape[1] // 2 :]
        y = up * function(config["feed_forward_type"])(gated)
    return norm(residual + linear(y, layer, "mlp.down_layer"), layer, "layer_norm_2", eps)


def jina_bias(heads, length):
    """float64[heads, length, length]; slopes after the paper's `get_slopes`."""

    def power_of_two(count):
        start = 2 ** (-(2 ** -(math.log2(count) - 3)))
        return [start * start**number for number in range(count)]

    def of(count):
        if math.log2(count).is_integer():
            return power_of_two(count)
        closest = 2 ** math.floor(math.log2(count))
        return power_of_two(closest) + of(2 * closest)[0::2][: count - closest]

    places = np.arange(length)
    return -np.array(of(heads))[:, None, None] * np.abs(places[None, :] - places[:, None])


def nomic(config, w, ids):
    """`NomicBertModel` of Nomic's own code, with or without experts. All tokens are of type 0."""
    eps, heads = config["layer_norm_epsilon"], config["n_head"]
    x = (
        w["embeddings.word_embeddings.weight"][ids]
        + w["embeddings.token_type_embeddings.weight"][0]
    )
    x = norm(x, w, "emb_ln", eps)
    for number in range(config["n_layer"]):
        layer = {
            name.removeprefix(f"encoder.layers.{number}."): tensor for name, tensor in w.items()
        }
        q, k, v = np.split(linear(x, layer, "attn.Wqkv"), 3, axis=1)
        q, k = (rotated(one, heads, config["rotary_emb_base"]) for one in (q, k))
        x = norm(linear(attention(q, k, v, heads), layer, "attn.out_proj") + x, layer, "norm1", eps)
        every = config.get("moe_every_n_layers") or 0
        mlp = nomic_experts if every > 0 and number % every == 1 else nomic_mlp
        x = norm(mlp(config, layer, x) + x, layer, "norm2", eps)
    return x


def nomic_mlp(config, layer, x):
    if config["activation_function"] == "gelu":
        return linear(gelu(linear(x, layer, "mlp.fc1")), layer, "mlp.fc2")
    gate = function(config["activation_function"])(linear(x, layer, "mlp.fc12"))
    return linear(linear(x, layer, "mlp.fc11") * gate, layer, "mlp.fc2")


def nomic_experts(config, layer, x):
    """Token by token: only the chosen experts are computed, weighted by the softmax over all of
    them."""
    count, size = config["num_experts"], config["n_inner"]
    w1, w2 = (layer[f"mlp.experts.mlp.{name}"].reshape(count, size, -1) for name in ("w1", "w2"))
    chances = softmax(linear(x, layer, "mlp.router.layer"))
    out = np.tile(layer["mlp.experts.bias"], (len(x), 1))
    for token, row in enumerate(x):
        for expert in np.argsort(-chances[token])[: config["moe_top_k"]]:
            out[token] += chances[token, expert] * (gelu(row @ w1[expert].T) @ w2[expert])
    return out


def rotated(x, heads, base):
    dim = x.shape[1] // heads
    angles = np.arange(len(x))[:, None] / base ** (np.arange(0, dim, 2) / dim)
    cos, sin = (np.tile(one, 2)[:, None] for one in (np.cos(angles), np.sin(angles)))
    rows = x.reshape(len(x), heads, dim)
    turned = np.concatenate([-rows[..., dim // 2 :], rows[..., : dim // 2]], axis=2)
    return (rows * cos + turned * sin).reshape(x.shape)


def attention(q, k, v, heads, bias=0.0):
    q, k, v = (one.reshape(len(one), heads, -1).transpose(1, 0, 2) for one in (q, k, v))
    scores = q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[2]) + bias
    return (softmax(scores) @ v).transpose(1, 0, 2).reshape(q.shape[1], -1)


def softmax(x):
    raised = np.exp(x - x.max(-1, keepdims=True))
    return raised / raised.sum(-1, keepdims=True)


def linear(x, w, name):
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)


def norm(x, w, name, eps):
    centred = x - x.mean(-1, keepdims=True)
    return (
        centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * w[f"{name}.weight"]
        + w[f"{name}.bias"]
    )


def gelu(x):
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def function(name):
    """Of the gate that a name ending in "glu" means."""
    return {
        "geglu": gelu,
        "reglu": lambda x: np.maximum(x, 0),
        "swiglu": lambda x: x / (1 + np.exp(-x)),
    }[name]
