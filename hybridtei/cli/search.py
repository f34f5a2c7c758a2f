"""`search`: a query against a collection that `ingest` filled, with the scores of every stage."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec

from hybridtei.cli.flags import Commands, add_flags, add_options, new_parser, options_from, read_engine, read_settings
from hybridtei.config import EngineConfig, ModelConfig, StoreConfig
from hybridtei.errors import InvalidInput, LoadError
from hybridtei.search.options import SearchFields, SearchOptions

ABOUT = "Search a collection: dense and sparse candidates, fused, ranked again by multi-vectors or by a reranker."


def add(commands: Commands) -> None:
    """Add the command `search` and its flags."""
    parser = new_parser(commands, "search", ABOUT)
    parser.usage = '%(prog)s COLLECTION "QUERY" [flags]'
    parser.add_argument("collection", metavar="COLLECTION")
    parser.add_argument("query", metavar="QUERY")
    add_options(parser, SearchFields, without=("weights", "legs", "with_payload", "highlights"))
    parser.add_argument("--weights", help="of rrf or weighted: 1,0.3 or dense=1,sparse=0.3, or m3, m3-long, m3-two")
    parser.add_argument("--rerank", metavar="MODEL", help="rank the best by this reranker: a folder or hub id")
    parser.add_argument("--filter", metavar="JSON", help='Qdrant\'s, such as {"must": [{"key": "metadata.year", …}]}')
    parser.add_argument("--fields", metavar="NAMES", help="comma-separated: of the payload [default: all]")
    parser.add_argument("--no-highlights", action="store_true", help="do not mark matching terms")
    parser.add_argument("--json", action="store_true", help="the answer as a line of JSON")
    add_flags(parser, (StoreConfig, ModelConfig, EngineConfig))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Search, print the hits, and return the exit status."""
    model, engine = read_settings(arguments, ModelConfig), read_engine(arguments)
    store = read_settings(arguments, StoreConfig)
    needs_client()
    import msgspec

    from hybridtei.encoder import Encoder
    from hybridtei.search.explain import as_json, in_words
    from hybridtei.search.local import LocalSearch

    options = options_of(arguments)
    reranker = None
    if arguments.rerank is not None:
        reranker = Encoder.load(config=msgspec.structs.replace(model, model_id=arguments.rerank, revision=None), engine=engine)
    encoder = Encoder.load(config=model, engine=engine)
    with LocalSearch(encoder, model.model_id, store, reranker=reranker) as search:
        result = search(arguments.collection, arguments.query, options)
    print(as_json(result) if arguments.json else in_words(result, options, colours=sys.stdout.isatty()), flush=True)
    return 0


def needs_client() -> None:
    """Raise LoadError where the extra is not installed."""
    if find_spec("qdrant_client") is None:
        raise LoadError("the package `qdrant_client` is missing: pip install 'hybridtei[qdrant]'")


def options_of(arguments: argparse.Namespace) -> SearchOptions:
    """Make `SearchOptions` of the flags. Raises InvalidInput."""
    from hybridtei.search.query import filter_from

    return options_from(
        SearchOptions,
        arguments,
        weights=weights_of(arguments.weights),
        query_filter=filter_from(arguments.filter, "--filter"),
        with_payload=True if arguments.fields is None else [name.strip() for name in arguments.fields.split(",")],
        highlights=not arguments.no_highlights,
    )


def weights_of(text: str | None) -> dict[str, float] | list[float] | str | None:
    """Parse `1,0.3` to a list, `dense=1,sparse=0.3` to a dict; other text names a preset. Raises InvalidInput."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    try:
        if all("=" in part for part in parts):
            return {name.strip(): float(value) for name, _, value in (part.partition("=") for part in parts)}
        if len(parts) > 1:
            return [float(part) for part in parts]
    except ValueError as error:
        raise InvalidInput(f"--weights {text!r}: {error}") from None
    return text
