"""`ingest`: documents from files into a Qdrant collection. The same command again goes on where the last one stopped."""

from __future__ import annotations

import argparse
import sys

from hybridtei.cli import settings
from hybridtei.cli.flags import add_flags
from hybridtei.config import EngineConfig, ModelConfig, StoreConfig
from hybridtei.errors import UsageError

ABOUT = "Embed documents from files and store them in Qdrant; run it again to go on after a stop, or to take up changes."


def add(commands: settings.Commands) -> None:
    """`hybridtei ingest`."""
    parser = settings.new_parser(commands, "ingest", ABOUT)
    parser.usage = "%(prog)s SOURCE --collection NAME [flags]"
    parser.add_argument("source", metavar="SOURCE", help="file or folder: txt, md, html, pdf, jsonl, csv, parquet, BEIR")
    parser.add_argument("--collection", required=True, metavar="NAME", help="made if it is not there")
    parser.add_argument("--url", help="embed by this running hybridtei, such as http://localhost:3000, not in this process")
    parser.add_argument("--url-api-key", metavar="TEXT", help="its key")
    parser.add_argument("--outputs", help="comma-separated: dense,sparse,multivector [default: all the model has]")
    parser.add_argument("--text-field", metavar="NAME", help="field of the text in jsonl, csv, parquet [default: text]")
    parser.add_argument("--id-field", metavar="NAME", help="field of the id there [default: _id or id, else the line's number]")
    parser.add_argument("--chunk-tokens", type=int, metavar="N", help="[default: what the model reads, 512 at most]")
    parser.add_argument("--chunk-overlap", type=int, metavar="N", help="tokens a chunk may repeat [default: an eighth of it]")
    parser.add_argument("--no-chunking", action="store_true", help="one chunk a document; the model cuts what is too long")
    parser.add_argument("--source-name", metavar="NAME", help="SOURCE's name in ids and payloads [default: its file name]")
    parser.add_argument("--quarantine", metavar="FILE", help="what could not be taken [default: NAME.quarantine.jsonl]")
    parser.add_argument("--max-record-bytes", type=int, default=1_000_000, metavar="N", help="of a line [default: 1000000]")
    parser.add_argument(
        "--delete-missing", action="store_true", help="delete what SOURCE held at an earlier ingest and no longer holds"
    )
    parser.add_argument("--engine", choices=("local", "ray"), default="local", help="where to embed: here, or in a Ray cluster")
    parser.add_argument("--ray-workers", type=int, metavar="N", help="engines, a processor each [default: all of the cluster]")
    parser.add_argument("--ray-address", metavar="ADDRESS", help="[default: RAY_ADDRESS, else a cluster of its own here]")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.add_argument("--json", action="store_true", help="the summary as a line of JSON")
    add_flags(parser, (StoreConfig, ModelConfig, EngineConfig))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Ingest, and tell what came of it; the exit status."""
    model, engine = settings.read(arguments, ModelConfig), settings.read_engine(arguments)
    store = settings.read(arguments, StoreConfig)
    if arguments.engine != "ray" and (arguments.ray_workers is not None or arguments.ray_address is not None):
        raise UsageError("--ray-workers, --ray-address: only with --engine ray")
    from hybridtei.ingest.run import IngestRequest, run_ingest

    request = IngestRequest(
        source=arguments.source,
        collection=arguments.collection,
        url=arguments.url,
        url_api_key=arguments.url_api_key,
        outputs=tuple(name.strip() for name in arguments.outputs.split(",")) if arguments.outputs else None,
        text_field=arguments.text_field,
        id_field=arguments.id_field,
        chunk_tokens=arguments.chunk_tokens,
        chunk_overlap=arguments.chunk_overlap,
        chunking=not arguments.no_chunking,
        source_name=arguments.source_name,
        quarantine=arguments.quarantine,
        max_record_bytes=arguments.max_record_bytes,
        delete_missing=arguments.delete_missing,
        quiet=arguments.quiet,
        model_named=arguments.model_id is not None,
        on_ray=arguments.engine == "ray",
        ray_workers=arguments.ray_workers,
        ray_address=arguments.ray_address,
    )
    summary = run_ingest(request, model, engine, store, tell=lambda line: print(line, file=sys.stderr, flush=True))
    print(summary.as_json() if arguments.json else summary.in_words(), flush=True)
    return summary.status
