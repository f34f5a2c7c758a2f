"""`eval` measures every way of searching a judged collection; `tune`, backends and batch sizes on this machine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hybridtei.cli.flags import Commands, add_flags, new_parser, read_engine, read_settings
from hybridtei.cli.search import needs_client
from hybridtei.config import EngineConfig, ModelConfig, StoreConfig

ABOUT = "Measure every way of searching a judged collection: nDCG@10, MRR@10, recall@100 and latency."


def add_eval(commands: Commands) -> None:
    """Add the command `eval` and its flags."""
    parser = new_parser(commands, "eval", ABOUT)
    parser.usage = "%(prog)s BEIR_FOLDER [flags]"
    parser.add_argument("folder", metavar="BEIR_FOLDER", help="corpus.jsonl, queries.jsonl and qrels/*.tsv or qrels.tsv")
    parser.add_argument("--collection", metavar="NAME", help="ingested first if it is not there [default: the folder's name]")
    parser.add_argument("--split", default="test", metavar="NAME", help="of the judgements: qrels/NAME.tsv [default: test]")
    parser.add_argument("--rerank", metavar="MODEL", help="also rank by this reranker: a folder or hub id")
    parser.add_argument("--chart", metavar="FILE", help="draw it: .png, .svg or .pdf")
    parser.add_argument("--output", "-o", metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    add_flags(parser, (StoreConfig, ModelConfig, EngineConfig))
    parser.set_defaults(run=run_eval)


def run_eval(arguments: argparse.Namespace) -> int:
    """Ingest if the collection is missing, measure, and print the report; return the exit status."""
    model, engine = read_settings(arguments, ModelConfig), read_engine(arguments)
    store = read_settings(arguments, StoreConfig)
    needs_client()
    from hybridtei.evaluate.run import EvaluateOptions, as_json, as_table, check_chart, run_evaluation, write_chart

    folder = Path(arguments.folder)
    if arguments.chart is not None:
        check_chart(Path(arguments.chart))
    request = EvaluateOptions(
        folder, arguments.collection or folder.resolve().name, arguments.split, arguments.rerank, quiet=arguments.quiet
    )
    evaluation = run_evaluation(request, model, engine, store, tell=lambda line: print(line, file=sys.stderr, flush=True))
    print(as_json(evaluation) if arguments.json else as_table(evaluation), flush=True)
    if arguments.output is not None:
        Path(arguments.output).write_text(as_json(evaluation) + "\n", encoding="utf-8")
    if arguments.chart is not None:
        write_chart(evaluation, Path(arguments.chart))
    return 0


def add_tune(commands: Commands) -> None:
    """Add the command `tune` and its flags."""
    parser = new_parser(commands, "tune", "measure which backend and batch size suit this machine")
    parser.usage = "%(prog)s [flags]"
    add_flags(parser, (ModelConfig, EngineConfig))
    parser.set_defaults(run=run_tune)


def run_tune(arguments: argparse.Namespace) -> None:
    """Measure, and print each line as it comes."""
    model, engine = read_settings(arguments, ModelConfig), read_engine(arguments)
    from hybridtei.backends.select import tune as measured
    from hybridtei.load import find_model

    for line in measured(model, find_model(model), engine):
        print(line, flush=True)
