"""Checkpoints of late interaction, and tables of token vectors, as their libraries save them."""

import json

import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense
from sentence_transformers.sentence_transformer.modules import LayerNorm, StaticEmbedding

from conformance.small import tiny, vocabulary

# The width of a token's vector
DIM = 12


def with_markers(folder, *markers, special=True):
    """The same tokenizer with these as tokens, in place of pieces that the tests do not need."""
    described = json.loads((folder / "tokenizer.json").read_text())
    words = described["model"]["vocab"]
    for marker, old in zip(markers, ("duti", "dura"), strict=True):
        if isinstance(words, dict):
            words[marker] = words.pop(old)
            place = words[marker]
        else:
            place = next(i for i, entry in enumerate(words) if entry[0] == f"▁{old}")
            words[place][0] = marker
        if special:
            token = {"id": place, "content": marker, "special": True, "normalized": False}
            described["added_tokens"].append(
                {**token, "single_word": False, "lstrip": False, "rstrip": False}
            )
    (folder / "tokenizer.json").write_text(json.dumps(described))
    return folder


def pylate(folder, model_type="bert", *, marked=True, **settings):
    """As PyLate up to version 3 saves one."""
    tiny.write_family(folder, model_type)
    if marked:
        with_markers(folder, "[Q] ", "[D] ")
    tiny.write_dense(folder / "1_Dense", tiny.HIDDEN, DIM, "torch.nn.modules.linear.Identity")
    tiny.edit_json(folder / "1_Dense" / "config.json", bias=False)
    tensors = load_file(folder / "1_Dense" / "model.safetensors")
    save_file({"linear.weight": tensors["linear.weight"]}, folder / "1_Dense" / "model.safetensors")
    types = {"": "sentence_transformers.models.Transformer", "1_Dense": "pylate.models.Dense.Dense"}
    tiny.write_json(
        folder / "modules.json",
        [
            {"idx": i, "name": str(i), "path": p, "type": t}
            for i, (p, t) in enumerate(types.items())
        ],
    )
    tiny.write_json(
        folder / "sentence_bert_config.json", {"max_seq_length": 47, "do_lower_case": False}
    )
    sentence = {
        "model_type": "ColBERT",
        "query_prefix": "[Q] ",
        "document_prefix": "[D] ",
        "query_length": 20,
        "document_length": 48,
    }
    tiny.write_json(folder / "config_sentence_transformers.json", {**sentence, **settings})
    return folder


def stanford(folder, **metadata):
    """As Stanford's ColBERT: the projection is among the model's weights."""
    tiny.write_family(folder, "bert")
    with_markers(folder, "[unused0]", "[unused1]", special=False)
    tiny.edit_json(folder / "config.json", architectures=["HF_ColBERT"])
    tensors = {
        f"bert.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()
    }
    weight = 0.3 * torch.randn(DIM, tiny.HIDDEN, generator=torch.Generator().manual_seed(2))
    save_file(
        {**tensors, "linear.weight": weight},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    if metadata:
        tiny.write_json(folder / "artifact.metadata", metadata)
    return folder


def shaken(module, seed=1):
    """The module with no parameter at its usual 0 or 1."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=draw))
    return module


def static(folder):
    words = vocabulary.tokenizer("wordpiece").backend_tokenizer
    table = torch.randn(words.get_vocab_size(), 16, generator=torch.Generator().manual_seed(2))
    steps = [
        StaticEmbedding(words, embedding_weights=table),
        shaken(LayerNorm(16)),
        shaken(Dense(16, 12)),
    ]
    SentenceTransformer(modules=steps, device="cpu").save_pretrained(str(folder))
    return folder
