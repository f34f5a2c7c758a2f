"""`embed`: a file of texts into a file of vectors."""

from __future__ import annotations

import argparse
import sys

from hybridtei.cli import settings
from hybridtei.cli.flags import add_flags
from hybridtei.config import EngineConfig, ModelConfig


def add(commands: settings.Commands) -> None:
    """`hybridtei embed`."""
    parser = settings.new_parser(commands, "embed", "embed a file of texts")
    parser.usage = "%(prog)s FILE --output FILE [flags]"
    parser.add_argument("file", metavar="FILE", help="texts: .txt, one a line; or .jsonl, one object or string a line")
    parser.add_argument("--output", "-o", required=True, metavar="FILE", help="where to: .jsonl, .npz or .parquet")
    parser.add_argument("--outputs", help="comma-separated: dense,sparse,multivector [default: all the model has]")
    parser.add_argument("--field", default="text", help="key of the text in .jsonl objects [default: text]")
    add_flags(parser, (ModelConfig, EngineConfig))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Embed a file of texts."""
    model, engine = settings.read(arguments, ModelConfig), settings.read_engine(arguments)
    from hybridtei.cli.embed_file import embed_file
    from hybridtei.encoder import Encoder

    encoder = Encoder.load(config=model, engine=engine)
    outputs = arguments.outputs.split(",") if arguments.outputs else None
    count = embed_file(encoder, arguments.file, arguments.output, outputs, field=arguments.field)
    print(f"{count} texts -> {arguments.output}", file=sys.stderr)
