"""What a family needs beyond being loaded: a table, one row a `model_type`.

A family that is not listed runs padded, with transformers' own attention and mask: slower, and as right as transformers is
for a padded batch. What that leaves open, a text that depends on its neighbours, is asked by the self-test at load. Not
listed are, among others, DistilBERT, which took no position ids before transformers 5.20, and MPNet and DeBERTa, which add
a relative bias to the scores, computed for a rectangle. To list one, add a row and an oracle test that packed equals alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hybridtei.errors import UnsupportedArchitecture

# Takes explicit position ids, and calls the registered attention with every keyword argument of the model.
PACKED = frozenset(
    {
        "bert",
        "camembert",
        "electra",
        "eurobert",
        "gemma3_text",
        "gte",
        "jina_embeddings_v3",
        "llama",
        "mistral",
        "modernbert",
        "nomic_bert",
        "qwen2",
        "qwen3",
        "roberta",
        "xlm-roberta",
    }
)

LogitsOf = Callable[[Tensor], Tensor]


def is_packed(model_type: str) -> bool:
    """Whether sequences of this family can be laid end to end."""
    return model_type in PACKED


def mlm_head(model: Any, model_type: str) -> LogitsOf:
    """The head of a `…ForMaskedLM` model: hidden float[t, h] -> logits float[t, v]."""
    if model_type == "distilbert":
        return lambda hidden: model.vocab_projector(model.vocab_layer_norm(model.activation(model.vocab_transform(hidden))))
    if model_type == "modernbert":
        return lambda hidden: model.decoder(model.head(hidden))
    for name in ("cls", "lm_head"):  # the BERT line; the RoBERTa line, MPNet
        if hasattr(model, name):
            head: LogitsOf = getattr(model, name)
            return head
    raise UnsupportedArchitecture(f"{type(model).__name__}: its masked-language-model head is not known")
