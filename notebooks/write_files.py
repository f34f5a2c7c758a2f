"""Writes the table of models.md: what of a repository's files is read, and what a key that is not understood does.

python notebooks/write_files.py [--check]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridtei.inference.backends.graph.onnx_files import FILES as GRAPHS
from hybridtei.models.checkpoint import contents, heads, modules, rankers, sentence, sizes, weights
from hybridtei.models.checkpoint.tokenizer import vocabularies
from hybridtei.models.checkpoint.tokenizer.settings import (
    AS_WRITTEN,
    BERT_CLASSES,
    TEMPLATE_CLASSES,
)

PAGE = Path(__file__).parent / "models.md"
NOT_READ = ("generation_config.json", "preprocessor_config.json", "training_args.bin", "README.md")
BEGIN, END = "<!-- files -->", "<!-- end of files -->"


@dataclass(frozen=True, slots=True)
class Row:
    """Files, what is read of them, and what becomes of the rest."""

    files: Sequence[str]
    read: str
    rest: str


def rows() -> list[Row]:
    """In the order in which a folder is read."""
    families = _listed(sorted(TEMPLATE_CLASSES))
    return [
        Row(
            ["config.json"],
            "the keys of the family's class in transformers, and `architectures`, `id2label`, `auto_map`, `max_length`",
            "Loading fails for an unsupported key of the class, for a missing size and for `quantization_config`. Other keys "
            "are ignored and logged; with `auto_map` loading fails.",
        ),
        Row(
            ["tokenizer.json"],
            "all except padding; of truncation only the side",
            "Loading fails if the tokenizers library cannot read the file.",
        ),
        Row(
            [*vocabularies.FILES, "added_tokens.json", "special_tokens_map.json"],
            "without `tokenizer.json`: the files that the tokenizer is built from",
            "With `tokenizer.json` they are ignored. Loading fails for an unknown class.",
        ),
        Row(
            ["tokenizer_config.json"],
            "`tokenizer_class`, `model_max_length`, special tokens, `truncation_side`, `split_special_tokens`; "
            "`do_lower_case`, "
            "`strip_accents`, `tokenize_chinese_chars` of BERT's classes ("
            + str(len(BERT_CLASSES))
            + "); `add_prefix_space`; "
            f"`add_bos_token`, `add_eos_token` of {families}; `model_input_names` of classifiers",
            f"Other keys are ignored. {_listed(sorted(AS_WRITTEN))} and PreTrainedTokenizerFast use `tokenizer.json` "
            "alone. Loading fails for a value of the wrong type.",
        ),
        Row(
            ["modules.json"],
            f"the chain of modules: {_listed(modules.ORDER)}, and of late interaction {_listed(modules.LATE_ORDER[3:])}; "
            "Dropout and a second Normalize are ignored",
            "Loading fails for another type of module or another order. Unlisted folders are ignored.",
        ),
        Row(
            ["*/config.json"],
            f"of a Pooling `pooling_mode` ({_listed(modules.POOLINGS)}) or {_listed(modules.LEGACY_FLAGS)}, and "
            f"`include_prompt`; "
            "of a Dense its sizes, `bias` and `activation_function` (Tanh for a class that is not torch's, with a warning); those of SpladePooling and LogitScore",
            "Loading fails for another pooling mode or activation, for `use_residual`, and for `include_prompt` false with a "
            "prompt. Other keys are ignored.",
        ),
        Row(
            [sentence.MODEL_FILE],
            "`prompts`, `default_prompt_name`, `truncate_dim`, `max_active_dims`, `activation_fn`; PyLate's keys of ColBERT",
            "Other keys are ignored: `similarity_fn_name` changes no vector.",
        ),
        Row(
            sizes.LENGTH_FILES[:1],
            "`max_seq_length`, `do_lower_case`, `processing_kwargs`, `modality_config`, `query_expansion`; else the first of "
            f"{_listed(sizes.LENGTH_FILES[1:])}",
            f"Of `processing_kwargs`, {_listed(sentence.WITHOUT_EFFECT)} are ignored if they change no vector. "
            "Loading fails for its other keys and for a `modality_config` of other outputs. `processor_kwargs` replace "
            f"{_listed(sorted(sizes.OF_TOKENIZER))} of tokenizer_config.json, and `config_kwargs` keys of config.json; "
            f"{_listed(sorted(sizes.OF_LOADING))} are ignored, and loading fails for others and for `model_kwargs`. The older "
            "names `tokenizer_args`, `config_args` and `model_args` are read too. Other keys are ignored.",
        ),
        Row(
            [*weights.WEIGHTS, *contents.INDEXES],
            "the tensors that the family needs, in float64, float32, float16 or bfloat16; safetensors before torch's "
            "files, whose pickles are not run; prefixes such as `bert.` and `model.` are removed",
            "Loading fails for a missing tensor, another shape, and a tensor of no known head, which may be a layer.",
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
            "the template of a language model that ranks",
            "Ignored for other models.",
        ),
        Row(["idf.json"], "SPLADE's weights of query tokens", "Loading fails for other content."),
        Row(
            ["artifact.metadata"],
            "lengths and markers of Stanford's ColBERT",
            "Other keys are ignored.",
        ),
        Row(
            [contents.ADAPTER],
            "its base's name",
            "Loading fails: adapters in separate files are not supported. The message has the code that merges them.",
        ),
        Row(
            list(contents.FOREIGN),
            "their names, if there are no other weights",
            "Loading fails, with a cure: "
            + "; ".join(dict.fromkeys(cure for _, cure in contents.FOREIGN.values()))
            + ".",
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


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 1 if `--check` finds that the table is out of date."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args(argv).check:
        PAGE.write_text(page(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page():
        print("models.md is out of date: python notebooks/write_files.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
