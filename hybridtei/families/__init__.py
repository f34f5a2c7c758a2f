"""Model families, each written once against `ops.Ops`: a table from config.json's `model_type` to the function."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hybridtei.families.bert import bert, electra
from hybridtei.families.deberta import deberta_v2
from hybridtei.families.decoder import eurobert, llama, mistral, qwen2, qwen3
from hybridtei.families.distilbert import distilbert
from hybridtei.families.gemma import gemma3
from hybridtei.families.jina_bert import jina_bert
from hybridtei.families.modernbert import modernbert
from hybridtei.families.mpnet import mpnet
from hybridtei.families.ops import Ops, Rows
from hybridtei.families.rotary_bert import gte, jina_v3, nomic_bert
from hybridtei.families.settings import Settings

Family = Callable[[Ops, Settings], Rows]
FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys(("bert", "camembert", "roberta", "xlm-roberta"), bert),
    "deberta-v2": deberta_v2,
    "distilbert": distilbert,
    "electra": electra,
    "eurobert": eurobert,
    "gemma3_text": gemma3,
    "gte": gte,
    "jina_bert": jina_bert,
    "jina_embeddings_v3": jina_v3,
    "llama": llama,
    "mistral": mistral,
    "modernbert": modernbert,
    "mpnet": mpnet,
    "nomic_bert": nomic_bert,
    "qwen2": qwen2,
    "qwen3": qwen3,
}
