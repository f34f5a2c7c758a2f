"""Late chunks against plain ones: nDCG@10 of both on long documents, by each representation of the embedded model.

    python conformance/quality/late_chunks.py --xquad ../shared/data/xquad --pages FOLDER

Two collections are made. Articles: five successive paragraphs of XQuAD each, which are of one article; its questions ask for a
paragraph, whose rank is that of the best chunk that lies in it for the most part. Pages: manual pages in `*.gz` below FOLDER,
such as those of Debian's git-man, manpages, manpages-dev and perl-doc (`apt-get download`, `dpkg-deb -x`); a page's own
description, its line in NAME, asks for the page, from whose text NAME is left out.

Chunks are those of `hybridtei ingest` without overlap, the same for both ways; late ones come from the windows of
`--chunking late`. Sparse scores have the chunks' idf on the query. Each line has the lead of late chunks over plain ones with
the 95 % interval of a paired bootstrap over queries; the last lines of pages are plain chunks as long as the model reads.
"""

import argparse
import gzip
import json
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as RawTokenizer

sys.path.insert(0, str(Path(__file__).parent))
from retrieval import Scores, gains, idf, max_sim

from hybridtei.config import EngineConfig, ModelConfig
from hybridtei.encoder import Encoder
from hybridtei.inference.load import find_model, text_model
from hybridtei.outputs import Embeddings
from hybridtei.retrieval.evaluate.measures import Floats64, paired_bootstrap
from hybridtei.retrieval.ingest.chunking import Chunk, Chunker, Document, settings_for
from hybridtei.retrieval.ingest.pipeline import span_texts_of
from hybridtei.retrieval.ingest.prepare import PendingChunk, PendingDocument

OUTPUTS = ("dense", "sparse", "multivector")
PARAGRAPHS = 5  # of an article
MIN_WORDS, MAX_WORDS, PAGES = 300, 1200, 200


@dataclass(frozen=True)
class Collection:
    """`parts`: edges within its document of what queries ask for; `wanted[q]`: the place of the relevant document."""

    documents: list[str]
    parts: list[tuple[int, int, int]]
    queries: list[str]
    wanted: list[int]


def articles(folder: Path) -> Collection:
    """XQuAD's paragraphs in articles."""
    corpus, queries = (
        [json.loads(line) for line in (folder / f"{name}.jsonl").open()]
        for name in ("corpus", "queries")
    )
    documents: list[str] = []
    parts: list[tuple[int, int, int]] = []
    for first in range(0, len(corpus), PARAGRAPHS):
        text = ""
        for record in corpus[first : first + PARAGRAPHS]:
            begin = len(text)
            text += record["text"] + "\n\n"
            parts.append((len(documents), begin, len(text)))
        documents.append(text.strip())
    rows = [line.split("\t") for line in (folder / "qrels.tsv").read_text().splitlines()[1:]]
    place, wanted = (
        {record["id"]: i for i, record in enumerate(corpus)},
        {query: name for query, name, _ in rows},
    )
    return Collection(
        documents,
        parts,
        [one["text"] for one in queries],
        [place[wanted[one["id"]]] for one in queries],
    )


def pages(folder: Path) -> Collection:
    """Manual pages without their descriptions, one of each description, at most `PAGES` drawn by seed 0."""
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*.gz")):
        text = (
            plain_text(gzip.decompress(path.read_bytes()).decode("utf-8", "replace"))
            if path.is_file()
            else ""
        )
        named = re.search(r"^NAME\n+[^\n]*? - ([^\n]{20,})\n", text, re.MULTILINE)
        body = "" if named is None else text[named.end() :].strip()
        if (
            named is not None
            and MIN_WORDS <= len(body.split()) <= MAX_WORDS
            and named[1] not in found
        ):
            found[named[1]] = body
    drawn = random.Random(0).sample(sorted(found), min(PAGES, len(found)))
    documents = [found[name] for name in drawn]
    return Collection(
        documents,
        [(i, 0, len(text)) for i, text in enumerate(documents)],
        drawn,
        list(range(len(drawn))),
    )


def plain_text(roff: str) -> str:
    """A manual page's words, by the requests that such pages are made of; not what groff would set."""
    lines = []
    for line in roff.splitlines():
        request, _, rest = line.partition(" ")
        if line.startswith(
            ('.\\"', "'\\\"", ".TH", ".de", ".ds", ".if", ".ie", ".el", ".nr", ".tr", ".IX", ".so")
        ):
            continue
        if request in (".SH", ".SS"):
            lines.append("\n\n" + rest.strip('" ') + "\n\n")
        elif request in (".PP", ".P", ".LP", ".TP", ".IP", ".Sp", ".sp"):
            lines.append("\n\n" + (rest.split('"')[1] if '"' in rest else ""))
        elif not line.startswith((".", "'")):
            lines.append(line)
        elif request in (".B", ".I", ".BR", ".IR", ".RB", ".RI", ".BI", ".IB", ".SM"):
            words = [quoted or word for quoted, word in re.findall(r'"([^"]*)"|(\S+)', rest)]
            lines.append(("" if len(request) > 2 and request != ".SM" else " ").join(words))
    text = "\n".join(lines).replace("\\-", "-").replace("\\&", "").replace("\\e", "\\")
    text = re.sub(r"\\f(\(..|\[.*?\]|.)|\\s[-+]?\d+|\\[|/,^%cd]", "", text)
    text = re.sub(
        r"\\\*\((--|[LR]\"|C[+`'])|\\\*\(..|\\\((..)",
        lambda match: {"em": "-", "aq": "'"}.get(match[2] or "", " "),
        text,
    )
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"(?<=\S)\n(?=\S)", " ", text))


def chunked(chunker: Chunker, documents: Sequence[str]) -> list[PendingChunk]:
    """The chunks of all documents, as an ingest has them."""
    owners = [
        PendingDocument(Document("made", str(i), text), "", "", None)
        for i, text in enumerate(documents)
    ]
    lists = chunker.chunks_of([owner.document.indexed_text for owner in owners])
    return [
        PendingChunk(owner, chunk)
        for owner, chunks in zip(owners, lists, strict=True)
        for chunk in chunks
    ]


def embedded(encoder: Encoder, pieces: list[PendingChunk], *, late: bool) -> Embeddings:
    """A row a chunk."""
    if not late:
        return encoder.encode(
            [piece.chunk.text for piece in pieces], OUTPUTS, input_type="document"
        )
    parts = span_texts_of(pieces)
    return encoder.encode(
        [part.text for part in parts],
        OUTPUTS,
        input_type="document",
        spans=[part.spans for part in parts],
    )


def scores(queries: Embeddings, chunks: Embeddings) -> dict[str, Scores]:
    """float32[queries, chunks] of each representation."""
    assert queries.dense is not None
    asked, held = queries.sparse.to_scipy(), chunks.sparse.to_scipy()
    weighted = asked.multiply(idf(held)[None]).tocsr()
    return {
        "dense": queries.dense @ chunks.dense.T,
        "sparse, idf": (weighted @ held.T).toarray(),
        "MaxSim": max_sim([*queries.multivector], [*chunks.multivector]),
    }


def part_of_each(
    pieces: Sequence[PendingChunk], parts: Sequence[tuple[int, int, int]]
) -> list[int]:
    """The part that each chunk lies in for the most part."""

    def shared(chunk: Chunk, document: int, part: tuple[int, int, int]) -> int:
        return (
            min(chunk.end, part[2]) - max(chunk.start, part[1])
            if part[0] == document
            else -sys.maxsize
        )

    by_document: dict[int, list[int]] = {}
    for place, (document, _, _) in enumerate(parts):
        by_document.setdefault(document, []).append(place)
    found = []
    for piece in pieces:
        document = int(piece.pending.document.document_id)
        found.append(
            max(
                by_document[document], key=lambda place: shared(piece.chunk, document, parts[place])
            )
        )
    return found


def ndcg_each(found: Scores, part: Sequence[int], collection: Collection) -> Floats64:
    """nDCG@10 of each query over parts, each by its best chunk."""
    best = np.full((len(found), len(collection.parts)), -np.inf, np.float32)
    for column, place in enumerate(part):
        np.maximum(best[:, place], found[:, column], out=best[:, place])
    return gains(
        np.argsort(-best, axis=1, kind="stable"), [{place: 1} for place in collection.wanted]
    )


def measure(name: str, collection: Collection, tokens: Sequence[int]) -> None:
    """Prints a collection's lines."""
    config = ModelConfig()
    spec = find_model(config)
    model = text_model(spec, EngineConfig())
    encoder = Encoder.load(config=config)
    queries = encoder.encode(collection.queries, OUTPUTS, input_type="query")
    words = [len(text.split()) for text in collection.documents]
    print(
        f"\n{name}: {len(words)} documents of {np.median(words):.0f} words (median), {len(collection.queries)} queries; nDCG@10"
    )

    def found(size: int, *, late: bool) -> dict[str, Floats64]:
        settings = settings_for(model, size, 0, late=late)
        chunker = Chunker(
            model, RawTokenizer.from_file(str(spec.folder / "tokenizer.json")), settings
        )
        pieces = chunked(chunker, collection.documents)
        chunker.close()
        part = part_of_each(pieces, collection.parts)
        by_kind = scores(queries, embedded(encoder, pieces, late=late))
        return {kind: ndcg_each(rows, part, collection) for kind, rows in by_kind.items()}

    for size in tokens:
        plain, late = found(size, late=False), found(size, late=True)
        for kind, values in late.items():
            lead, low, high = paired_bootstrap(values - plain[kind])
            print(
                f"  {size:>3} tokens  {kind:12} plain {plain[kind].mean():.4f}  late {values.mean():.4f}"
                f"  lead {lead:+.4f} [{low:+.4f}, {high:+.4f}]",
                flush=True,
            )
    longest = model.reader.max_input_length
    if len(collection.parts) == len(
        collection.documents
    ):  # a chunk of two paragraphs would count for one
        for kind, values in found(longest, late=False).items():
            print(f"  {longest:>3} tokens  {kind:12} plain {values.mean():.4f}", flush=True)
    encoder.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--xquad", type=Path, help="folder of XQuAD as a passage collection")
    parser.add_argument("--pages", type=Path, help="folder with manual pages below it")
    parser.add_argument("--chunk-tokens", default="65,129", help="sizes of chunks")
    options = parser.parse_args()
    tokens = [int(size) for size in options.chunk_tokens.split(",")]
    if options.xquad is not None:
        measure("articles", articles(options.xquad), tokens)
    if options.pages is not None:
        measure("pages", pages(options.pages), tokens)


if __name__ == "__main__":
    main()
