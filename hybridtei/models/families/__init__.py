"""Model families, each written once against `ops.Ops`, in a table from config.json's `model_type`
to the function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hybridtei.errors import LoadError, UnsupportedArchitecture
from hybridtei.models.families.bert import (
    bert,
    deberta_v2,
    distilbert,
    electra,
    jina_bert,
    mpnet,
    t5,
)
from hybridtei.models.families.decoders import (
    eurobert,
    gemma,
    gemma3,
    llama,
    ministral3,
    mistral,
    qwen2,
    qwen3,
    ultrabert,
)
from hybridtei.models.families.embedding_gemma2 import embedding_gemma2
from hybridtei.models.families.lfm2 import lfm2
from hybridtei.models.families.ops import Ops, Rows, adapted
from hybridtei.models.families.rotary import (
    gte,
    jina_v3,
    modernbert,
    nomic_bert,
    xlm_roberta_flash,
)
from hybridtei.models.families.settings import Settings, declared_keys

Family = Callable[[Ops, Settings], Rows]
FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys(("bert", "camembert", "roberta", "xlm-roberta"), bert),
    "deberta-v2": deberta_v2,
    "distilbert": distilbert,
    "electra": electra,
    "embedding_gemma2_text": embedding_gemma2,
    "eurobert": eurobert,
    "gemma": gemma,
    "gemma3_text": gemma3,
    "gte": gte,
    "jina_bert": jina_bert,
    "jina_embeddings_v3": jina_v3,
    "lfm2_bidirectional": lfm2,
    "llama": llama,
    "ministral3": ministral3,
    "mistral": mistral,
    "modernbert": modernbert,
    "mpnet": mpnet,
    "mt5": t5,
    "nomic_bert": nomic_bert,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "t5": t5,
    "ultrabert": ultrabert,
    "xlm-roberta-flash": xlm_roberta_flash,
}


def run_family(
    ops: Ops,
    model_type: str,
    config: Mapping[str, Any],
    file: str,
    adapters: tuple[int, int, float, frozenset[str] | None] | None = None,
    *,
    is_native: bool,
) -> Rows:
    """Compute the last hidden states by `ops`. `config`: the contents of `file`, a config.json.

    `adapters`: arguments of `ops.adapted`. `is_native`: transformers' own class
    computes this model, so keys that it does not declare have no effect. Raises
    UnsupportedArchitecture for an unknown family or setting, and LoadError for an impossible value.
    """
    family = FAMILIES.get(model_type)
    if family is None:
        raise UnsupportedArchitecture(
            f"{file}: no family `{model_type}` is known; supported: {', '.join(FAMILIES)}"
        )
    settings = Settings(config, file)
    try:
        hidden = family(ops if adapters is None else adapted(ops, *adapters), settings)
    except (
        TypeError,
        ValueError,
        KeyError,
        AttributeError,
        ArithmeticError,
    ) as error:
        # From nested settings
        raise LoadError(f"{file}: no configuration of `{model_type}`: {error!r}") from error
    settings.check(declared_keys(model_type) if is_native else None)
    return hidden
