"""`ingest`: documents from files into a Qdrant collection. The same command again goes on where the last one stopped."""

from __future__ import annotations

import argparse
import sys

from hybridtei.cli.flags import Commands, add_flags, add_options, new_parser, options_from, read_engine, read_settings
from hybridtei.config import EngineConfig, ModelConfig, StoreConfig
from hybridtei.errors import UsageError
from hybridtei.ingest.options import IngestOptions

ABOUT = "Embed documents from files and store them in Qdrant; run it again to go on after a stop, or to take up changes."

NO_FLAGS = (
    *("source", "outputs", "model_named"),
    *("max_file_bytes", "max_document_characters", "max_metadata_bytes", "max_id_characters"),
)


def add(commands: Commands) -> None:
    """Add the command `ingest` and its flags."""
    parser = new_parser(commands, "ingest", ABOUT)
    parser.usage = "%(prog)s SOURCE --collection NAME [flags]"
    parser.add_argument("source", metavar="SOURCE", help="file or folder: txt, md, html, pdf, jsonl, csv, parquet, BEIR")
    add_options(parser, IngestOptions, without=NO_FLAGS)
    parser.add_argument("--outputs", help="comma-separated: dense,sparse,multivector [default: all the model has]")
    parser.add_argument("--json", action="store_true", help="the summary as a line of JSON")
    add_flags(parser, (StoreConfig, ModelConfig, EngineConfig))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Ingest, and print the summary; return the exit status."""
    model, engine = read_settings(arguments, ModelConfig), read_engine(arguments)
    store = read_settings(arguments, StoreConfig)
    if arguments.engine != "ray" and (arguments.ray_workers is not None or arguments.ray_address is not None):
        raise UsageError("--ray-workers and --ray-address need --engine ray")
    from hybridtei.ingest.run import run_ingest

    outputs = tuple(name.strip() for name in arguments.outputs.split(",")) if arguments.outputs else None
    options = options_from(IngestOptions, arguments, outputs=outputs, model_named=arguments.model_id is not None)
    summary = run_ingest(options, model, engine, store, tell=lambda line: print(line, file=sys.stderr, flush=True))
    print(summary.as_json() if arguments.json else summary.in_words(), flush=True)
    return summary.status
