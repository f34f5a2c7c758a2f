"""A judged collection on disk, in BEIR's layout or the plainer one: queries, and how relevant which document is to them.

    corpus.jsonl                 {"_id" or "id", "title", "text"} a line; `ingest` reads it
    queries.jsonl                {"_id" or "id", "text"} a line
    qrels/test.tsv or qrels.tsv  query, document, grade; with a header or without

The surprise: files of queries hold those of all splits; only queries that are judged count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson

from hybridtei.errors import InvalidInput

CORPUS, QUERIES, FLAT, FOLDER = "corpus.jsonl", "queries.jsonl", "qrels.tsv", "qrels"


@dataclass(frozen=True, slots=True)
class Judged:
    """`queries`: id -> text, of those that are judged. `relevance`: query's id -> document's id -> grade, 0 and up."""

    queries: Mapping[str, str]
    relevance: Mapping[str, Mapping[str, int]]


def read_judged(folder: Path, split: str = "test") -> Judged:
    """Read queries and judgements. Raises InvalidInput, naming the file and the line."""
    relevance: dict[str, dict[str, int]] = {}
    for query, document, grade in _judgements(judgements_file(folder, split)):
        relevance.setdefault(query, {})[document] = grade
    relevant = {query: grades for query, grades in relevance.items() if any(grade > 0 for grade in grades.values())}
    texts = dict(_queries(folder / QUERIES))
    queries = {query: texts[query] for query in relevant if query in texts}
    if not queries:
        raise InvalidInput(f"{folder}: none of the {len(texts)} queries has a relevant document in {split!r}")
    return Judged(queries, {query: relevant[query] for query in queries})


def judgements_file(folder: Path, split: str) -> Path:
    """`qrels/SPLIT.tsv`, or else `qrels.tsv`. Raises InvalidInput, telling which splits there are."""
    wanted = folder / FOLDER / f"{split}.tsv"
    if wanted.is_file():
        return wanted
    if (folder / FLAT).is_file():
        return folder / FLAT
    splits = sorted(path.stem for path in (folder / FOLDER).glob("*.tsv"))
    there = f"it has the splits {', '.join(splits)}" if splits else f"it has neither {FOLDER}/{split}.tsv nor {FLAT}"
    raise InvalidInput(f"{folder}: no judgements for {split!r}: {there}")


def _judgements(path: Path) -> Iterator[tuple[str, str, int]]:
    for number, line in enumerate(_lines(path), 1):
        fields = line.split("\t")
        if len(fields) == 4:  # TREC's, whose second column means nothing
            fields = [fields[0], *fields[2:]]
        try:
            query, document, grade = fields
            yield query, document, int(float(grade))
        except ValueError:
            if number > 1:  # the first may be a header
                raise InvalidInput(f"{path}, line {number}: should be query, document and grade, with tabs between") from None


def _queries(path: Path) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(_lines(path), 1):
        try:
            record = orjson.loads(line)
            identity = record["_id"] if "_id" in record else record["id"]
            yield str(identity), str(record["text"])
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidInput(f"{path}, line {number}: should be an object with `_id` or `id`, and `text`") from error


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as opened:
            for line in opened:
                if line.strip():
                    yield line.rstrip("\r\n")
    except FileNotFoundError:
        raise InvalidInput(f"{path}: there is no such file") from None
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path}: is not UTF-8: {error}") from None
