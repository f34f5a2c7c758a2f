"""DeBERTa v2 and v3: scores of contents with distances beside those of contents with contents."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hybridtei.families.ops import Heads, Ops, Rows
from hybridtei.families.settings import Settings


def deberta_v2(o: Ops, s: Settings) -> Rows:
    """After `DebertaV2Model`."""
    s.only("conv_kernel_size", 0)
    hidden, eps, count = s.count("hidden_size"), s.number("layer_norm_eps", 1e-7), s.count("num_attention_heads")
    heads = Heads(count, count, s.count("attention_head_size", hidden // count))
    x = _embeddings(o, s, hidden, eps)
    kinds = s.get("pos_att_type") or []
    kinds = kinds.split("|") if isinstance(kinds, str) else kinds
    relative = s.flag("relative_attention")
    scale = (heads.dim * (1 + ("c2p" in kinds) + ("p2c" in kinds))) ** -0.5
    positions = s.count("max_position_embeddings", 512)
    furthest = s.get("max_relative_positions", -1)
    furthest = furthest if furthest > 0 else positions
    number = s.get("position_buckets", -1)
    span = number if number > 0 else furthest
    table = _distances(o, s, 2 * span, hidden, eps) if relative else None
    places = buckets(number, furthest, span, positions)
    shared, all_heads = s.flag("share_att_key"), heads.count * heads.dim
    act, wide = s.activation("hidden_act"), s.count("intermediate_size")
    for i in range(s.count("num_hidden_layers")):
        layer, attn = f"encoder.layer.{i}.", f"encoder.layer.{i}.attention.self."
        q, k, v = o.linears(x, [f"{attn}{name}_proj" for name in ("query", "key", "value")], [all_heads] * 3)
        bias = None
        if table is not None:
            key, query = ("key_proj", "query_proj") if shared else ("pos_key_proj", "pos_query_proj")
            c2p = o.linear(table, f"{attn}{key}", all_heads) if "c2p" in kinds else None
            p2c = o.linear(table, f"{attn}{query}", all_heads) if "p2c" in kinds else None
            bias = o.disentangled(q, k, heads, places, content_to_position=c2p, position_to_content=p2c, scale=scale)
        y = o.linear(o.attention(q, k, v, heads, scale=scale, bias=bias), f"{layer}attention.output.dense", hidden)
        x = o.layer_norm(o.add(y, x), f"{layer}attention.output.LayerNorm", eps)
        y = o.linear(o.activate(o.linear(x, f"{layer}intermediate.dense", wide), act), f"{layer}output.dense", hidden)
        x = o.layer_norm(o.add(y, x), f"{layer}output.LayerNorm", eps)
    return x


def _embeddings(o: Ops, s: Settings, hidden: int, eps: float) -> Rows:
    width = s.count("embedding_size", hidden)
    x = o.embedding("embeddings.word_embeddings.weight", s.count("vocab_size"), width, "input_ids")
    if s.flag("position_biased_input", default=True):
        positions = s.count("max_position_embeddings", 512)
        x = o.add(x, o.embedding("embeddings.position_embeddings.weight", positions, width, "position_ids"))
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


def buckets(number: int, furthest: int, span: int, longest: int) -> NDArray[np.int64]:
    """Row of the table of distances for each query minus key from -longest to longest: near exact, far logarithmic."""
    distance = np.arange(-longest, longest + 1)
    place = distance
    if number > 0 and furthest > 0:
        middle = number // 2
        far = np.where(np.abs(distance) < middle, middle - 1, np.abs(distance)).astype(np.float32)
        steps = np.log(far / np.float32(middle)) / np.log(np.float32((furthest - 1) / middle)) * np.float32(middle - 1)
        place = np.where(far <= middle, distance, ((np.ceil(steps) + middle) * np.sign(distance)).astype(np.int64))
    return np.clip(place + span, 0, 2 * span - 1).astype(np.int64)
