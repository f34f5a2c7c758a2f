"""Commands on a model: `train` makes a sparse and a multi-vector head for a frozen dense encoder,
`export` writes ONNX files, `tune` measures backends and batch sizes, `pack` stores packed weights
for later starts, `compare` compares two servers' vectors. `explain` prints the cause and remedy of
an error, with the texts of `/page/errors.html`."""

from __future__ import annotations

import argparse
import datetime
import html
import re
import sys
import textwrap
import time
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
from tqdm import tqdm

from hybridtei.cli.flags import Commands, add_flags, new_parser, read_engine, read_settings
from hybridtei.config import EngineConfig, ModelConfig
from hybridtei.errors import HybridTeiError, UsageError
from hybridtei.system.machine import require_extra

# Of `heads.models`, which imports torch
ACTIVATIONS = ("gelu", "relu", "silu")
DROPS = ("first", "specials", "none")


def add_train(commands: Commands) -> None:
    parser = new_parser(
        commands,
        "train",
        run_train,
        "--model FOLDER --output FILE --cache FOLDER --pairs FILE... [flags]",
    )
    parser.add_argument(
        "--model",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="model in the Hugging Face layout",
    )
    output_help = (
        "head file to write; to serve the heads, put it into the model's folder as "
        "hybridtei_heads.safetensors"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help=output_help)
    cache_help = "folder of token states; a later run with the same model and texts uses them again"
    parser.add_argument("--cache", type=Path, required=True, metavar="FOLDER", help=cache_help)
    group = parser.add_argument_group("data")
    pairs_help = 'JSON lines of {"query" or "title", "text"}'
    group.add_argument(
        "--pairs", type=Path, nargs="+", required=True, metavar="FILE", help=pairs_help
    )
    _flag(group, "--min-words", 20, "leave out texts with fewer words")
    _flag(group, "--opening", 100, "two texts with the same first N characters count as repeats")
    _flag(group, "--sentences", True, "add sentence pairs")
    _flag(group, "--max-tokens", 192, "truncate training texts to this length")
    group.add_argument(
        "--data",
        metavar="TEXT",
        help="description of the data, for the head file [default: not stated]",
    )
    group.add_argument(
        "--licence",
        metavar="TEXT",
        help="licence of the data, for the head file [default: not stated]",
    )
    group.add_argument(
        "--base-name",
        metavar="NAME",
        help="base model, for the head file [default: the folder's name]",
    )
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    group.add_argument(
        "--date", default=today, metavar="DATE", help="date, for the head file [default: today]"
    )
    group = parser.add_argument_group("heads")
    inputs = ["hidden", "embedding"]
    _flag(group, "--sparse-width", 256, "hidden units of the sparse head; 0: linear")
    _flag(group, "--sparse-inputs", inputs, "of the sparse head", nargs="+", choices=inputs)
    _flag(group, "--activation", "gelu", "of the sparse head", choices=ACTIVATIONS)
    _flag(group, "--dim", 256, "dimensions of a token's vector")
    _flag(
        group,
        "--prefixes",
        [64, 128],
        "numbers of leading dimensions that are trained to work alone",
        type=int,
        nargs="*",
        metavar="N",
    )
    _flag(group, "--bias", False, "of the projection")
    _flag(group, "--drop", "first", "tokens that get no vector", choices=DROPS)
    group = parser.add_argument_group("training")
    _flag(group, "--pooling", "mean", "of the model's dense vectors", choices=["mean", "cls"])
    _flag(group, "--dense-temperature", 0.05, "of the teacher's cosine")
    _flag(group, "--maxsim-temperature", 0.03, "of the teacher's mean MaxSim")
    _flag(group, "--epochs", 3, "passes over the data")
    _flag(group, "--learning-rate", 1e-3, "highest; rises first, then falls to 0")
    _flag(group, "--group-size", 16, "neighbouring texts that stay together")
    _flag(group, "--groups", 4, "groups in a batch")
    _flag(group, "--seed", 0, "of the starting weights and of the order")
    _flag(group, "--dtype", "float32", "of matrix products", choices=["float32", "bfloat16"])
    _flag(group, "--threads", 1, "CPU threads; another number can change the last digits")


def _flag(group: Any, name: str, default: Any, text: str, **options: Any) -> None:
    """Add a flag whose help shows its default. A boolean flag also has a `--no-` form."""
    shown = str(default)
    if isinstance(default, bool):
        options["action"] = argparse.BooleanOptionalAction
        shown = "on" if default else "off"
    elif isinstance(default, list):
        shown = " ".join(map(str, default))
    elif not isinstance(default, str):
        options |= {"type": type(default), "metavar": "N"}
    group.add_argument(name, default=default, help=f"{text} [default: {shown}]", **options)


def run_train(arguments: argparse.Namespace) -> None:
    """Train a sparse and a multi-vector head over a frozen dense encoder, without relevance
    labels."""
    require_extra("torch", "torch", "transformers")
    from hybridtei.models.heads.run import train

    try:
        history = train(arguments)
    except (ValueError, RuntimeError) as error:
        raise HybridTeiError(str(error)) from error
    for epoch, losses in enumerate(history, start=1):
        print(f"epoch {epoch}: " + ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items()))
    print(f"wrote {arguments.output}, {arguments.output.stat().st_size} bytes")


def add_export(commands: Commands) -> None:
    parser = new_parser(commands, "export", run_export)
    parser.add_argument(
        "model", metavar="MODEL", help="a local folder, a hub id, or the embedded model"
    )
    parser.add_argument("out", metavar="OUT", help="folder to write")
    parser.add_argument(
        "--min-cosine",
        type=float,
        default=0.97,
        help="int8: least cosine to float32 [default: 0.97]",
    )
    parser.add_argument(
        "--min-mean-cosine", type=float, default=0.99, help="int8: on average [default: 0.99]"
    )
    add_flags(parser, (ModelConfig,))


def run_export(arguments: argparse.Namespace) -> None:
    """Write a model as ONNX files, which other programs can run too."""
    model = msgspec.structs.replace(read_settings(arguments, ModelConfig), model_id=arguments.model)
    dtype = model.dtype or "float32"
    if dtype not in ("float32", "int8"):
        raise UsageError(f"--dtype is {dtype}; export writes float32 or int8")
    from hybridtei.inference.backends.fidelity import Guard
    from hybridtei.inference.backends.graph.onnx_export import export_model
    from hybridtei.inference.load import find_model

    guard = Guard(
        worst=arguments.min_cosine, mean=max(arguments.min_cosine, arguments.min_mean_cosine)
    )
    print(export_model(find_model(model), Path(arguments.out), dtype, guard))


def add_tune(commands: Commands) -> None:
    parser = new_parser(commands, "tune", run_tune, "[flags]")
    add_flags(parser, (ModelConfig, EngineConfig))


def run_tune(arguments: argparse.Namespace) -> None:
    """Measure which backend and batch size suit this machine."""
    model, engine = read_settings(arguments, ModelConfig), read_engine(arguments)
    from hybridtei.inference.backends.tuning import tune
    from hybridtei.inference.load import find_model

    for line in tune(model, find_model(model), engine):
        print(line, flush=True)


def add_pack(commands: Commands) -> None:
    parser = new_parser(commands, "pack", run_pack, "(MODEL | --list | --prune) [flags]")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument(
        "model", metavar="MODEL", nargs="?", help="a local folder, a hub id, or the embedded model"
    )
    action.add_argument(
        "--list", action="store_true", help="print the packed weights, the most recently used first"
    )
    prune_help = (
        "remove weights not used for 30 days, weights of models whose folder is gone, and the "
        "longest unused beyond --packed-cache-gb"
    )
    action.add_argument("--prune", action="store_true", help=prune_help)
    add_flags(parser, (ModelConfig,))


def run_pack(arguments: argparse.Namespace) -> None:
    """Pack a model's weights for this processor and ONNX Runtime, so that later starts on this
    machine take seconds."""
    from hybridtei.inference.backends.graph.packed_file import GB, packed_files, prune
    from hybridtei.inference.backends.select import open_backend
    from hybridtei.inference.load import find_model

    model = read_settings(arguments, ModelConfig)
    if arguments.prune:
        print(*prune(model.packed_cache_gb * GB), sep="\n")
        return
    # With --list, all files; otherwise those that packing has used
    began = 0.0
    if not arguments.list:
        began = time.time()
        model = msgspec.structs.replace(model, model_id=arguments.model, backend="ort")
        open_backend(model, find_model(model)).close()
    files = [each for each in packed_files() if each.used >= began]
    if not files and not arguments.list:
        raise HybridTeiError(
            f"{arguments.model}: no weights are kept: too small, or no room for them (see the "
            "warning)"
        )
    print(*files, sep="\n")


EMBED_AGAIN = 3


def add_compare(commands: Commands) -> None:
    parser = new_parser(commands, "compare", run_compare, "URL_A URL_B [flags]")
    parser.add_argument("a", metavar="URL_A", help="the server whose vectors are stored")
    parser.add_argument("b", metavar="URL_B", help="the server that will replace it")
    for side in "ab":
        parser.add_argument(
            f"--api-key-{side}", metavar="KEY", help=f"key of server {side.upper()}"
        )
        parser.add_argument(
            f"--model-{side}",
            metavar="NAME",
            help=f"the model to ask server {side.upper()} for, by OpenAI's API",
        )
    parser.add_argument("--json", action="store_true", help="print the report as a line of JSON")
    recorded_help = (
        'JSON lines of {"path": "/embed", "body": {…}}, sent to both servers instead of the sample '
        "texts"
    )
    parser.add_argument("--from", dest="recorded", type=Path, metavar="FILE", help=recorded_help)


def run_compare(arguments: argparse.Namespace) -> int:
    """Compare two servers' vectors, by TEI's or OpenAI's API: the report says whether server B can
    search an index that server A made."""
    from hybridtei.retrieval.evaluate.compare import Endpoint, compare, replay

    a = Endpoint(arguments.a, api_key=arguments.api_key_a, model=arguments.model_a)
    b = Endpoint(arguments.b, api_key=arguments.api_key_b, model=arguments.model_b)
    try:
        if arguments.recorded is None:
            report = compare(a, b)
        else:
            with arguments.recorded.open(encoding="utf-8") as lines:
                report, refused = replay(a, b, tqdm(lines, unit=" requests", disable=None))
            print(f"requests that one of the servers refused: {refused}", file=sys.stderr)
    finally:
        a.close()
        b.close()
    print(report.as_json() if arguments.json else report.in_words(), flush=True)
    return 0 if report.keeps_index else EMBED_AGAIN


SECTION = re.compile(r'<h2 id="[^"]+">(.*?)</h2>\n(.*?)(?=<h2|</main>|</body>|\Z)', re.DOTALL)
PARAGRAPH = re.compile(r"<p>(.*?)</p>", re.DOTALL)
TAG = re.compile(r"<[^>]+>")
WIDTH = 100
PACKAGE = Path(__file__).parents[1]
PAGE = PACKAGE / "server/page/errors.html"
# An error and its message in the code
RAISED = re.compile(r'\b([A-Z]\w+|error)\((?:[^"]|"\\n"){0,60}?((?:f?"[^"]{9,}"\s*)+)')
WORD, VALUE = re.compile(r"[^\W\d]+"), re.compile(r'\{[^}]*\}|\bf?"')


def add_explain(commands: Commands) -> None:
    parser = new_parser(commands, "explain", run_explain)
    parser.add_argument(
        "name",
        metavar="NAME",
        nargs="+",
        help="the error's name, such as LoadError, or its message",
    )


def run_explain(arguments: argparse.Namespace) -> None:
    """Print the cause and the remedy of an error."""
    sections = {
        html.unescape(name).lower(): (name, body)
        for name, body in SECTION.findall(PAGE.read_text(encoding="utf-8"))
    }
    message = " ".join(arguments.name)
    words = message.lower().split()
    names = [*words, _raised_with(message), *get_close_matches(message.lower(), sections, 1, 0.8)]
    # The first error of a status is the most usual one
    names += [name for name in sections for word in words if f"HTTP {word}." in sections[name][1]]
    section = next((sections[name] for name in names if name in sections), None)
    if section is None:
        raise UsageError(
            f"NAME is {message!r}, which is no error; known: "
            f"{', '.join(name for name, _ in sections.values())}"
        )
    name, body = section
    print(name)
    for paragraph in PARAGRAPH.findall(body):
        text = html.unescape(TAG.sub("", paragraph.replace("<code>", "`").replace("</code>", "`")))
        print(f"\n{textwrap.fill(text, WIDTH, break_long_words=False)}", flush=True)


def _raised_with(message: str) -> str:
    """The error whose message in this package's code has most pairs of words of this one, in lower
    case; "" for none."""
    pairs, nearest, best = _pairs(message), "", 0.9
    for file in sorted(PACKAGE.rglob("*.py")):
        for name, text in RAISED.findall(file.read_text(encoding="utf-8")):
            expected = _pairs(VALUE.sub(" ", text))
            share = len(pairs & expected) ** 2 / (len(expected) or 1)
            if share > best:
                nearest, best = name.lower(), share
    return "usageerror" if nearest == "error" else nearest


def _pairs(text: str) -> set[tuple[str, str]]:
    return {*pairwise(WORD.findall(text.lower()))}
