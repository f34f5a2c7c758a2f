"""Writes the table of models.md: what of a repository's files is read, and what a key that is not
understood does."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from hybridtei.inference.backends.graph.onnx_files import FILES as GRAPHS
from hybridtei.models.checkpoint import (
    contents,
    folder,
    heads,
    kinds,
    late,
    modules,
    peft,
    rankers,
    router,
    sentence,
    sizes,
    spec,
    weights,
)
from hybridtei.models.checkpoint.tokenizer import settings, vocabularies
from hybridtei.models.checkpoint.tokenizer.settings import (
    AS_WRITTEN,
    BERT_CLASSES,
    TEMPLATE_CLASSES,
)

PAGE = Path(__file__).parents[1] / "models.md"
# The methods that read a key of a JSON object.
READERS = frozenset(("count", "count_if_any", "flag", "get", "number", "object"))
NOT_READ = ("generation_config.json", "preprocessor_config.json", "training_args.bin", "README.md")
BEGIN, END = "<!-- files -->", "<!-- end of files -->"


@dataclass(frozen=True, slots=True)
class Row:
    """Files, what is read of them, and what becomes of the rest."""

    files: Sequence[str]
    read: str
    rest: str


def keys_read(name: str, *sources: ModuleType | Callable[..., object]) -> list[str]:
    """The keys that the code of `sources` reads of its variable `name`, in alphabetical order."""
    keys = set()
    for source in sources:
        for node in ast.walk(ast.parse(inspect.getsource(source))):
            match node:
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id=variable), attr=method),
                    args=[ast.Constant(value=str(key)), *_],
                ) if variable == name and method in READERS:
                    keys.add(key)
    return sorted(keys)


def rows() -> list[Row]:
    """In the order in which a folder is read."""
    families = _listed(sorted(TEMPLATE_CLASSES))
    of_modules = keys_read(
        "settings", modules.splade_function, heads.read_coder, late._token_pooling
    )
    return [
        Row(
            ["config.json"],
            "the keys of the family's class in transformers, and `architectures`, `id2label`, "
            "`auto_map`, `max_length`",
            "Loading fails for an unsupported key of the class, for a missing size and for "
            "`quantization_config`. Other keys are ignored and logged; with `auto_map` loading "
            "fails.",
        ),
        Row(
            ["tokenizer.json"],
            "all except padding; of truncation the side, and of a StaticEmbedding the length",
            "Loading fails if the tokenizers library cannot read the file.",
        ),
        Row(
            ["special_tokens_map.json"],
            f"{_listed(vocabularies.ROBERTA)}, before those of `tokenizer_config.json`, and "
            f"{_listed(vocabularies.MORE)}, after those",
            "Ignored if it is no object, or if `tokenizer_config.json` has `added_tokens_decoder`.",
        ),
        Row(
            vocabularies.FILES,
            "without `tokenizer.json`: the files that the tokenizer is built from",
            "With `tokenizer.json` they are ignored. Loading fails for an unknown class.",
        ),
        Row(
            ["added_tokens.json"],
            "tokens with their ids",
            "Ignored if `tokenizer_config.json` has `added_tokens_decoder`.",
        ),
        Row(
            ["tokenizer_config.json"],
            f"{_listed(keys_read('written', settings))}, `model_max_length`, `model_input_names` "
            "of pairs, `added_tokens_decoder`, and as special tokens "
            f"{_listed((*vocabularies.ROBERTA, *vocabularies.MORE))}; "
            "`do_lower_case`, `strip_accents` and "
            f"`tokenize_chinese_chars` count for BERT's classes ({len(BERT_CLASSES)}), "
            f"`add_bos_token` and `add_eos_token` for {families}",
            f"Other keys are ignored. {_listed(sorted(AS_WRITTEN))} and PreTrainedTokenizerFast "
            "add only special tokens and the side to `tokenizer.json`. Loading fails for a value "
            "of the wrong type.",
        ),
        Row(
            ["modules.json"],
            f"the chain of modules: {_listed(modules.ORDER)}, and of late interaction "
            f"{_listed(modules.LATE_ORDER[3:])}; Dropout and a second Normalize are ignored",
            "Loading fails for another type of module or another order. Unlisted folders are "
            "ignored.",
        ),
        Row(
            ["*/config.json"],
            f"of a Pooling `pooling_mode` ({_listed(modules.POOLINGS)}) or "
            f"{_listed(modules.LEGACY_FLAGS)}, and "
            "`include_prompt`; of a Dense its sizes, `bias` and `activation_function` (a class "
            "that is not torch's is Tanh, "
            "with a warning, unless `--trust-remote-code` is given); of the other modules "
            f"{_listed(of_modules)}, "
            f"{_listed(keys_read('mask', late))}, and those of LogitScore",
            "Loading fails for another pooling mode or activation, for `use_residual`, and for "
            "`include_prompt` false with a prompt. Other keys are ignored and logged.",
        ),
        Row(
            ["router_config.json"],
            f"{_listed(keys_read('settings', router))}; of `parameters` "
            f"{_listed(keys_read('parameters', router))}",
            "Loading fails for `route_mappings` and for other routes than query and document.",
        ),
        Row(
            [folder.SENTENCE_FILE],
            _listed(keys_read("sentence", sentence, late, heads, kinds)),
            "Other keys are ignored. A prompt that is null is empty. `similarity_fn_name` changes "
            "no vector, and warns unless it is the cosine or the vectors have length 1.",
        ),
        Row(
            folder.TRANSFORMER_FILES[:1],
            f"`max_seq_length`, {_listed(keys_read('transformer', late, spec))}, "
            "`modality_config`, `processing_kwargs`, `processor_kwargs`, `config_kwargs`, "
            "`model_kwargs`; without this file of the first of "
            f"{_listed(folder.TRANSFORMER_FILES[1:])}",
            f"Of `processing_kwargs`, {_listed(sentence.WITHOUT_EFFECT)} are ignored if they "
            "change no vector. Loading fails for its other keys and for a `modality_config` of "
            f"other outputs. `processor_kwargs` replace {_listed(sorted(sizes.OF_TOKENIZER))} of "
            "tokenizer_config.json, and `config_kwargs` keys of config.json; "
            f"{_listed(sorted(sizes.OF_LOADING))} are ignored, and loading fails for others and "
            "for `model_kwargs`. The older names `tokenizer_args`, `config_args` and "
            "`model_args` are read too. Loading fails for keys that only other kinds of models "
            "obey. Other keys are ignored and logged.",
        ),
        Row(
            [*weights.WEIGHTS, *contents.INDEXES],
            "the tensors that the family needs, in float64, float32, float16 or bfloat16; "
            "safetensors before torch's files, whose pickles are not run; prefixes such as "
            "`bert.` and `model.` are removed",
            "Loading fails for a missing tensor, another shape, and an unread tensor of the trunk. "
            "Tensors of no known layer or head are logged.",
        ),
        Row(
            [*GRAPHS["float32"], *GRAPHS["int8"]],
            "a graph that `hybridtei export`, optimum or torch wrote, by ONNX Runtime",
            "Not downloaded from the hub. Loading fails for a graph with other inputs or outputs.",
        ),
        Row(
            [
                f"{name}{suffix}"
                for name in ("sparse_linear", "colbert_linear")
                for suffix in heads.LINEAR_SUFFIXES
            ],
            "BGE-M3's two heads",
            "Loading fails if one is missing or has another width.",
        ),
        Row([heads.HEADS_FILE], "heads of `hybridtei train`", "Loading fails for another version."),
        Row(
            [rankers.OWN_FILE, "chat_template.jinja"],
            "the template of a language model that ranks, the first one that is there; of a model "
            "with a head for scores if it renders a query and a document",
            "Ignored for other models. Without a template a language model that ranks warns, and "
            "joins both texts.",
        ),
        Row(["idf.json"], "SPLADE's weights of query tokens", "Loading fails for other content."),
        Row(
            ["artifact.metadata"],
            f"of Stanford's ColBERT {_listed(keys_read('settings', late._stanford))}",
            "Other keys are ignored. Loading fails if the vocabulary lacks a marker.",
        ),
        Row(
            [peft.ADAPTER, peft.ADAPTER_WEIGHTS],
            f"LoRA, beside the weights, without them (the base is found by its name) or in folders "
            f"inside the model's: {_listed(sorted(peft.READ))}, `base_model_name_or_path`, "
            "`revision`",
            f"Loading fails for other kinds, and for other values than usual of "
            f"{_listed(sorted(peft.SERVED))}. The message has the cure.",
        ),
        Row([contents.GLINER], "its name", "Loading fails: not supported."),
        Row(
            list(contents.FOREIGN),
            "their names, if there are no other weights",
            "Loading fails; the message has the cure.",
        ),
        Row(NOT_READ, "nothing", "Not read."),
    ]


def table() -> str:
    """The text between the two marks."""
    head = ["| file | read | otherwise |", "| --- | --- | --- |"]
    lines = [f"| {_listed(row.files)} | {row.read} | {row.rest} |" for row in rows()]
    return "\n".join([BEGIN, "", *head, *lines, "", END])


def page() -> str:
    """The file with the current table."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    return before + table() + rest.split(END)[1]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
