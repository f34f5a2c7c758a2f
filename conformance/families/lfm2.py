"""LFM2.5 as Liquid AI publishes it, and its states by transformers' layers with the mask removed
and the convolutions centred: transformers has no class of it."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch.nn import functional

from conformance.families.oracle import alone, texts_of
from conformance.small import tiny
from conformance.small.vocabulary import tokenizer
from hybridtei.models.checkpoint.spec import read_spec
from hybridtei.outputs import Floats

SETTINGS = {
    **tiny.DECODER,
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "block_auto_adjust_ff_dim": False,
    "max_position_embeddings": 2048,
}
# Other widths of the layers between
ADJUSTED = {"block_auto_adjust_ff_dim": True, "block_multiple_of": 8, "intermediate_size": 60}
# Keys of the published files beside transformers'
PUBLISHED = {
    "architectures": ["Lfm2BidirectionalModel"],
    "auto_map": {"AutoModel": "modeling_lfm2_bidirectional.Lfm2BidirectionalModel"},
    "block_dim": tiny.HIDDEN,
    "block_norm_eps": 1e-5,
    "block_use_swiglu": True,
    "block_use_xavier_init": True,
    "conv_dim": tiny.HIDDEN,
    "num_heads": 4,
    "use_pos_enc": True,
}


def write(folder: Path, **settings: Any) -> tuple[Path, Floats]:
    """A published checkpoint, and its states of the common texts, each alone."""
    words = tokenizer("bytes")
    words.save_pretrained(folder)
    config = transformers.Lfm2Config(
        **{"vocab_size": len(words), **SETTINGS, **settings, "is_causal": False}
    )
    config._attn_implementation = "eager"
    model = transformers.Lfm2Model(config).eval()
    tiny.randomise(model, 0)
    model.save_pretrained(folder)
    tiny.edit_json(folder / "config.json", is_causal=..., **PUBLISHED)
    for layer in model.layers:
        if not layer.is_attention_layer:
            layer.conv.forward = centred(layer.conv)
    model.config.use_cache = False
    return folder, np.concatenate(alone(model, texts_of(read_spec(folder, pooling="cls"))))


def centred(module: Any) -> Any:
    """The module's convolution with one token of padding at each side."""

    def forward(hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        before, after, x = module.in_proj(hidden_states).transpose(1, 2).chunk(3, dim=1)
        y = functional.conv1d(before * x, module.conv.weight, padding=1, groups=x.shape[1])
        result: torch.Tensor = module.out_proj((after * y).transpose(1, 2))
        return result

    return forward
