"""`ask`: what a folder's files say to a question, as passages with their places. What changed in
the folder is stored first."""

from __future__ import annotations

import argparse
import json
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

from hybridtei.cli.collection import search_here
from hybridtei.cli.flags import Commands, add_flags, new_parser, read_engine, read_settings
from hybridtei.config import EngineConfig, ModelConfig, StoreConfig
from hybridtei.errors import UsageError
from hybridtei.retrieval.search.options import SearchOptions
from hybridtei.system.machine import require_extra

PASSAGES = 5
WORD = re.compile(r"\w+")
# By which a passage's beginning and end are found in its file
EDGE_WORDS = 8
# A larger file is not read again for its lines
MAX_BYTES = 20_000_000


def add(commands: Commands) -> None:
    parser = new_parser(commands, "ask", run, 'FOLDER "QUESTION" [flags]')
    parser.add_argument("folder", metavar="FOLDER")
    parser.add_argument("question", metavar="QUESTION")
    parser.add_argument(
        "--collection", metavar="NAME", help="collection of the texts [default: the folder's name]"
    )
    parser.add_argument(
        "--limit", type=int, default=PASSAGES, metavar="N", help="passages [default: 5]"
    )
    parser.add_argument("--json", action="store_true", help="print the passages as a line of JSON")
    add_flags(parser, (StoreConfig, ModelConfig, EngineConfig))


def run(arguments: argparse.Namespace) -> int:
    """Store what changed in a folder, and print the passages that answer a question, with path,
    heading and lines."""
    folder = Path(arguments.folder)
    if not folder.is_dir():
        raise UsageError(f"{folder}: should be a folder")
    model, engine = read_settings(arguments, ModelConfig), read_engine(arguments)
    store = read_settings(arguments, StoreConfig)
    require_extra("qdrant", "qdrant_client", "semantic_text_splitter")
    from hybridtei.retrieval.ingest.ledger import SourceTaken
    from hybridtei.retrieval.ingest.run import ingest

    collection = arguments.collection or folder.resolve().name
    tell = partial(print, file=sys.stderr, flush=True)
    try:
        summary = ingest(
            folder, collection, model, store, engine_config=engine, delete_missing=True
        )
    except SourceTaken as error:
        raise UsageError(
            f"{folder}: the collection {collection!r} has the texts of {error.other}: name a "
            "collection for these with --collection NAME"
        ) from None
    if summary.status:
        tell(summary.in_words())
    options = SearchOptions(limit=arguments.limit, group_by=None)
    result = search_here(
        collection, arguments.question, options, model=model, engine=engine, store=store
    )
    passages = [passage(folder, hit.payload, hit.score) for hit in result.hits]
    if arguments.json:
        print(json.dumps({"passages": passages}, ensure_ascii=False), flush=True)
    else:
        print("\n\n".join(map(in_words, passages)) or "nothing was found", flush=True)
    return int(summary.status)


def passage(folder: Path, payload: dict[str, Any], score: float) -> dict[str, Any]:
    """A hit as path, heading, id of a table's row, first and last line, score and text; what is
    unknown is left out."""
    text = str(payload.get("text") or "")
    # A source begins with the folder's name
    source = str(payload.get("source") or "")
    path = folder / source.partition("/")[2]
    facts: dict[str, Any] = {"path": str(path), "heading": payload.get("title")}
    # A row of a table has an id of its own
    if payload.get("document_id") != source:
        facts["document"] = payload.get("document_id")
    facts.update(place_of(path, text))
    facts.update(page=payload.get("page"), score=round(score, 4), text=text)
    return {name: value for name, value in facts.items() if value is not None}


def place_of(path: Path, text: str) -> dict[str, Any]:
    """The lines of a passage in its file, and the heading of Markdown above it; nothing for files
    that are no plain text."""
    try:
        if path.stat().st_size > MAX_BYTES:
            return {}
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return {}
    # Marks and line ends between the words may differ from the file's
    words = WORD.findall(text)
    begin = re.search(r"\W+".join(words[:EDGE_WORDS]), content)
    if begin is None or not words:
        return {}
    last_words = re.compile(r"\W+".join(words[-EDGE_WORDS:]))
    end = last_words.search(content, begin.start()) or begin
    first = content.count("\n", 0, begin.start()) + 1
    last = content.count("\n", 0, end.end()) + 1
    place: dict[str, Any] = {"lines": [first, last]}
    # A passage may begin with its heading
    above = content[: begin.end()].splitlines()
    headings = [line.lstrip("#").strip() for line in above if line.startswith("#")]
    if headings and path.suffix in (".md", ".markdown"):
        place["heading"] = headings[-1]
    return place


def in_words(facts: dict[str, Any]) -> str:
    """A passage for a reader."""
    where = facts["path"]
    if "lines" in facts:
        where += ":{}-{}".format(*facts["lines"])
    elif "page" in facts:
        where += f", page {facts['page']}"
    if "document" in facts:
        where += f" [{facts['document']}]"
    heading = f"  {facts['heading']}" if "heading" in facts else ""
    return f"{where}{heading}  ({facts['score']})\n{facts['text']}"
