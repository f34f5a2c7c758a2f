"""Variants of weight files."""

from pathlib import Path
from typing import Any

import torch

from conformance.checkpoints.build import (
    Case,
    Step,
    as_bin,
    bert,
    case,
    config,
    halved,
    modules,
    prefixed,
    remove,
    rewritten,
    shards,
    tensors,
    write,
)
from conformance.small import tiny


def lora(folder: Path) -> None:
    """A LoRA adapter of PEFT in the folder of the weights."""
    described = {
        "peft_type": "LORA",
        "task_type": "FEATURE_EXTRACTION",
        "base_model_name_or_path": str(folder),
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["query"],
        "bias": "none",
    }
    tiny.write_json(folder / "adapter_config.json", described)
    write("adapter_model.safetensors", b"")(folder)


def weights() -> dict[str, Case]:
    quant: dict[str, dict[str, Any]] = {
        "bitsandbytes": {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "_load_in_4bit": True,
        },
        "fp8": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
        "torchao": {"quant_method": "torchao"},
        "hqq": {"quant_method": "hqq"},
        "gptq": {"quant_method": "gptq", "bits": 4},
        "awq": {"quant_method": "awq", "bits": 4},
    }
    only = remove("model.safetensors")
    foreign = {
        "only-tf": "tf_model.h5",
        "only-flax": "flax_model.msgpack",
        "consolidated": "consolidated.00.pth",
        "variant-fp16-name": "model.fp16.safetensors",
        "only-gguf": "model-q4.gguf",
    }
    prefixes = ("model.", "module.", "module.bert.", "encoder.", "auto_model.", "transformer.")
    last = "encoder.layer.1.output.dense.weight"

    def gamma(names: dict[str, torch.Tensor], prefix: str = "") -> dict[str, torch.Tensor]:
        old = {
            name: name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"
            )
            for name in names
        }
        return {prefix + old[name]: one for name, one in names.items()}

    def without(name: str) -> Step:
        return lambda folder: tiny.without(folder, name)

    def extra(**more: torch.Tensor) -> Step:
        return tensors(
            lambda found: found | {name.replace("__", "."): one for name, one in more.items()}
        )

    return {
        "fp16": bert(halved(torch.float16)),
        "bf16": bert(halved(torch.bfloat16)),
        "shards": bert(shards(2)),
        "shards-and-whole": bert(shards(2, keep=True)),
        "shards-no-index": bert(shards(2, index=False), oracle=()),
        "shard-missing": bert(shards(2), remove("model-00002*")),
        "bin": bert(as_bin()),
        "bin-legacy": bert(as_bin(legacy=True)),
        "bin-shards": bert(shards(2, bins=True)),
        "bin-bf16": bert(halved(torch.bfloat16), as_bin()),
        "bin-parameters": bert(
            as_bin(
                wrap=lambda found: {name: torch.nn.Parameter(one) for name, one in found.items()}
            ),
        ),
        "bin-transposed": bert(
            as_bin(
                wrap=lambda found: {
                    name: one.t().contiguous().t() if one.dim() == 2 else one
                    for name, one in found.items()
                }
            ),
        ),
        "bin-position-ids": bert(extra(embeddings__position_ids=torch.arange(128)[None]), as_bin()),
        "bin-state-dict-wrapped": bert(as_bin(wrap=lambda found: {"state_dict": found})),
        "both-differ": bert(
            as_bin(keep=True, wrap=lambda found: {name: one * 2 for name, one in found.items()}),
        ),
        **{
            f"prefix-{prefix.replace('.', '_')}": bert(rewritten(prefixed(prefix)))
            for prefix in prefixes
        },
        "prefix-bert-on-roberta": case("roberta", rewritten(prefixed("bert."))),
        "prefix-model-qwen3": case("qwen3", prefixed("model.")),
        "prefix-model-lmhead-qwen3": case(
            "qwen3", modules, task="ForCausalLM", settings={"tie_word_embeddings": False}
        ),
        "prefix-distilbert-mlm": case("distilbert", modules, task="ForMaskedLM"),
        "prefix-deberta-mlm": case("deberta-v3", modules, task="ForMaskedLM"),
        "mlm-extras": bert(modules, task="ForPreTraining"),
        "extra-qa": bert(modules, task="ForQuestionAnswering"),
        "teacher-beside": bert(
            tensors(
                lambda found: (
                    found | {f"teacher.{name}": one.clone() for name, one in found.items()}
                )
            ),
        ),
        "gamma-beta": bert(tensors(gamma)),
        "gamma-beta-prefixed": bert(tensors(lambda found: gamma(found, "bert."))),
        "missing-layer-norm": bert(without("encoder.layer.1.output.LayerNorm.weight")),
        "more-layers-than-config": bert(config(num_hidden_layers=1)),
        "fewer-layers-than-config": bert(config(num_hidden_layers=3)),
        "vocab-mismatch": bert(config(vocab_size=200)),
        "extra-decoder-layers": bert(
            extra(decoder__layer__0__attention__self__query__weight=torch.zeros(32, 32))
        ),
        "no-metadata": bert(tensors(dict)),
        "truncated": bert(
            lambda folder: write(
                "model.safetensors", (folder / "model.safetensors").read_bytes()[:9000]
            )(folder),
        ),
        "empty-file": bert(write("model.safetensors", b"")),
        "bin-truncated": bert(
            as_bin(),
            lambda folder: write(
                "pytorch_model.bin", (folder / "pytorch_model.bin").read_bytes()[:9000]
            )(folder),
        ),
        "html-instead": bert(write("model.safetensors", b"<!DOCTYPE html><html>404</html>")),
        "nan": bert(tensors(lambda found: found | {last: found[last] * float("nan")})),
        **{name: bert(only, write(file, b"x" * 64)) for name, file in foreign.items()},
        "only-gguf-bare": bert(remove("*"), write("model-q4.gguf", b"GGUF" + b"x" * 64)),
        "no-config": bert(remove("config.json")),
        "empty-folder": bert(remove("*")),
        "none": bert(only),
        "tokenizer-bad-json": bert(write("tokenizer.json", b'{"model": {}}')),
        "config-nan-literal": bert(config(layer_norm_eps=float("nan"))),
        **{
            f"quant-{name}": case("qwen3", config(quantization_config=how))
            for name, how in quant.items()
        },
        "quant-bert-bnb": bert(
            config(quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True}),
        ),
        "quant-compressed": bert(config(compression_config={"load_in_8bit": True})),
        "quant-fp8-noconfig": case(
            "qwen3", extra(layers__0__mlp__down_proj__weight_scale_inv=torch.ones(1))
        ),
        "lora-only": bert(lora, only, remove("config.json")),
        "lora-beside-base": bert(lora),
    }


WEIGHTS = {f"w-{name}": one for name, one in weights().items()}
