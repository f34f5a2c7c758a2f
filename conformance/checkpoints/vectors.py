"""What checkpoints of other vectors vary: SPLADE, late interaction, static tables, publishers' own
layouts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sparse_encoder.modules import SpladePooling
from tokenizers import processors

from conformance.checkpoints.build import (
    Case,
    Step,
    as_bin,
    bert,
    case,
    chain,
    config,
    edit,
    remove,
    rewritten,
    sbert,
    tensors,
    words,
)
from conformance.checkpoints.heads import CLS, causal, llama_eos, ranker
from conformance.checkpoints.modules import listed
from conformance.checkpoints.tokenizers import processed
from conformance.small import published, saved, tiny


def splade(activation: str = "relu", active: int | None = None) -> Step:
    """Save a SPLADE model in sentence-transformers 6's layout."""

    def step(folder: Path) -> None:
        documents = Transformer(
            str(folder), transformer_task="fill-mask", module_output_name="token_embeddings"
        )
        pooling = SpladePooling("max", activation_function=activation)  # type: ignore[arg-type]
        SparseEncoder(
            modules=[documents, pooling], device="cpu", max_active_dims=active
        ).save_pretrained(str(folder))

    return step


def sparse(base: str, *steps: Step, plain: bool = True, **settings: Any) -> Case:
    """A SPLADE: declared by `--pooling splade` alone, which is no file, or as sentence-transformers
    6 does."""
    options = {"load": {"pooling": "splade"}} if plain else {}
    return Case(
        base, settings, steps if plain or steps else (splade(),), "sparse", "ForMaskedLM", options
    )


def splades() -> dict[str, Case]:
    bases = (
        "bert",
        "distilbert",
        "xlmr",
        "camembert",
        "modernbert",
        "eurobert",
        "electra",
        "mpnet",
        "albert",
        "nomic",
        "gte",
        "ernie",
        "jina3",
    )
    return {
        **{f"plain-{base}": sparse(base) for base in bases},
        **{f"st6-{base}": sparse(base, plain=False) for base in bases},
        **{
            f"untied-{base}": sparse(base, tie_word_embeddings=False)
            for base in ("bert", "distilbert", "xlmr")
        },
        "st6-log1p": sparse("distilbert", splade("log1p_relu"), plain=False),
        "st6-max-active": sparse("bert", splade(active=16), plain=False),
        "plain-act": sparse("bert", hidden_act="relu"),
        "plain-bin": sparse("bert", as_bin()),
        "plain-bin-decoder-key": sparse(
            "bert",
            as_bin(
                wrap=lambda found: {
                    **found,
                    "cls.predictions.decoder.weight": found[
                        "bert.embeddings.word_embeddings.weight"
                    ],
                }
            ),
        ),
        "plain-decoder-bias-only": sparse(
            "bert",
            tensors(
                lambda found: {
                    name.replace("cls.predictions.bias", "cls.predictions.decoder.bias"): one
                    for name, one in found.items()
                }
            ),
        ),
        "auto-arch-mlm-no-option": Case("bert", task="ForMaskedLM", oracle=CLS),
    }


def late() -> dict[str, Case]:
    def pylate(
        model_type: str = "bert",
        marked: bool = True,
        then: Step = lambda folder: None,
        **settings: Any,
    ) -> Case:
        def step(folder: Path) -> None:
            remove("*")(folder)
            saved.pylate(folder, model_type, marked=marked, **settings)
            then(folder)

        return Case("bert", steps=(step,), kind="late")

    def stanford(**metadata: Any) -> Case:
        return Case(
            "bert",
            steps=(remove("*"), lambda folder: saved.stanford(folder, **metadata)),
            kind="late",
        )

    return {
        "pylate": pylate(),
        "pylate-attend": pylate(attend_to_expansion_tokens=True),
        "pylate-noexpansion": pylate(do_query_expansion=False),
        "pylate-48": pylate(document_length=32),
        "pylate-skiplist-empty": pylate(skiplist_words=[]),
        "pylate-residual": pylate(then=edit("1_Dense/config.json", use_residual=True)),
        "pylate-sbert-short": pylate(then=sbert(max_seq_length=31)),
        "pylate-xlmr": pylate("xlm-roberta"),
        "pylate-lower": pylate(then=sbert(max_seq_length=47, do_lower_case=True)),
        "pylate-nomarker-words": pylate(marked=False),
        "stanford-attend": stanford(attend_to_mask_tokens=True),
        "stanford-noartifact": stanford(),
    }


def others() -> dict[str, Case]:
    def fresh(write: Callable[[Path], object]) -> tuple[Step, ...]:
        return (remove("*"), write)

    def model2vec(of: torch.dtype, then: Step = lambda folder: None) -> tuple[Step, ...]:
        def step(folder: Path) -> None:
            table = 0.5 * torch.randn(600, 16, generator=torch.Generator().manual_seed(1))
            save_file(
                {"embeddings": (table * 60).to(of) if of == torch.int8 else table.to(of)},
                folder / "model.safetensors",
            )
            tiny.write_json(
                folder / "config.json",
                {"model_type": "model2vec", "architectures": ["StaticModel"], "normalize": True},
            )
            then(folder)

        return (remove("config.json", "modules.json", "1_Pooling"), step)

    table = listed(("sentence_transformers.models.StaticEmbedding", "."))
    m3 = {
        name: case("xlmr", *fresh(lambda folder, more=more: tiny.write_m3(folder, **more)))
        for name, more in {
            "pt": {},
            "safetensors-half": {"suffix": ".safetensors"},
            "dim-64": {"dim": 64},
        }.items()
    }
    jina = {
        "architectures": ["XLMRobertaForSequenceClassification"],
        "use_flash_attn": True,
        "model_type": "xlm-roberta",
    }
    return {
        "static-st6": bert(*fresh(saved.static), first=1, raw=True),
        "static-model2vec-dot": bert(*model2vec(torch.float32, table), first=1),
        "static-model2vec-f16": bert(
            *model2vec(torch.float16, table),
            first=1,
            by_design="the oracle adds in half precision",
        ),
        "static-model2vec-int8": bert(*model2vec(torch.int8, table), first=1),
        "static-model2vec-no-modules": bert(*model2vec(torch.float32), oracle=(table,), first=1),
        **{f"m3-{name}": one for name, one in m3.items()},
        "lm-ranker-qwen3-st6": causal("qwen3"),
        "lm-ranker-qwen3-st6-prompt": causal("qwen3", query="lolo mo"),
        "lm-ranker-qwen2-st6": causal("qwen2"),
        "shape-jina-reranker-v2": ranker("xlmr", config(**jina)),
        "shape-nomic-8192": case(
            "nomic",
            rewritten(published.as_nomic, max_trained_positions=16),
            words(model_max_length=64),
            sbert(),
        ),
        "remote-code-untrusted": bert(
            config(model_type="mine", auto_map={"AutoModel": "modeling.Model"})
        ),
        "remote-code-known-type": bert(config(auto_map={"AutoModel": "modeling.Model"})),
        "author-stella-1.5B": case("qwen2", stella, oracle=(with_eos, config(auto_map=...))),
        "author-e5-mistral": case(
            "mistral",
            chain("Pooling", pooling_mode_lasttoken=True),
            words(tokenizer_class="LlamaTokenizer", add_bos_token=True, add_eos_token=True),
            oracle=(llama_eos, words(tokenizer_class="PreTrainedTokenizerFast")),
        ),
    }


def stella(folder: Path) -> None:
    """gte-Qwen2's code and tokenizer, without a post-processor."""
    auto = {
        "AutoModel": "modeling_qwen.Qwen2Model",
        "AutoModelForCausalLM": "modeling_qwen.Qwen2ForCausalLM",
    }
    config(auto_map=auto, is_causal=False)(folder)
    words(eos_token=END)(folder)
    edit("special_tokens_map.json", eos_token=END)(folder)
    edit("tokenizer.json", post_processor=None)(folder)


# The behaviour of the tokenizer class in gte-Qwen2's repository
END = "<|endoftext|>"
with_eos = processed(
    processors.TemplateProcessing(
        single=f"$A {END}", pair=f"$A $B:1 {END}", special_tokens=[(END, 0)]
    )
)


VECTORS = {
    **{f"splade-{name}": one for name, one in splades().items()},
    **{f"late-{name}": one for name, one in late().items()},
    **others(),
}
