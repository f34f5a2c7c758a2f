"""Tiny checkpoints of Jina embeddings v3 as the hub has it, and what one is under each of its
adapters."""

import json

import torch
from safetensors.torch import load_file

from conformance.small import tiny

ADAPTERS = ("retrieval.query", "retrieval.passage", "separation", "classification", "text-matching")
RANK, ALPHA = 4, 3.0


def write(folder):
    """Jina embeddings v3 as the hub has it: the native model's weights under parametrisations, with
    random adapters."""
    tiny.write_family(folder, "jina_embeddings_v3", type_vocab_size=1)
    tiny.change(folder, _with_adapters)
    tiny.edit_json(
        folder / "config.json",
        architectures=["XLMRobertaModel"],
        auto_map={
            "AutoModel": "jinaai/xlm-roberta-flash-implementation--modeling_lora.XLMRobertaLoRA"
        },
        load_trained_adapters=True,
        lora_adaptations=list(ADAPTERS),
        lora_alpha=ALPHA,
        lora_dropout_p=0.0,
        lora_main_params_trainable=False,
        lora_rank=RANK,
        matryoshka_dimensions=[8, 16, tiny.HIDDEN],
        model_type="xlm-roberta",
        position_embedding_type="rotary",
        rope_parameters=...,
        rotary_emb_base=20000.0,
        task_instructions={name: QUERY if name == "retrieval.query" else "" for name in ADAPTERS},
        truncate_dim=None,
        use_flash_attn=True,
        use_reentrant=False,
    )
    tiny.write_modules(folder, normalize=True, layout="old")
    rows = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
    tiny.write_json(
        folder / "modules.json",
        [{**rows[0], "type": "custom_st.Transformer", "kwargs": ["task"]}, *rows[1:]],
    )
    return folder


# Before texts of the adapter for queries
QUERY = "dura bulo "


def _with_adapters(tensors):
    changed, draw = {}, torch.Generator().manual_seed(1)
    for name, tensor in sorted(tensors.items()):
        base = f"roberta.{name.removesuffix('.weight')}"
        if tensor.dim() < 2:
            changed[f"roberta.{name}"] = tensor
            continue
        (out, wide), count = tensor.shape, len(ADAPTERS)
        shapes = (
            [(out, RANK), (RANK, wide)] if "embeddings" in name else [(RANK, wide), (out, RANK)]
        )
        changed[f"{base}.parametrizations.weight.original"] = tensor
        for letter, shape in zip("AB", shapes, strict=True):
            adapter = 0.3 * torch.randn((count, *shape), generator=draw)
            changed[f"{base}.parametrizations.weight.0.lora_{letter}"] = adapter
    return changed


def merged(folder, out, adapter):
    """The native checkpoint of `write`'s, with one adapter added to its weights, or none for 0."""
    tiny.write_family(out, "jina_embeddings_v3", type_vocab_size=1)
    hub = load_file(folder / "model.safetensors")

    def merge(tensors):
        return {name: _merged(hub, f"roberta.{name}", adapter) for name in tensors}

    return tiny.change(out, merge)


def _merged(hub, name, adapter):
    base = f"{name.removesuffix('.weight')}.parametrizations.weight"
    if name in hub:
        return hub[name]
    weight = hub[f"{base}.original"]
    if adapter:
        a, b = (hub[f"{base}.0.lora_{letter}"][adapter - 1] for letter in "AB")
        weight = weight + ALPHA / RANK * (a @ b if "embeddings" in name else b @ a)
    return weight
