"""`hybridtei serve` and `hybridtei embed`: flags and environment -> settings -> work.

Usage errors end with status 2; what goes wrong at start prints `Error: …` to standard error and ends with status 1.
"""

from __future__ import annotations

import argparse
import ipaddress
import logging
import os
import sys
from collections.abc import Sequence
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
    """Load the model, then listen: until then the port refuses connections."""
    model, engine = _settings(arguments, ModelConfig), _settings(arguments, EngineConfig)
    server = _settings(arguments, ServerConfig)
    from hybridtei import logs

    logs.configure(json_output=server.json_output, level=server.log_level)
    server = msgspec.structs.replace(server, hostname=_address(server.hostname))
    from hybridtei.engine.service import EngineService
    from hybridtei.load import load_model
    from hybridtei.metrics import Registry
    from hybridtei.server.app import create_app
    from hybridtei.server.run import run_server

    log.info("hybridtei %s: loading %s", __version__, model.model_id)
    loaded = load_model(model, engine)
    registry = Registry()
    service = EngineService(loaded.model, loaded.backend, engine, budget_tokens=loaded.budget_tokens, registry=registry)
    for line in loaded.summary():
        log.info("%s", line)
    run_server(create_app(service, server, model, registry=registry), server)


def embed(arguments: argparse.Namespace) -> None:
    """Embed a file of texts."""
    model, engine = _settings(arguments, ModelConfig), _settings(arguments, EngineConfig)
    from hybridtei.embed_file import embed_file
    from hybridtei.encoder import Encoder

    encoder = Encoder.load(config=model, engine=engine)
    outputs = arguments.outputs.split(",") if arguments.outputs else None
    count = embed_file(encoder, arguments.file, arguments.output, outputs, field=arguments.field)
    print(f"{count} texts -> {arguments.output}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hybridtei", description="Dense, sparse and multi-vectors from one forward pass.")
    parser.add_argument("--version", "-V", action="version", version=f"hybridtei {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serving = commands.add_parser("serve", help="serve a model over HTTP", allow_abbrev=False)
    serving.set_defaults(run=serve)
    for kind, title in ((ModelConfig, "model"), (EngineConfig, "engine"), (ServerConfig, "server")):
        add_flags(serving, kind, title)
    embedding = commands.add_parser("embed", help="embed a file of texts", allow_abbrev=False)
    embedding.set_defaults(run=embed)
    embedding.add_argument("file", help="texts: .txt, one a line; or .jsonl, one object or string a line")
    embedding.add_argument("--output", "-o", required=True, help="where to: .jsonl, .npz or .parquet")
    embedding.add_argument("--outputs", help="comma-separated: dense,sparse,multivector [default: all the model has]")
    embedding.add_argument("--field", default="text", help="key of the text in .jsonl objects [default: text]")
    for kind, title in ((ModelConfig, "model"), (EngineConfig, "engine")):
        add_flags(embedding, kind, title)
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
