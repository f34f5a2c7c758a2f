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
from hybridtei.models.checkpoint.tokenizer.settings import AS_WRITTEN, BERT_CLASSES, TEMPLATE_CLASSES

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
            "A key that the class declares and that is not served is refused by name. One that it does not declare is "
            "ignored, and "
            "named in the log; beside `auto_map` it is refused. `quantization_config` is refused. A missing size is refused.",
        ),
        Row(
            ["tokenizer.json"],
            "all of it, but padding; of truncation the side",
            "The file is refused where the tokenizers library cannot read it.",
        ),
        Row(
            [*vocabularies.FILES, "added_tokens.json", "special_tokens_map.json"],
            "where `tokenizer.json` is missing: the tokenizer is built from them",
            "Beside `tokenizer.json` they are not read. Of a class that is not built here they are refused.",
        ),
        Row(
            ["tokenizer_config.json"],
            "`tokenizer_class`, `model_max_length`, special tokens, `truncation_side`, `split_special_tokens`; "
            "`do_lower_case`, "
            "`strip_accents`, `tokenize_chinese_chars` of BERT's classes (" + str(len(BERT_CLASSES)) + "); `add_prefix_space`; "
            f"`add_bos_token`, `add_eos_token` of {families}; `model_input_names` of classifiers",
            f"Other keys are ignored. {_listed(sorted(AS_WRITTEN))} and PreTrainedTokenizerFast take `tokenizer.json` as "
            f"it is. A value of "
            "another type is refused.",
        ),
        Row(
            ["modules.json"],
            f"the chain of modules: {_listed(modules.ORDER)}, and of late interaction {_listed(modules.LATE_ORDER[3:])}; "
            "Dropout and a second Normalize are passed over",
            "Another type of module, or another order, is refused. A folder that it does not list is not read.",
        ),
        Row(
            ["*/config.json"],
            f"of a Pooling `pooling_mode` ({_listed(modules.POOLINGS)}) or {_listed(modules.LEGACY_FLAGS)}, and "
            f"`include_prompt`; "
            "of a Dense its sizes, `bias` and `activation_function`; those of SpladePooling and LogitScore",
            "Another pooling mode or activation is refused; `use_residual` and `include_prompt` false with a prompt are "
            "refused. Other "
            "keys are ignored.",
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
            f"Of `processing_kwargs`, {_listed(sentence.WITHOUT_EFFECT)} are ignored with the values that change no "
            f"vector; another key, and "
            "a `modality_config` of other outputs, are refused. Other keys are ignored.",
        ),
        Row(
            [*weights.WEIGHTS, *contents.INDEXES],
            "the tensors that the family needs, in float64, float32, float16 or bfloat16; safetensors before what torch "
            "saved, whose "
            "pickle is not run; prefixes such as `bert.` and `model.` are taken off",
            "A missing tensor and one of another shape are refused, and so is one that belongs to no known head: it may "
            "be a layer.",
        ),
        Row(
            [*GRAPHS["float32"], *GRAPHS["int8"]],
            "a graph that `hybridtei export`, optimum or torch wrote, by ONNX Runtime",
            "Not fetched from the hub; a graph of other inputs or outputs is refused.",
        ),
        Row(
            [f"{name}{suffix}" for name in ("sparse_linear", "colbert_linear") for suffix in heads.LINEAR_SUFFIXES],
            "BGE-M3's two heads",
            "One without the other, and one of another width, is refused.",
        ),
        Row([heads.HEADS_FILE], "heads that `hybridtei train` wrote", "Another version is refused."),
        Row(
            [rankers.OWN_FILE, "chat_template.jinja"],
            "the template of a language model that ranks",
            "Of other models not read.",
        ),
        Row(["idf.json"], "a SPLADE's weights of query tokens", "Another content is refused."),
        Row(["artifact.metadata"], "lengths and markers of Stanford's ColBERT", "Other keys are ignored."),
        Row(
            [contents.ADAPTER],
            "its base's name",
            "Refused: an adapter in files of its own is not applied. The message has the lines that merge it.",
        ),
        Row(
            list(contents.FOREIGN),
            "their names, where no other weights are there",
            "Refused, with the cure: " + "; ".join(dict.fromkeys(cure for _, cure in contents.FOREIGN.values())) + ".",
        ),
        Row(NOT_READ, "nothing", "Not read."),
    ]


def table() -> str:
    """What stands between the two marks."""
    head = ["| file | what is read | what is not understood |", "| --- | --- | --- |"]
    lines = [f"| {_listed(row.files)} | {row.read} | {row.rest} |" for row in rows()]
    return "\n".join([BEGIN, "", *head, *lines, "", END])


def page() -> str:
    """The whole file, with the table of now."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    return before + table() + rest.split(END)[1]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 1 if `--check` finds that the table is out of date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args(argv).check:
        PAGE.write_text(page(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page():
        print("models.md is out of date: python notebooks/write_files.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
