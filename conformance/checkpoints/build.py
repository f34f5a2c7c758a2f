"""A case: a base checkpoint with seeded weights, and small edits of its files."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from conformance.checkpoints.words import write_tokenizer
from conformance.small import tiny
from conformance.small.vocabulary import LONGEST

Step = Callable[[Path], object]
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Base:
    """A family's `model_type`, kind of tokenizer and settings of its configuration's class."""

    model_type: str
    words: str = "wordpiece"
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Case:
    """`settings` change the configuration before weights are drawn, `steps` edit the written files,
    and `oracle` those of a copy that the oracle reads, where it would not read what the publisher
    meant. `task`: end of the class's name. `kind`: of output. `options`: see `judge`. `by_design`:
    why ours follows TEI or the publisher, where it does."""

    base: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()
    kind: str = "embedding"
    task: str = "Model"
    options: Mapping[str, Any] = field(default_factory=dict)
    oracle: tuple[Step, ...] = ()
    by_design: str = ""


def case(
    base: str,
    *steps: Step,
    oracle: tuple[Step, ...] = (),
    by_design: str = "",
    kind: str = "embedding",
    task: str = "Model",
    settings: dict[str, Any] | None = None,
    **options: Any,
) -> Case:
    return Case(base, settings or {}, steps, kind, task, options, oracle, by_design)


# Most cases vary a BERT
bert = partial(case, "bert")

SEQ2SEQ = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": LONGEST,
}
XLM = {"emb_dim": 32, "n_layers": 2, "n_heads": 4, "max_position_embeddings": LONGEST}
SHARED = {"share_att_key": True, "norm_rel_ebd": "layer_norm", "position_biased_input": False}
# The ids of the tokenizers `bytes` and `llama`
IDS = {"eos_token_id": 2}
LLAMA = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def known(model_type: str, words: str = "", **settings: Any) -> Base:
    """A family of `tiny`, with other words or settings."""
    family = {**tiny.FAMILIES, **tiny.OTHERS}[model_type]
    return Base(model_type, words or family.tokenizer, {**family.settings, **settings})


BASES: dict[str, Base] = {
    **{
        name: known(name)
        for name in (
            "bert",
            "roberta",
            "camembert",
            "distilbert",
            "electra",
            "gte",
            "albert",
            "longformer",
            "rembert",
            "ernie",
            "megatron-bert",
            "roformer",
            "data2vec-text",
        )
    },
    "bert-cased": known("bert", "cased"),
    "xlmr": known("xlm-roberta"),
    "electra-same": known("electra", embedding_size=32),
    "mpnet": known("mpnet", "roberta"),
    "deberta-v3": known("deberta-v2", **SHARED),
    "deberta-v2-conv": known("deberta-v2", **SHARED, conv_kernel_size=3, conv_act="gelu"),
    "deberta-v1": known("deberta", type_vocab_size=0, max_relative_positions=64),
    "modernbert": known("modernbert", **tiny.MODERN_BERT_IDS),
    "nomic": known("nomic_bert"),
    "jina3": known("jina_embeddings_v3", **tiny.ROBERTA),
    "eurobert": known("eurobert", **IDS, mask_token_id=1),
    "qwen2": known("qwen2", **IDS),
    "qwen3": known("qwen3", **IDS),
    "qwen3-moe": known("qwen3_moe", **IDS),
    "smollm3": Base("smollm3", "bytes", {**tiny.DECODER, **IDS}),
    **{
        name.replace("_", "-"): known(name, "llama", **LLAMA)
        for name in ("mistral", "llama", "gemma2", "gemma", "phi3", "mixtral", "phi")
    },
    "gemma3-text": known("gemma3_text", "llama", **LLAMA),
    **{
        name: Base(name, "llama", {**tiny.DECODER, **LLAMA})
        for name in ("granite", "olmo2", "starcoder2", "stablelm", "cohere")
    },
    **{
        name: Base(name, "llama", {**tiny.DECODER, **LLAMA, "head_dim": 8})
        for name in ("glm", "ministral")
    },
    "gpt2": Base(
        "gpt2", "bytes", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LONGEST}
    ),
    "bloom": Base("bloom", "bytes", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "falcon": Base("falcon", "bytes", tiny.ENCODER),
    "opt": Base(
        "opt",
        "roberta",
        {**tiny.ENCODER, "ffn_dim": 48, "word_embed_proj_dim": 32, "pad_token_id": 1},
    ),
    "modernbert-decoder": Base(
        "modernbert-decoder", settings={**tiny.ENCODER, **tiny.MODERN_BERT_IDS}
    ),
    "t5-encoder": known("t5", pad_token_id=1),
    "mt5-encoder": known("mt5", pad_token_id=1),
    "bart": Base("bart", "roberta", SEQ2SEQ),
    "mbart": Base("mbart", "unigram", SEQ2SEQ),
    "xlnet": Base("xlnet", "unigram", {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}),
    "xlm": Base("xlm", settings={**XLM, "pad_index": 0}),
    "flaubert": Base("flaubert", settings={**XLM, "pad_index": 0}),
    "funnel": Base(
        "funnel",
        settings={"d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 48, "block_sizes": [1, 1]},
    ),
    "big-bird": known("big_bird", "wordpiece"),
    "mobilebert": Base(
        "mobilebert", settings={**tiny.ENCODER, "embedding_size": 32, "intra_bottleneck_size": 32}
    ),
    **{
        name: Base(name, settings={**tiny.ENCODER, "embedding_size": 32})
        for name in ("convbert", "squeezebert")
    },
    "luke": Base("luke", "roberta", {**tiny.ROBERTA, "entity_vocab_size": 8, "entity_emb_size": 8}),
    "lilt": known("lilt", "roberta"),
    "dpr-question": known("dpr"),
    "fnet": known("fnet", "wordpiece"),
    "nystromformer": known("nystromformer", "wordpiece"),
    "splinter": Base("splinter", settings=tiny.ENCODER),
    "xlm-roberta-xl": known("xlm-roberta-xl", "roberta"),
    **{name: Base(name, "roberta", tiny.ROBERTA) for name in ("ibert", "xmod", "esm")},
}
TYPED = frozenset({"bert", "electra", "nomic_bert", "ernie", "albert"})


def build(folder: Path, case: Case) -> Path:
    """Write a case. Raises what transformers raises for settings that it refuses."""
    base = BASES[case.base]
    pieces = write_tokenizer(folder, base.words, longest=LONGEST, types=base.model_type in TYPED)
    ids = {"pad_token_id": 1 if base.words in ("unigram", "roberta") else 0}
    config = AutoConfig.for_model(
        base.model_type, **{"vocab_size": pieces, **ids, **base.settings, **case.settings}
    )
    model = model_of(config, case.task)
    torch.manual_seed(0)
    tiny.randomise(model, 0)
    model.eval().save_pretrained(folder)
    if case.task in ("Model", "EncoderModel"):
        modules(folder)
    for step in case.steps:
        step(folder)
    return folder


def model_of(config: Any, task: str) -> Any:
    """A family's class for a task, such as ForMaskedLM."""
    names = type(config).__name__.removesuffix("Config")
    return getattr(transformers, (names + task).replace("DPRModel", "DPRQuestionEncoder"))(config)


def oracle_of(folder: Path, case: Case) -> Path:
    """The folder itself, or a copy, of before `rewritten` or with the case's edits for the
    oracle."""
    copy = folder.with_name(f"{folder.name}-oracle")
    if not copy.exists():
        if not case.oracle:
            return folder
        shutil.copytree(folder, copy)
    for step in case.oracle:
        step(copy)
    return copy


def rewritten(rewrite: Callable[..., object], **changes: Any) -> Step:
    """Rewrite a checkpoint in its publisher's format. The oracle does not know this format and
    reads the original."""

    def step(folder: Path) -> None:
        shutil.copytree(folder, folder.with_name(f"{folder.name}-oracle"))
        rewrite(folder, **changes)

    return step


def edit(file: str, **changes: Any) -> Step:
    """Set keys of a JSON file, which is made where it is missing; ... removes one."""

    def step(folder: Path) -> None:
        path = folder / file
        if not path.exists():
            tiny.write_json(path, {})
        tiny.edit_json(path, **changes)

    return step


def config(**changes: Any) -> Step:
    return edit("config.json", **changes)


def words(**changes: Any) -> Step:
    return edit("tokenizer_config.json", **changes)


def sbert(**changes: Any) -> Step:
    return edit(
        "sentence_bert_config.json",
        **{"max_seq_length": LONGEST, "do_lower_case": False, **changes},
    )


def json_of(file: str, value: Any) -> Step:
    return lambda folder: tiny.write_json(folder / file, value)


def write(file: str, content: bytes) -> Step:
    def step(folder: Path) -> None:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(content)

    return step


def remove(*patterns: str) -> Step:
    def step(folder: Path) -> None:
        for path in [found for pattern in patterns for found in folder.glob(pattern)]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return step


def tensors(change: Callable[[Tensors], Tensors]) -> Step:
    return lambda folder: tiny.change(folder, change)


def prefixed(prefix: str) -> Step:
    return tensors(lambda found: {prefix + name: one for name, one in found.items()})


def raw_words(**changes: Any) -> Step:
    """Set top-level keys of tokenizer.json."""
    return edit("tokenizer.json", **changes)


def modules(folder: Path, chain: tuple[str, ...] = ("Pooling",), **pooling: Any) -> None:
    """Write modules.json with a Transformer and these modules, and 1_Pooling/config.json of mean
    pooling, updated by `pooling`."""
    home = "sentence_transformers.models"
    paths = ["", *(f"{number}_{name}" for number, name in enumerate(chain, start=1))]
    rows = zip(paths, ("Transformer", *chain), strict=True)
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"{home}.{name}"}
        for i, (path, name) in enumerate(rows)
    ]
    tiny.write_json(folder / "modules.json", listed)
    for path in paths[1:]:
        (folder / path).mkdir(exist_ok=True)
    if "Pooling" in chain:
        described = {
            "word_embedding_dimension": 32,
            **(pooling or {"pooling_mode_mean_tokens": True}),
        }
        tiny.write_json(folder / f"{chain.index('Pooling') + 1}_Pooling" / "config.json", described)


def chain(*names: str, **pooling: Any) -> Step:
    return lambda folder: modules(folder, names, **pooling)


def as_bin(
    *, keep: bool = False, wrap: Callable[[Tensors], Any] = dict, legacy: bool = False
) -> Step:
    """Save the weights in torch's format, instead of safetensors or in addition to it."""

    def step(folder: Path) -> None:
        found = load_file(folder / "model.safetensors")
        torch.save(
            wrap(found), folder / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy
        )
        if not keep:
            (folder / "model.safetensors").unlink()

    return step


def shards(count: int, *, bins: bool = False, keep: bool = False, index: bool = True) -> Step:
    """Cut the weights into files with an index."""

    def step(folder: Path) -> None:
        found = load_file(folder / "model.safetensors")
        stem, suffix = ("pytorch_model", "bin") if bins else ("model", "safetensors")
        names = [f"{stem}-{number + 1:05}-of-{count:05}.{suffix}" for number in range(count)]
        placed = {name: names[place % count] for place, name in enumerate(sorted(found))}
        for file in names:
            part = {name: found[name] for name, home in placed.items() if home == file}
            torch.save(part, folder / file) if bins else save_file(
                part, folder / file, metadata={"format": "pt"}
            )
        if index:
            tiny.write_json(
                folder / f"{stem}.{suffix}.index.json", {"metadata": {}, "weight_map": placed}
            )
        if not keep:
            (folder / "model.safetensors").unlink()

    return step


def halved(of: torch.dtype) -> Step:
    """The same weights in fewer bits."""
    return tensors(lambda found: {name: one.to(of) for name, one in found.items()})


def read(folder: Path, file: str) -> Any:
    return json.loads((folder / file).read_text(encoding="utf-8"))
