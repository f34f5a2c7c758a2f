"""Model families, each written once against `ops.Ops`, and a table of what is known of each
`model_type` of config.json."""

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
    Decoder,
    gemma3,
    ministral_window,
    mistral_window,
    qwen_window,
    ultrabert_window,
)
from hybridtei.models.families.embedding_gemma2 import embedding_gemma2
from hybridtei.models.families.family import (
    OUT_PROJ,
    Family,
    LanguageModel,
    MaskedHead,
    decoder,
    decoder_tags,
    eurobert,
    lm_head,
    longformer,
    modernbert_tags,
    predictions,
    two_layers,
    ultrabert,
)
from hybridtei.models.families.family import modernbert as modernbert_head
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

Run = Callable[[Ops, Settings], Rows]
_DENSE_TANH = two_layers("classifier.dense", "tanh", OUT_PROJ)
_DENSE_AS_HIDDEN = two_layers("classifier.dense", "gelu", OUT_PROJ, "hidden_act")


def _bert(run: Run | None = None, trunk: str = "bert", **facts: Any) -> Family:
    """A family with BERT's pooler."""
    pooler = two_layers(f"{trunk}.pooler.dense", "tanh")
    return Family(run, trunk=trunk, **{"scores": pooler, **facts})


def _roberta(run: Run | None = None, **facts: Any) -> Family:
    """A family with RoBERTa's positions and heads."""
    usual = {
        "positions": "after padding",
        "tokenizer": "XLMRoberta",
        "trunk": "roberta",
        "scores": _DENSE_TANH,
        "masked": lm_head(),
    }
    return Family(run, **{**usual, **facts})


def _decoder(run: Run | None = None, *, tied: bool = False, **facts: Any) -> Family:
    """A causal language model with rotary positions."""
    usual = {
        "positions": "computed",
        "scores": decoder,
        "tags": decoder_tags,
        "words": LanguageModel(tied=tied),
    }
    return Family(run, **{**usual, **facts})


_CAP = "final_logit_softcapping"
# What is known of each `model_type`. No other place names one, but for publishers' own formats
FAMILIES: Mapping[str, Family] = {
    # Decoders that transformers' own class runs, by torch
    **dict.fromkeys(
        (
            "arcee",
            "exaone4",
            "ministral",
            "mixtral",
            "nemotron",
            "persimmon",
            "qwen2_moe",
            "qwen3_moe",
            "stablelm",
        ),
        _decoder(),
    ),
    **dict.fromkeys(("glm", "glm4"), _decoder(padding=151_329)),
    **dict.fromkeys(("olmo", "olmo2", "olmo3", "seed_oss"), _decoder(padding=1)),
    "albert": _bert(
        trunk="albert",
        tokenizer="Albert",
        shares_layers=True,
        scores=two_layers("albert.pooler", "tanh"),
    ),
    "bart": Family(tokenizer="Roberta"),
    "bert": _bert(
        bert,
        positions="absolute",
        token_types=True,
        tokenizer="Bert",
        masked=predictions("LayerNorm"),
    ),
    "big_bird": Family(trunk="bert", scores=_DENSE_AS_HIDDEN),
    "camembert": _roberta(bert, tokenizer="Camembert"),
    "cohere": Family(
        words=LanguageModel(tied=True, factor=("logit_scale", 0.0625)),
    ),
    "cohere2": Family(
        words=LanguageModel(tied=True, factor=("logit_scale", 0.0625)),
    ),
    "convbert": Family(tokenizer="Bert"),
    "data2vec-text": _roberta(
        trunk="data2vec_text",
        tokenizer="Roberta",
        masked=None,
    ),
    "deberta": Family(
        token_types=True,
        tokenizer="Deberta",
        trunk="deberta",
        scores=two_layers("pooler.dense", "gelu", key="pooler_hidden_act"),
    ),
    "deberta-v2": Family(
        deberta_v2,
        token_types=True,
        tokenizer="DebertaV2",
        trunk="deberta",
        scores=two_layers("pooler.dense", "gelu", key="pooler_hidden_act"),
        masked=predictions("LayerNorm", epsilon=1e-7),
    ),
    "distilbert": Family(
        distilbert,
        tokenizer="Bert",
        trunk="distilbert",
        scores=two_layers("pre_classifier", "relu"),
        masked=MaskedHead(
            "vocab_transform",
            "vocab_layer_norm",
            "vocab_projector",
            "vocab_projector.bias",
            ("activation", "gelu"),
            ("", 1e-12),
        ),
    ),
    # Translated to bert
    "dpr": Family(tokenizer="Bert"),
    "electra": Family(
        electra,
        positions="absolute",
        token_types=True,
        tokenizer="Bert",
        trunk="electra",
        scores=two_layers("classifier.dense", "gelu", OUT_PROJ),
    ),
    "embedding_gemma2_text": Family(
        embedding_gemma2,
        positions="computed",
        width=("embedding_dim", 768),
        is_wide=True,
    ),
    "ernie": _bert(
        trunk="ernie",
        token_types=True,
        tokenizer="Bert",
    ),
    "eurobert": Family(
        Decoder(theta=250_000.0, eps=1e-5, causal=False),
        ("EuroBert",),
        positions="computed",
        scores=eurobert,
    ),
    "gemma": _decoder(
        Decoder(dim=256, is_gemma=True),
        tied=True,
        tokenizer="Gemma",
        padding=0,
        is_wide=True,
    ),
    "gemma2": _decoder(
        tokenizer="Gemma",
        padding=0,
        words=LanguageModel(tied=True, cap=(_CAP, 30.0)),
    ),
    "gemma3_text": _decoder(
        gemma3,
        tokenizer="Gemma",
        padding=0,
        is_wide=True,
        words=LanguageModel(tied=True, cap=(_CAP, None)),
    ),
    "gpt2": Family(tokenizer="GPT2"),
    "gpt_neox": Family(
        words=LanguageModel(table="gpt_neox.embed_in", heads=("embed_out", "lm_head")),
    ),
    "granite": Family(words=LanguageModel(divisor=("logits_scaling", 1.0))),
    "gte": _bert(
        gte,
        "gte",
        code=("Gte", "New"),
        positions="computed",
        token_types=True,
        tokenizer="XLMRoberta",
        masked=lm_head("norm"),
    ),
    "helium": _decoder(padding=3),
    "jina_bert": _bert(
        jina_bert,
        code=("JinaBert",),
        positions="computed",
        token_types=True,
    ),
    "jina_embeddings_v3": _roberta(
        jina_v3,
        code=("XLMRobertaLoRA", "modeling_xlm_roberta.XLMRoberta"),
        positions="computed",
    ),
    "lfm2_bidirectional": Family(
        lfm2,
        ("Lfm2Bidirectional",),
        positions="computed",
    ),
    "llama": _decoder(
        Decoder(),
        code=("LlamaBidirectional",),
        tokenizer="Llama",
        turns=True,
    ),
    "longformer": Family(
        tokenizer="Roberta",
        trunk="longformer",
        scores=longformer,
    ),
    "megatron-bert": _bert(token_types=True, tokenizer="Bert"),
    "ministral3": _decoder(
        Decoder(
            theta=1_000_000.0,
            dim=128,
            key_count=8,
            eps=1e-5,
            grows=True,
            window=ministral_window,
        ),
        code=("Ministral3Bidirectional",),
        padding=11,
        turns=True,
    ),
    "mistral": _decoder(
        Decoder(window=mistral_window),
        tokenizer="Llama",
        turns=True,
    ),
    "modernbert": Family(
        modernbert,
        positions="computed",
        tokenizer="ModernBert",
        scores=modernbert_head,
        tags=modernbert_tags,
        masked=MaskedHead(
            "head.dense",
            "head.norm",
            "decoder",
            "decoder.bias",
            ("classifier_activation", "gelu"),
            ("norm_eps", 1e-5),
            ("decoder_bias", True),
        ),
    ),
    "mpnet": _roberta(
        mpnet,
        positions="after 1",
        tokenizer="MPNet",
        trunk="mpnet",
    ),
    "mt5": Family(
        t5,
        positions="relative",
        tokenizer="T5",
        is_wide=True,
    ),
    # Alibaba's name of gte
    "new": _bert(trunk="new"),
    "nomic_bert": _bert(
        nomic_bert,
        "nomic_bert",
        code=("NomicBert",),
        positions="computed",
        token_types=True,
        tokenizer="Bert",
        masked=predictions("layer_norm", "silu"),
    ),
    "phi": _decoder(words=LanguageModel(bias=True)),
    "phi3": _decoder(padding=32_000),
    "qwen2": _decoder(
        Decoder(query_bias=True, window=qwen_window),
        code=("Qwen2Bidirectional", "modeling_qwen.Qwen2"),
        tokenizer="Qwen2",
        turns=True,
    ),
    "qwen3": _decoder(
        Decoder(head_norms=True, window=qwen_window),
        code=("PPLXQwen3", "Qwen3Bidirectional"),
        tokenizer="Qwen2",
        turns=True,
    ),
    "rembert": _bert(trunk="rembert"),
    "roberta": _roberta(bert, tokenizer="Roberta"),
    "roformer": Family(trunk="roformer", scores=_DENSE_AS_HIDDEN),
    "smollm3": _decoder(tied=True, padding=128_004),
    "starcoder2": _decoder(tied=True),
    "t5": Family(
        t5,
        positions="relative",
        tokenizer="T5",
        is_wide=True,
    ),
    "ultrabert": Family(
        Decoder(
            theta=2_560_000.0,
            local_theta=10_000.0,
            every=3,
            causal=False,
            window=ultrabert_window,
        ),
        ("UltraBERT", "UltraBert"),
        positions="computed",
        scores=ultrabert,
    ),
    "xlm-roberta": _roberta(bert),
    "xlm-roberta-flash": _roberta(
        xlm_roberta_flash,
        code=("XLMRoberta",),
        tokenizer="",
        masked=None,
    ),
    "xlm-roberta-xl": _roberta(masked=None),
}
# The families that every backend computes
SERVED = tuple(name for name, family in FAMILIES.items() if family.run is not None)
UNKNOWN = Family()


def that_have(fact: str) -> str:
    """Return the names of the families whose record has this."""
    return ", ".join(sorted(name for name in FAMILIES if getattr(FAMILIES[name], fact)))


def family_of(model_type: object) -> Family:
    """Return what is known of a family."""
    return FAMILIES.get(str(model_type), UNKNOWN)


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
    run = family_of(model_type).run
    if run is None:
        raise UnsupportedArchitecture(
            f"{file}: no family `{model_type}` is known; supported: {', '.join(SERVED)}"
        )
    settings = Settings(config, file)
    try:
        hidden = run(ops if adapters is None else adapted(ops, *adapters), settings)
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
