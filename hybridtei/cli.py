"""`hybridtei serve`, `embed`, `export` and `tune`: flags and environment -> settings -> work.

Usage errors end with status 2; what goes wrong at start prints `Error: …` to standard error and ends with status 1.
"""

from __future__ import annotations

import argparse
import ipaddress
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from hybridtei import __version__
from hybridtei.config import EngineConfig, ModelConfig, ServerConfig
from hybridtei.errors import HybridTeiError
from hybridtei.flags import UsageError, add_flags, boolean_flags, from_flags

log = logging.getLogger("hybridtei")
S = TypeVar("S", bound=msgspec.Struct)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = _parser()
    arguments = parser.parse_args(_explicit_booleans(sys.argv[1:] if argv is None else argv))
    try:
        return int(arguments.run(arguments) or 0)
    except UsageError as error:
        parser.error(str(error))
    except (HybridTeiError, OSError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def serve(arguments: argparse.Namespace) -> None:
    """Load the model or models, then listen: until then the port refuses connections."""
    model_ids = arguments.model_id or []
    arguments.model_id = model_ids[0] if model_ids else None
    model, engine = _settings(arguments, ModelConfig), _settings(arguments, EngineConfig)
    server = _settings(arguments, ServerConfig)
    from hybridtei import logs
    from hybridtei.server import start

    logs.configure(json_output=server.json_output, level=server.log_level)
    server = msgspec.structs.replace(server, hostname=_address(server.hostname))
    if arguments.models is None and len(model_ids) < 2:
        start.serve_one(model, engine, server)
        return
    if arguments.models is not None and model_ids:
        raise UsageError("--models and --model-id exclude each other: name every model in the file")
    if server.http_workers > 1:
        raise UsageError("--http-workers: several models share one process")
    from hybridtei.model_list import from_ids, read_models

    models = from_ids(model_ids, model) if arguments.models is None else read_models(Path(arguments.models), model)
    start.serve_several(models, engine, server)


def embed(arguments: argparse.Namespace) -> None:
    """Embed a file of texts."""
    model, engine = _settings(arguments, ModelConfig), _settings(arguments, EngineConfig)
    from hybridtei.embed_file import embed_file
    from hybridtei.encoder import Encoder

    encoder = Encoder.load(config=model, engine=engine)
    outputs = arguments.outputs.split(",") if arguments.outputs else None
    count = embed_file(encoder, arguments.file, arguments.output, outputs, field=arguments.field)
    print(f"{count} texts -> {arguments.output}", file=sys.stderr)


def tune(arguments: argparse.Namespace) -> None:
    """Measure this machine."""
    model, engine = _settings(arguments, ModelConfig), _settings(arguments, EngineConfig)
    from hybridtei.tune import tune as measured

    for line in measured(model, engine):
        print(line, flush=True)


def export(arguments: argparse.Namespace) -> None:
    """Write a model as ONNX files that hold their weights."""
    model = msgspec.structs.replace(_settings(arguments, ModelConfig), model_id=arguments.model)
    dtype = model.dtype or "float32"
    if dtype not in ("float32", "int8"):
        raise UsageError(f"--dtype is {dtype}; exported are float32 and int8")
    from hybridtei.backends.int8 import Guard
    from hybridtei.export_model import export_model

    guard = Guard(worst=arguments.min_cosine, mean=max(arguments.min_cosine, arguments.min_mean_cosine))
    print(export_model(model, Path(arguments.out), dtype, guard))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hybridtei", description="Dense, sparse and multi-vectors from one forward pass.")
    parser.add_argument("--version", "-V", action="version", version=f"hybridtei {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serving = commands.add_parser("serve", help="serve a model over HTTP", allow_abbrev=False)
    serving.set_defaults(run=serve)
    serving.add_argument("--models", metavar="FILE", help="TOML file of [[model]] tables: several models in one process")
    add_flags(serving, ModelConfig, "model (--model-id may be repeated)", repeatable=("model_id",))
    add_flags(serving, EngineConfig, "engine")
    add_flags(serving, ServerConfig, "server")
    embedding = commands.add_parser("embed", help="embed a file of texts", allow_abbrev=False)
    embedding.set_defaults(run=embed)
    embedding.add_argument("file", help="texts: .txt, one a line; or .jsonl, one object or string a line")
    embedding.add_argument("--output", "-o", required=True, help="where to: .jsonl, .npz or .parquet")
    embedding.add_argument("--outputs", help="comma-separated: dense,sparse,multivector [default: all the model has]")
    embedding.add_argument("--field", default="text", help="key of the text in .jsonl objects [default: text]")
    for kind, title in ((ModelConfig, "model"), (EngineConfig, "engine")):
        add_flags(embedding, kind, title)
    exporting = commands.add_parser("export", help="write a model as ONNX files, for others too", allow_abbrev=False)
    exporting.set_defaults(run=export)
    exporting.add_argument("model", help="a local folder, a hub id, or the embedded model")
    exporting.add_argument("out", help="folder to write")
    exporting.add_argument("--min-cosine", type=float, default=0.97, help="int8: least cosine to float32 [default: 0.97]")
    exporting.add_argument("--min-mean-cosine", type=float, default=0.99, help="int8: on average [default: 0.99]")
    add_flags(exporting, ModelConfig, "model")
    tuning = commands.add_parser("tune", help="measure which backend and batch size suit this machine", allow_abbrev=False)
    tuning.set_defaults(run=tune)
    for kind, title in ((ModelConfig, "model"), (EngineConfig, "engine")):
        add_flags(tuning, kind, title)
    return parser


def _explicit_booleans(argv: Sequence[str]) -> list[str]:
    """`--flag` -> `--flag=true` where no true or false follows, or a bare flag would swallow the next word."""
    flags = boolean_flags(ModelConfig, EngineConfig, ServerConfig)
    following = [*argv[1:], ""]
    return [
        f"{word}=true" if word in flags and after not in ("true", "false") else word
        for word, after in zip(argv, following, strict=False)
    ]


def _settings(arguments: argparse.Namespace, kind: type[S]) -> S:
    return from_flags(kind, vars(arguments), os.environ)


def _address(hostname: str) -> str:
    """TEI's rule: containers export HOSTNAME, so what is no address falls back to all interfaces."""
    try:
        return str(ipaddress.ip_address(hostname))
    except ValueError:
        log.warning("hostname %r is not an IP address; listening on 0.0.0.0", hostname)
        return "0.0.0.0"
