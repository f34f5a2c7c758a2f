"""Variants of modules.json and its folders."""

from pathlib import Path
from typing import Any

import torch

from conformance.checkpoints.build import (
    Case,
    Step,
    bert,
    case,
    chain,
    edit,
    halved,
    json_of,
    modules,
    remove,
    rewritten,
    sbert,
)
from conformance.small import tiny

ST = "config_sentence_transformers.json"
POOLING = "1_Pooling/config.json"


def dense(
    *layers: tuple[int, int, str], suffix: str = "", of: torch.dtype | None = None, **pooling: Any
) -> Step:
    """A Pooling and Dense modules after it."""

    def step(folder: Path) -> None:
        modules(folder, ("Pooling", *("Dense" for _ in layers)), **pooling)
        for number, (wide, narrow, name) in enumerate(layers, start=2):
            tiny.write_dense(folder / f"{number}_Dense", wide, narrow, name, seed=number)
            if of is not None:
                halved(of)(folder / f"{number}_Dense")

    return step


def listed(*rows: tuple[str, str]) -> Step:
    """modules.json of (type, path)."""
    return json_of(
        "modules.json",
        [{"idx": i, "name": str(i), "path": path, "type": of} for i, (of, path) in enumerate(rows)],
    )


TRANSFORMER = ("sentence_transformers.models.Transformer", "")


def poolings() -> dict[str, Case]:
    def of(names: str) -> Step:
        return chain("Pooling", **tiny.old_pooling(names.split("+")))

    modes = (
        "max",
        "mean",
        "mean_sqrt_len_tokens",
        "cls",
        "weightedmean",
        "cls+mean",
        "mean+max",
        "cls+max+mean",
    )
    found = {mode: bert(of(mode)) for mode in modes}
    found |= {mode: case("qwen3", of(mode)) for mode in ("lasttoken", "lasttoken+mean")}
    mean = {"pooling_mode_mean_tokens": True}
    torchs = {
        name: f"torch.nn.modules.activation.{name}"
        for name in ("Tanh", "ReLU", "GELU", "SiLU", "Sigmoid", "LeakyReLU", "Softplus", "Mish")
    }
    torchs |= {
        "Identity": "torch.nn.modules.linear.Identity",
        "GELUActivation": "transformers.activations.GELUActivation",
    }
    none = remove("modules.json", "1_Pooling")
    cls, last = (
        chain("Pooling", **{f"pooling_mode_{name}": True}) for name in ("cls_token", "lasttoken")
    )
    odd = {
        name: bert(chain("Pooling", module), edit(f"2_{module}/config.json", dropout=0.1))
        for name, module in {
            "dropout": "Dropout",
            "lstm": "LSTM",
            "asym": "Asym",
        }.items()
    }
    return {
        **found,
        **odd,
        "legacy-4-keys": bert(
            edit(POOLING, pooling_mode_cls_token=False, pooling_mode_max_tokens=False)
        ),
        "none-true": bert(chain("Pooling", pooling_mode_mean_tokens=False)),
        "include-prompt-true": bert(edit(POOLING, include_prompt=True)),
        "include-prompt-false": bert(edit(POOLING, include_prompt=False)),
        "include-prompt-false-prompts-but-none-used": bert(
            edit(POOLING, include_prompt=False),
            edit(ST, prompts={"query": "baka: "}, default_prompt_name=None),
        ),
        "new-key-str": bert(json_of(POOLING, {"embedding_dimension": 32, "pooling_mode": "mean"})),
        "new-key-list": bert(
            json_of(POOLING, {"embedding_dimension": 32, "pooling_mode": ["cls", "mean"]})
        ),
        "wrong-dimension": bert(edit(POOLING, word_embedding_dimension=16)),
        "unknown-key": bert(edit(POOLING, pooling_mode_foo=True)),
        "old-json-order": bert(
            json_of(
                POOLING, {**mean, "pooling_mode_cls_token": True, "word_embedding_dimension": 32}
            ),
        ),
        "none-declared-bert": bert(none, oracle=(cls,)),
        "none-declared-roberta": case("roberta", none, oracle=(cls,)),
        "none-declared-bert-override": bert(none, load={"pooling": "mean"}),
        "none-declared-qwen2-override": case(
            "qwen2", none, load={"pooling": "last-token"}, oracle=(last,)
        ),
        "none-declared-bert-st": bert(
            none, by_design="TEI takes BERT's first token where nothing is declared"
        ),
        "none-declared-mpnet": case("mpnet", none),
        "dir-without-modules": bert(remove("modules.json")),
        "dir-not-listed": bert(
            dense((32, 16, torchs["Tanh"])),
            listed(TRANSFORMER, ("sentence_transformers.models.Pooling", "1_Pooling")),
        ),
        **{f"dense-{name}": bert(dense((32, 16, word))) for name, word in torchs.items()},
        # sentence-transformers takes Tanh for the class of dense-GELUActivation unless it trusts
        # the repository
        "dense-GELUActivation-trusted": bert(
            dense((32, 16, torchs["GELUActivation"])), load={"trust_remote_code": True}
        ),
        "dense-upscale-concat": bert(
            dense((64, 128, torchs["Tanh"]), **mean, pooling_mode_cls_token=True)
        ),
        "dense-wrong-in": bert(dense((30, 16, torchs["Tanh"]))),
        "dense-bf16": bert(dense((32, 16, torchs["Tanh"]), of=torch.bfloat16)),
        "raw-dense-two": bert(
            dense((32, 24, torchs["Tanh"]), (24, 16, torchs["Identity"])), raw=True
        ),
        "raw-sqrt": bert(of("mean_sqrt_len_tokens"), raw=True),
        "raw-max-weighted": bert(of("max+weightedmean"), raw=True),
        "normalize-twice": bert(chain("Pooling", "Normalize", "Normalize")),
        "dropout-around": bert(rewritten(chain("Dropout", "Pooling", "Dropout"))),
        "custom-pooling-module": bert(listed(TRANSFORMER, ("custom_code.MyPooling", "1_Pooling"))),
        "transformer-only": bert(listed(TRANSFORMER)),
        "new-names": bert(
            listed(
                ("sentence_transformers.base.modules.transformer.Transformer", ""),
                ("sentence_transformers.sentence_transformer.modules.pooling.Pooling", "1_Pooling"),
            ),
        ),
        "prompts-and-normalize-keys": bert(
            edit(ST, prompts={}, similarity_fn_name="cosine", normalize=True)
        ),
        "modules-kwargs": bert(
            json_of(
                "modules.json",
                [
                    {"idx": 0, "name": "0", "path": "", "type": TRANSFORMER[0], "kwargs": []},
                    {
                        "idx": 1,
                        "name": "1",
                        "path": "1_Pooling",
                        "type": "sentence_transformers.models.Pooling",
                    },
                ],
            ),
        ),
        "model-type-crossencoder": bert(edit(ST, model_type="CrossEncoder")),
        "truncate-dim": bert(edit(ST, truncate_dim=8)),
        "st6-processing-no-specials": bert(
            sbert(processing_kwargs={"text": {"add_special_tokens": False}}), first=1
        ),
    }


MODULES = {
    **{f"pool-{name}": one for name, one in poolings().items()},
    "mod-pooling-elsewhere": bert(
        listed(TRANSFORMER, ("sentence_transformers.models.Pooling", "pooled")),
        edit("pooled/config.json", word_embedding_dimension=32, pooling_mode_max_tokens=True),
        remove("1_Pooling"),
    ),
}
