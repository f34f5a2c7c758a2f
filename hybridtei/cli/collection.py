"""Commands on a Qdrant collection: `ingest` fills it with documents from files, and continues a
stopped run; `search` finds the hits of a query, with the scores of every stage; `eval` measures
every way of searching a judged collection; `migrate` changes a collection's model, or its format of
multi-vectors, while it is searched and written."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from contextlib import AbstractAsyncContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import asdict, replace

from hybridtei.cli.flags import (
    Commands,
    add_flags,
    add_options,
    new_parser,
    options_from,
    read_engine,
    read_settings,
)
from hybridtei.config import EngineConfig, ModelConfig, StoreConfig
from hybridtei.errors import InvalidInput, UsageError
from hybridtei.retrieval.ingest.options import IngestOptions, Summary
from hybridtei.retrieval.migrate import MigrateOptions
from hybridtei.retrieval.search.options import SearchFields, SearchOptions, SearchResult
from hybridtei.retrieval.store import DEFAULT_PATH, open_store, place_of
from hybridtei.retrieval.store.query import CollectionPlan
from hybridtei.system.machine import require_extra
from hybridtei.system.own_loop import OwnLoop
from hybridtei.system.terminal import without_passwords

NO_INGEST_FLAGS = (
    "source",
    "outputs",
    "plan",
    "max_file_bytes",
    "max_document_characters",
    "max_metadata_bytes",
    "max_id_characters",
)
# A plan's flags
OF_THE_MODEL = ("multivector_tokens", "multivector_dtype")


def add_ingest(commands: Commands) -> None:
    parser = new_parser(commands, "ingest", run_ingest, "SOURCE --collection NAME [flags]")
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help=(
            "file or folder of texts, pages, PDF, office files, tables, mail, code, BEIR; in the "
            "image, user 10001 must be able to read it"
        ),
    )
    add_options(parser, IngestOptions, without=NO_INGEST_FLAGS)
    add_options(parser, CollectionPlan, without=OF_THE_MODEL)
    parser.add_argument(
        "--outputs", help="comma-separated: dense,sparse,multivector [default: all of the model]"
    )
    parser.add_argument("--json", action="store_true", help="print the summary as a line of JSON")
    parser.add_argument(
        "--watch",
        action="store_true",
        help="ingest again after each change of SOURCE, until Ctrl-C; at once if `watchfiles` "
        "(extra watch) is installed",
    )
    parser.add_argument(
        "--watch-seconds",
        type=float,
        default=10.0,
        metavar="N",
        help="seconds between two looks at SOURCE, without watchfiles [default: 10]",
    )
    add_flags(parser, (StoreConfig, ModelConfig, EngineConfig))


def run_ingest(arguments: argparse.Namespace) -> int:
    """Embed documents from files and store them in Qdrant. Run it again to continue a stopped run
    or to store changes."""
    model, engine = read_settings(arguments, ModelConfig), read_engine(arguments)
    store = read_settings(arguments, StoreConfig)
    if arguments.engine != "ray" and (
        arguments.ray_workers is not None or arguments.ray_address is not None
    ):
        raise UsageError("--ray-workers and --ray-address need --engine ray")
    require_extra("qdrant", "qdrant_client", "semantic_text_splitter")
    from hybridtei.encoder import Encoder
    from hybridtei.retrieval.ingest.files import QUARANTINE
    from hybridtei.retrieval.ingest.run import ingest
    from hybridtei.retrieval.ingest.watch import watch

    outputs = None
    if arguments.outputs:
        outputs = tuple(name.strip() for name in arguments.outputs.split(","))
    plan = options_from(
        CollectionPlan, arguments, **{name: getattr(model, name) for name in OF_THE_MODEL}
    )
    options = options_from(IngestOptions, arguments, outputs=outputs, plan=plan)
    tell = partial(print, file=sys.stderr, flush=True)
    once = partial(ingest, store=store, engine_config=engine, **asdict(options))

    def show(summary: Summary) -> None:
        print(summary.as_json() if arguments.json else summary.in_words(), flush=True)

    def complain(error: str) -> None:
        line = error
        if arguments.json:
            line = json.dumps({"error": error})
        print(line, flush=True)

    if arguments.watch:
        own = [f"{options.collection}{QUARANTINE}", store.qdrant_path or DEFAULT_PATH]
        with ExitStack() as stack:
            embedder: Any = model
            # Loaded once
            if arguments.url is None and arguments.engine == "local":
                embedder = stack.enter_context(Encoder.load(config=model, engine=engine))
            return watch(
                partial(once, embedder=embedder),
                Path(options.source).resolve(),
                [Path(path).resolve() for path in (*own, options.quarantine) if path],
                seconds=arguments.watch_seconds,
                show=show,
                complain=complain,
            )
    summary = once(embedder=model, tell=tell)
    show(summary)
    return summary.status


def add_search(commands: Commands) -> None:
    parser = new_parser(commands, "search", run_search, 'COLLECTION "QUERY" [flags]')
    parser.add_argument("collection", metavar="COLLECTION")
    parser.add_argument("query", metavar="QUERY")
    add_options(
        parser,
        SearchFields,
        without=(
            "weights",
            "legs",
            "rescore",
            "group_by",
            "with_payload",
            "highlights",
            "neighbours",
        ),
    )
    parser.add_argument(
        "--weights",
        help="of zscore, rrf or weighted: 1,0.3 or dense=1,sparse=0.3, or m3, m3-long, m3-two",
    )
    parser.add_argument(
        "--rescore",
        action="store_true",
        help="rank the candidates again by MaxSim of their multi-vectors",
    )
    parser.add_argument(
        "--group-by",
        default="document",
        metavar="FIELD",
        help="one hit for each value of this field [default: document]",
    )
    parser.add_argument("--every-chunk", action="store_true", help="give all chunks of a document")
    parser.add_argument(
        "--rerank",
        metavar="MODEL",
        help="reorder the best hits with this reranker: a folder or hub id",
    )
    parser.add_argument(
        "--filter",
        metavar="JSON",
        help='Qdrant\'s, such as {"must": [{"key": "metadata.year", …}]}',
    )
    parser.add_argument(
        "--fields",
        metavar="NAMES",
        help="keys of the payload to print, comma-separated [default: all]",
    )
    parser.add_argument(
        "--url", metavar="URL", help="server that searches [default: search in this process]"
    )
    parser.add_argument("--url-api-key", metavar="KEY", help="key of --url")
    parser.add_argument("--no-highlights", action="store_true", help="do not mark matching terms")
    parser.add_argument("--json", action="store_true", help="print the answer as a line of JSON")
    add_flags(parser, (StoreConfig, ModelConfig, EngineConfig))


def run_search(arguments: argparse.Namespace) -> int:
    """Search a collection by all its vectors and print one hit per document. A reranker can reorder
    the best hits."""
    model, engine = read_settings(arguments, ModelConfig), read_engine(arguments)
    store = read_settings(arguments, StoreConfig)
    require_extra("qdrant", "qdrant_client")
    from hybridtei.retrieval.search.explain import as_json, in_words

    options = options_of(arguments)
    if arguments.url is None:
        result = search_here(
            arguments.collection,
            arguments.query,
            options,
            model=model,
            engine=engine,
            store=store,
            rerank=arguments.rerank,
        )
    else:
        result = search_by_url(arguments, options)
    if arguments.json:
        print(as_json(result), flush=True)
    else:
        print(in_words(result, options, colours=sys.stdout.isatty()), flush=True)
    return 0


def search_by_url(arguments: argparse.Namespace, options: SearchOptions) -> SearchResult:
    """The result of a search by `--url`. Raises NoAnswer, HybridTeiError."""
    from hybridtei.client import Client

    fields = {name: getattr(options, name) for name in SearchFields.__struct_fields__}
    condition = None if arguments.filter is None else json.loads(arguments.filter)
    with Client(arguments.url, api_key=arguments.url_api_key) as client:
        return client.search(
            arguments.collection,
            arguments.query,
            filter=condition,
            rerank=arguments.rerank or False,
            **fields,
        )


def search_here(
    collection: str,
    query: str,
    options: SearchOptions,
    *,
    model: ModelConfig,
    engine: EngineConfig,
    store: StoreConfig,
    rerank: str | None = None,
) -> SearchResult:
    """The result of a search in this process. Raises HybridTeiError."""
    loop, opened = OwnLoop(), open_store(store)
    # The engine's process opens the collection while this one loads the model
    if opened.kind == "embedded":
        loop.start(opened.count(collection))
    try:
        from hybridtei.encoder import Encoder

        encoder = Encoder.load(config=model, engine=engine, measures=False)
        reranker = None
        if rerank is not None:
            ranking = replace(model, model_id=rerank, revision=None)
            reranker = Encoder.load(config=ranking, engine=engine, measures=False)
        from hybridtei.retrieval.search.searcher import Searcher

        searching = Searcher(opened, encoder).search(
            collection,
            query,
            options,
            ranker=reranker,
        )
        return loop.run(searching)
    finally:
        loop.run(opened.close())
        loop.close()


def options_of(arguments: argparse.Namespace) -> SearchOptions:
    """Make `SearchOptions` of the flags. Raises InvalidInput."""
    from hybridtei.retrieval.store.query import filter_from

    others: dict[str, Any] = {
        "weights": weights_of(arguments.weights),
        "query_filter": filter_from(arguments.filter, "--filter"),
        "highlights": not arguments.no_highlights,
    }
    if arguments.fields is not None:
        others["with_payload"] = [name.strip() for name in arguments.fields.split(",")]
    if arguments.every_chunk:
        others["group_by"] = None
    return options_from(SearchOptions, arguments, **others)


def weights_of(text: str | None) -> dict[str, float] | list[float] | str | None:
    """Parse `1,0.3` to a list, `dense=1,sparse=0.3` to a dict. Any other text is a preset's name.
    Raises InvalidInput."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    try:
        if all("=" in part for part in parts):
            return {
                name.strip(): float(value)
                for name, _, value in (part.partition("=") for part in parts)
            }
        if len(parts) > 1:
            return [float(part) for part in parts]
    except ValueError as error:
        raise InvalidInput(f"--weights {text!r}: {error}") from None
    return text


def add_eval(commands: Commands) -> None:
    parser = new_parser(commands, "eval", run_eval, "BEIR_FOLDER [flags]")
    parser.add_argument(
        "folder",
        metavar="BEIR_FOLDER",
        help="corpus.jsonl, queries.jsonl and qrels/*.tsv or qrels.tsv",
    )
    parser.add_argument(
        "--collection",
        metavar="NAME",
        help="ingested first if it does not exist [default: the folder's name]",
    )
    parser.add_argument(
        "--split",
        default="test",
        metavar="NAME",
        help="judgements to use: qrels/NAME.tsv [default: test]",
    )
    parser.add_argument(
        "--rerank",
        metavar="MODEL",
        help="also measure this reranker: a folder, a hub id or its alias",
    )
    parser.add_argument(
        "--calibrate",
        nargs="?",
        const="zscore",
        metavar="MODE",
        help="fit probabilities of relevance to the scores of a mode, a row of the table, and "
        "store them with the collection [default: zscore]",
    )
    parser.add_argument(
        "--url",
        metavar="URL",
        help="server that has the collection [default: search in this process]",
    )
    parser.add_argument("--url-api-key", metavar="KEY", help="key of --url")
    parser.add_argument("--chart", metavar="FILE", help="draw a chart: .png, .svg or .pdf")
    parser.add_argument("--output", "-o", metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    add_flags(parser, (StoreConfig, ModelConfig, EngineConfig))


def run_eval(arguments: argparse.Namespace) -> int:
    """Measure every way of searching a judged collection: nDCG@10, MRR@10, recall@100 and
    latency."""
    model, engine = read_settings(arguments, ModelConfig), read_engine(arguments)
    store = read_settings(arguments, StoreConfig)
    require_extra("qdrant", "qdrant_client")
    require_extra("eval", "ir_measures")
    from hybridtei.client import AsyncClient
    from hybridtei.inference.load import default_alias
    from hybridtei.retrieval.evaluate.calibrate import keep_curve
    from hybridtei.retrieval.evaluate.measures import read_judgements, ways_of
    from hybridtei.retrieval.evaluate.run import (
        as_json,
        as_table,
        check_chart,
        ingest_missing,
        run_evaluation,
        write_chart,
    )
    from hybridtei.server.start import in_process

    folder, url, rerank = Path(arguments.folder), arguments.url, arguments.rerank
    way = arguments.calibrate
    if way is not None and url is not None:
        raise UsageError(
            "--calibrate writes into the store: name it by --qdrant-url or --qdrant-path, not --url"
        )
    ways = ways_of(rerank)
    if way is not None and way not in ways:
        raise UsageError(f"--calibrate names {way!r}, should be one of: {'; '.join(ways)}")
    if arguments.chart is not None:
        check_chart(Path(arguments.chart))
    models, alias = [model], rerank
    if rerank is not None:
        models.append(replace(model, model_id=rerank, revision=None))
        # The server in this process names its models itself
        if url is None:
            alias = default_alias(rerank)
    collection = arguments.collection or folder.resolve().name
    judged = read_judgements(folder, arguments.split)
    tell = partial(print, file=sys.stderr, flush=True)
    tell(judged.notes)
    if url is None:
        ingest_missing(folder, collection, model, engine, store, tell=tell, quiet=arguments.quiet)

    def connect() -> AbstractAsyncContextManager[AsyncClient]:
        if url is None:
            return in_process(models, engine, store)
        return AsyncClient(url, api_key=arguments.url_api_key)

    tell(f"evaluating {collection} in {without_passwords(url or place_of(store))}")
    evaluation = run_evaluation(
        connect, collection, judged, rerank=alias, calibrate=way, quiet=arguments.quiet
    )
    print(as_json(evaluation) if arguments.json else as_table(evaluation), flush=True)
    if evaluation.calibration is not None:
        asyncio.run(keep_curve(store, collection, evaluation.calibration))
    if arguments.output is not None:
        Path(arguments.output).write_text(as_json(evaluation) + "\n", encoding="utf-8")
    if arguments.chart is not None:
        write_chart(evaluation, Path(arguments.chart))
    return 0


STEPS = {
    "rollback": "switch back to the previous collection, and add what was written since",
    "status": "print which collection answers searches, and its copies",
    "delete_old": "delete the previous collection",
}


def add_migrate(commands: Commands) -> None:
    usage = (
        "COLLECTION (--to MODEL | --multivector-tokens N | --rollback | --status | --delete-old) "
        "[flags]"
    )
    parser = new_parser(commands, "migrate", run_migrate, usage)
    parser.add_argument("collection", metavar="COLLECTION")
    parser.add_argument(
        "--to",
        metavar="MODEL",
        help="folder or hub id of the new model [default: the collection's]",
    )
    steps = parser.add_mutually_exclusive_group()
    for step, text in STEPS.items():
        steps.add_argument(
            f"--{step.replace('_', '-')}",
            dest="step",
            action="store_const",
            const=step,
            default="migrate",
            help=text,
        )
    without = ("collection", "step", "to", "multivector_tokens", "multivector_dtype")
    add_options(parser, MigrateOptions, without=without)
    add_flags(parser, (StoreConfig, ModelConfig, EngineConfig))


def run_migrate(arguments: argparse.Namespace) -> None:
    """Embed a collection's stored texts with another model, then switch its name to the copy;
    repeat it after a stop."""
    require_extra("qdrant", "qdrant_client")
    from hybridtei.retrieval.migrate.run import run_migration

    model, engine = read_settings(arguments, ModelConfig), read_engine(arguments)
    budget = {
        "multivector_tokens": model.multivector_tokens,
        "multivector_dtype": model.multivector_dtype,
    }
    # The budget's flags are also variables, which only `read_settings` reads
    flags = {
        name: value
        for name, value in vars(arguments).items()
        if name not in budget and name != "run"
    }
    options = options_from(MigrateOptions, argparse.Namespace(**flags), **budget)
    run_migration(
        options,
        model,
        engine,
        read_settings(arguments, StoreConfig),
        tell=lambda line: print(line, flush=True),
    )
