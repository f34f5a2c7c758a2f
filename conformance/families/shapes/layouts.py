"""Names and shapes of the tensors that makers write, by the sizes of a config.json.

Sources: transformers' own class, or else the modelling code that the makers published, one function
a layout.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers

from conformance.small import published

Config = Mapping[str, Any]
Shapes = dict[str, tuple[int, ...]]


def linear(name: str, out: int, width: int, *, bias: bool = True) -> Shapes:
    """A matrix, and its bias."""
    return {f"{name}.weight": (out, width), **({f"{name}.bias": (out,)} if bias else {})}


def norm(name: str, width: int, *, bias: bool = True) -> Shapes:
    """Scale, and shift."""
    return {f"{name}.weight": (width,), **({f"{name}.bias": (width,)} if bias else {})}


def _bert_embeddings(c: Config, *tables: str) -> Shapes:
    rows = {
        "word": c["vocab_size"],
        "position": c["max_position_embeddings"],
        "token_type": c.get("type_vocab_size", 0),
    }
    width = c["hidden_size"]
    shapes: Shapes = {
        f"embeddings.{name}_embeddings.weight": (rows[name], width) for name in tables
    }
    return shapes | norm("embeddings.LayerNorm", width)


def gte(c: Config) -> Shapes:
    """Alibaba's `NewForTokenClassification`, as gte-multilingual-base is stored."""
    h, wide = c["hidden_size"], c["intermediate_size"]
    shapes = _bert_embeddings(c, "word", *(["token_type"] if c["type_vocab_size"] else []))
    for i in range(c["num_hidden_layers"]):
        layer = f"encoder.layer.{i}."
        shapes |= linear(f"{layer}attention.qkv_proj", 3 * h, h) | linear(
            f"{layer}attention.o_proj", h, h
        )
        shapes |= linear(f"{layer}mlp.up_gate_proj", 2 * wide, h, bias=False) | linear(
            f"{layer}mlp.down_proj", h, wide
        )
        shapes |= norm(f"{layer}attn_ln", h) | norm(f"{layer}mlp_ln", h)
    return {f"new.{name}": shape for name, shape in shapes.items()} | linear("classifier", 1, h)


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


def jina_v2(c: Config) -> Shapes:
    """`JinaBertModel`, with its pooler."""
    return published.jina_shapes(c, code=False) | linear(
        "pooler.dense", c["hidden_size"], c["hidden_size"]
    )


OWN: Mapping[str, Callable[[Config], Shapes]] = {
    "gte": gte,
    "jina_v2": jina_v2,
    "jina_v3": jina_v3,
    "nomic": published.nomic_shapes,
}


def shapes_of(layout: str, config: Config) -> Shapes:
    """`layout`: a key of OWN, or a class of transformers."""
    if layout in OWN:
        return OWN[layout](config)
    settings = {
        name: value for name, value in config.items() if name not in ("model_type", "architectures")
    }
    with torch.device("meta"):
        model = getattr(transformers, layout)(
            transformers.AutoConfig.for_model(config["model_type"], **settings)
        )
    scalars = [pair for pair in model.named_buffers() if pair[0].endswith("layer_scalar")]
    return {name: tuple(one.shape) for name, one in (*model.named_parameters(), *scalars)}
