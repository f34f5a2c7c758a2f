"""Names and shapes of the tensors that makers write, by the sizes of a config.json: one function a layout.

Sources: the class of transformers that a checkpoint declares, else the modelling code that its makers published. A test holds
those that transformers has against it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Config = Mapping[str, Any]
Shapes = dict[str, tuple[int, ...]]


def linear(name: str, out: int, width: int, *, bias: bool = True) -> Shapes:
    """A matrix, and its bias."""
    return {f"{name}.weight": (out, width), **({f"{name}.bias": (out,)} if bias else {})}


def norm(name: str, width: int, *, bias: bool = True) -> Shapes:
    """Scale, and shift."""
    return {f"{name}.weight": (width,), **({f"{name}.bias": (width,)} if bias else {})}


def _bert_embeddings(c: Config, *tables: str) -> Shapes:
    rows = {"word": c["vocab_size"], "position": c["max_position_embeddings"], "token_type": c.get("type_vocab_size", 0)}
    width = c["hidden_size"]
    shapes: Shapes = {f"embeddings.{name}_embeddings.weight": (rows[name], width) for name in tables}
    return shapes | norm("embeddings.LayerNorm", width)


def bert(c: Config) -> Shapes:
    """BERT and XLM-RoBERTa, with the pooler."""
    h, wide, shapes = c["hidden_size"], c["intermediate_size"], _bert_embeddings(c, "word", "position", "token_type")
    for i in range(c["num_hidden_layers"]):
        layer = f"encoder.layer.{i}."
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            shapes |= linear(f"{layer}attention.{part}", h, h)
        shapes |= norm(f"{layer}attention.output.LayerNorm", h) | linear(f"{layer}intermediate.dense", wide, h)
        shapes |= linear(f"{layer}output.dense", h, wide) | norm(f"{layer}output.LayerNorm", h)
    return shapes | linear("pooler.dense", h, h)


def xlm_roberta_ranker(c: Config) -> Shapes:
    """`XLMRobertaForSequenceClassification`: no pooler, a head of two layers."""
    h = c["hidden_size"]
    trunk = {f"roberta.{name}": shape for name, shape in bert(c).items() if not name.startswith("pooler.")}
    return trunk | linear("classifier.dense", h, h) | linear("classifier.out_proj", 1, h)


def mpnet(c: Config) -> Shapes:
    """`MPNetModel`."""
    h, wide, shapes = c["hidden_size"], c["intermediate_size"], _bert_embeddings(c, "word", "position")
    for i in range(c["num_hidden_layers"]):
        layer = f"encoder.layer.{i}."
        for part in "qkvo":
            shapes |= linear(f"{layer}attention.attn.{part}", h, h)
        shapes |= norm(f"{layer}attention.LayerNorm", h) | linear(f"{layer}intermediate.dense", wide, h)
        shapes |= linear(f"{layer}output.dense", h, wide) | norm(f"{layer}output.LayerNorm", h)
    shapes["encoder.relative_attention_bias.weight"] = (c["relative_attention_num_buckets"], c["num_attention_heads"])
    return shapes | linear("pooler.dense", h, h)


def deberta_ranker(c: Config) -> Shapes:
    """`DebertaV2ForSequenceClassification` as v3 is laid out: shared projections, distances with a norm, no positions."""
    h, wide, shapes = c["hidden_size"], c["intermediate_size"], _bert_embeddings(c, "word")
    for i in range(c["num_hidden_layers"]):
        layer = f"encoder.layer.{i}."
        for part in ("self.query_proj", "self.key_proj", "self.value_proj", "output.dense"):
            shapes |= linear(f"{layer}attention.{part}", h, h)
        shapes |= norm(f"{layer}attention.output.LayerNorm", h) | linear(f"{layer}intermediate.dense", wide, h)
        shapes |= linear(f"{layer}output.dense", h, wide) | norm(f"{layer}output.LayerNorm", h)
    shapes |= {"encoder.rel_embeddings.weight": (2 * c["position_buckets"], h)} | norm("encoder.LayerNorm", h)
    trunk = {f"deberta.{name}": shape for name, shape in shapes.items()}
    return trunk | linear("pooler.dense", h, h) | linear("classifier", 1, h)


def gte(c: Config) -> Shapes:
    """Alibaba's `NewForTokenClassification`, as gte-multilingual-base is stored."""
    h, wide = c["hidden_size"], c["intermediate_size"]
    shapes = _bert_embeddings(c, "word", *(["token_type"] if c["type_vocab_size"] else []))
    for i in range(c["num_hidden_layers"]):
        layer = f"encoder.layer.{i}."
        shapes |= linear(f"{layer}attention.qkv_proj", 3 * h, h) | linear(f"{layer}attention.o_proj", h, h)
        shapes |= linear(f"{layer}mlp.up_gate_proj", 2 * wide, h, bias=False) | linear(f"{layer}mlp.down_proj", h, wide)
        shapes |= norm(f"{layer}attn_ln", h) | norm(f"{layer}mlp_ln", h)
    return {f"new.{name}": shape for name, shape in shapes.items()} | linear("classifier", 1, h)


def modernbert(c: Config) -> Shapes:
    """`ModernBertModel`."""
    h, wide = c["hidden_size"], c["intermediate_size"]
    shapes = {"embeddings.tok_embeddings.weight": (c["vocab_size"], h)} | norm("embeddings.norm", h, bias=False)
    for i in range(c["num_hidden_layers"]):
        layer = f"layers.{i}."
        shapes |= norm(f"{layer}attn_norm", h, bias=False) if i else {}
        shapes |= linear(f"{layer}attn.Wqkv", 3 * h, h, bias=False) | linear(f"{layer}attn.Wo", h, h, bias=False)
        shapes |= norm(f"{layer}mlp_norm", h, bias=False)
        shapes |= linear(f"{layer}mlp.Wi", 2 * wide, h, bias=False) | linear(f"{layer}mlp.Wo", h, wide, bias=False)
    return shapes | norm("final_norm", h, bias=False)


def nomic(c: Config) -> Shapes:
    """`NomicBertModel` of its makers, whose configuration is spelled as GPT-2's."""
    h, wide = c["n_embd"], c["n_inner"]
    shapes: Shapes = {
        "embeddings.word_embeddings.weight": (c["vocab_size"], h),
        "embeddings.token_type_embeddings.weight": (c["type_vocab_size"], h),
    }
    for i in range(c["n_layer"]):
        layer = f"encoder.layers.{i}."
        shapes |= linear(f"{layer}attn.Wqkv", 3 * h, h, bias=False) | linear(f"{layer}attn.out_proj", h, h, bias=False)
        for part in ("fc11", "fc12"):
            shapes |= linear(f"{layer}mlp.{part}", wide, h, bias=False)
        shapes |= linear(f"{layer}mlp.fc2", h, wide, bias=False) | norm(f"{layer}norm1", h) | norm(f"{layer}norm2", h)
    return shapes | norm("emb_ln", h)


def jina_v2(c: Config) -> Shapes:
    """`JinaBertModel`: BERT's attention, ALiBi in place of positions, a gated block."""
    h, wide, shapes = c["hidden_size"], c["intermediate_size"], _bert_embeddings(c, "word", "token_type")
    for i in range(c["num_hidden_layers"]):
        layer = f"encoder.layer.{i}."
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            shapes |= linear(f"{layer}attention.{part}", h, h)
        shapes |= norm(f"{layer}attention.output.LayerNorm", h) | norm(f"{layer}mlp.layernorm", h)
        shapes |= linear(f"{layer}mlp.gated_layers", 2 * wide, h, bias=False) | linear(f"{layer}mlp.wo", h, wide)
    return shapes | linear("pooler.dense", h, h)


def jina_v3(c: Config) -> Shapes:
    """`XLMRobertaLoRA`: each matrix with five adapters of rank 4 in one pair of tensors."""
    h, wide = c["hidden_size"], c["intermediate_size"]
    shapes: Shapes = {}

    def adapted(name: str, out: int, width: int, *, table: bool = False) -> None:
        tasks, rank = len(c["lora_adaptations"]), c["lora_rank"]
        sides = ((out, rank), (rank, width)) if table else ((rank, width), (out, rank))
        shapes[f"{name}.parametrizations.weight.original"] = (out, width)
        for letter, side in zip("AB", sides, strict=True):
            shapes[f"{name}.parametrizations.weight.0.lora_{letter}"] = (tasks, *side)
        if not table:
            shapes[f"{name}.bias"] = (out,)

    adapted("embeddings.word_embeddings", c["vocab_size"], h, table=True)
    adapted("embeddings.token_type_embeddings", c["type_vocab_size"], h, table=True)
    for i in range(c["num_hidden_layers"]):
        layer = f"encoder.layers.{i}."
        for name, out, width in (
            ("mixer.Wqkv", 3 * h, h),
            ("mixer.out_proj", h, h),
            ("mlp.fc1", wide, h),
            ("mlp.fc2", h, wide),
        ):
            adapted(layer + name, out, width)
        shapes |= norm(f"{layer}norm1", h) | norm(f"{layer}norm2", h)
    adapted("pooler.dense", h, h)
    return {f"roberta.{name}": shape for name, shape in (shapes | norm("emb_ln", h)).items()}


def qwen3(c: Config) -> Shapes:
    """`Qwen3Model`."""
    return _decoder(c, ("input_layernorm", "post_attention_layernorm"))


def qwen3_ranker(c: Config) -> Shapes:
    """`Qwen3ForCausalLM`, whose head is the table of words."""
    return {f"model.{name}": shape for name, shape in qwen3(c).items()}


def gemma3(c: Config) -> Shapes:
    """`Gemma3TextModel`."""
    around = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    return _decoder(c, around)


def _decoder(c: Config, norms: tuple[str, ...]) -> Shapes:
    h, wide, dim = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    shapes: Shapes = {"embed_tokens.weight": (c["vocab_size"], h)}
    queries, keys = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    for i in range(c["num_hidden_layers"]):
        layer = f"layers.{i}."
        for part, out in (("q", queries), ("k", keys), ("v", keys)):
            shapes |= linear(f"{layer}self_attn.{part}_proj", out, h, bias=False)
        shapes |= linear(f"{layer}self_attn.o_proj", h, queries, bias=False)
        shapes |= {f"{layer}self_attn.{part}_norm.weight": (dim,) for part in "qk"}
        for part in ("gate", "up"):
            shapes |= linear(f"{layer}mlp.{part}_proj", wide, h, bias=False)
        shapes |= linear(f"{layer}mlp.down_proj", h, wide, bias=False)
        shapes |= {f"{layer}{name}.weight": (h,) for name in norms}
    return shapes | norm("norm", h, bias=False)


LAYOUTS: Mapping[str, Callable[[Config], Shapes]] = {
    "bert": bert,
    "deberta_ranker": deberta_ranker,
    "gemma3": gemma3,
    "gte": gte,
    "jina_v2": jina_v2,
    "jina_v3": jina_v3,
    "modernbert": modernbert,
    "mpnet": mpnet,
    "nomic": nomic,
    "qwen3": qwen3,
    "qwen3_ranker": qwen3_ranker,
    "xlm_roberta_ranker": xlm_roberta_ranker,
}
