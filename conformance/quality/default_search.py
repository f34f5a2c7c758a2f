"""What `hybridtei search` finds without flags on judged collections, beside dense, sparse, BM25 and
reciprocal ranks.

    python conformance/quality/default_search.py --data ../shared/data --collections cranfield,xquad

Each collection is ingested as `hybridtei ingest` does without flags (in chunks), into the embedded
engine in a temporary folder, or into `--qdrant-url`. nDCG@10 is of documents, each where its best
chunk stands; its gains are linear. Each other way's line has the default's lead over it, with the
95 % interval of a paired bootstrap over the queries. BM25 is Lucene's, k1 1.5, b 0.75, over whole
documents, without English stop words. `--dense-and-sparse` ingests no multi-vectors.
`--query-encoder table` is about searches whose sparse vector is looked up: they have to be above
the same, and to reach 97 % of the default. `--json`: a file of the figures, of which
`python -m notebooks.writing` draws the picture of quality.md. Exits 1 if the default is below one of them, has a
document twice, or fewer documents than asked for.
"""

import argparse
import asyncio
import json
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

from hybridtei.config import ModelConfig, StoreConfig
from hybridtei.encoder import Encoder
from hybridtei.retrieval.evaluate.measures import (
    Floats64,
    Judgements,
    Run,
    measures_of,
    paired_bootstrap,
    read_judgements,
    scores_by_rank,
)
from hybridtei.retrieval.ingest.run import ingest
from hybridtei.retrieval.search.options import SearchOptions
from hybridtei.retrieval.search.searcher import Searcher
from hybridtei.retrieval.store import open_store

LIMIT, DEPTH = 10, 100
ENGLISH = """a an and are as at be but by for if in into is it no not of on or such that the their then there these they this to
was will with"""  # Lucene's stop words
STOP_WORDS = frozenset(ENGLISH.split())
WAYS = {
    "dense": SearchOptions(mode="dense"),
    "sparse": SearchOptions(mode="sparse"),
    "rrf k=2": SearchOptions(mode="rrf", rrf_k=2),
    "rrf k=61": SearchOptions(mode="rrf", rrf_k=61),
}


def words(text: str) -> list[str]:
    return [word for word in re.findall(r"\w+", text.lower()) if word not in STOP_WORDS]


def bm25(folder: Path, judged: Judgements, k1: float = 1.5, b: float = 0.75) -> Run:
    """The best `DEPTH` documents of each query."""
    lines = (folder / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    names = [str(record.get("id", record.get("_id"))) for record in records]
    counts = [
        Counter(words(f"{record.get('title') or ''}\n{record['text']}")) for record in records
    ]
    frequency = Counter(word for count in counts for word in count)
    lengths = np.array([sum(count.values()) for count in counts], np.float64)
    norm = k1 * (1 - b + b * lengths / lengths.mean())
    run = {}
    for query, text in judged.queries.items():
        scores = np.zeros(len(records))
        for word in words(text):
            idf = np.log(1 + (len(records) - frequency[word] + 0.5) / (frequency[word] + 0.5))
            times = np.array([count[word] for count in counts], np.float64)
            scores += idf * times / (times + norm)
        best = np.argsort(-scores, kind="stable")[:DEPTH]
        run[query] = scores_by_rank([names[place] for place in best if scores[place]])
    return run


async def searched(searcher: Searcher, judged: Judgements, options: SearchOptions) -> Run:
    """One search a query, of `LIMIT` documents. Exits where a document comes twice, or too few
    come."""
    run = {}
    there = await searcher.store.count("judged")
    for query, text in judged.queries.items():
        hits = (await searcher.search("judged", text, options)).hits
        documents = [str(hit.payload["document_id"]) for hit in hits]
        # Sparse vectors alone find only documents that share a term with the query
        wanted = 0 if options.mode == "sparse" else min(LIMIT, there)
        if len(set(documents)) != len(documents) or len(documents) < wanted:
            sys.exit(
                f"query {query}: {len(documents)} hits, {len(set(documents))} documents, asked for "
                f"{LIMIT}"
            )
        run[query] = scores_by_rank(documents)
    return run


def measured(
    folder: Path, store: StoreConfig, outputs: tuple[str, ...], scratch: Path, by_table: bool
) -> dict[str, Floats64]:
    """nDCG@10 of each query by each way; the default is the first."""
    judged = read_judgements(folder)
    rejected = str(scratch / "rejected.jsonl")
    options = {"quiet": True, "outputs": outputs, "quarantine": rejected}
    summary = ingest(folder, "judged", store=store, **options)
    print(summary.in_words(), file=sys.stderr)
    encoder = Encoder.load()

    async def runs() -> dict[str, Run]:
        opened = open_store(store)
        searcher = Searcher(opened, encoder.named(ModelConfig().model_id))
        grouped = {"group_by": "document", "limit": LIMIT, "with_payload": ["document_id"]}
        try:
            found = {"hybridtei search": await searched(searcher, judged, SearchOptions(**grouped))}
            if by_table:
                found["by table"] = await searched(
                    searcher, judged, SearchOptions(query_encoder="table", **grouped)
                )
            for name, way in WAYS.items():
                found[name] = await searched(
                    searcher, judged, SearchOptions(mode=way.mode, k=way.k, **grouped)
                )
            return found
        finally:
            await opened.drop("judged")
            await opened.close()

    found = asyncio.run(runs()) | {"BM25": bm25(folder, judged)}
    encoder.close()
    return {name: measures_of(run, judged)["nDCG@10"] for name, run in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with one folder a collection"
    )
    parser.add_argument("--collections", default="cranfield,xquad")
    parser.add_argument("--qdrant-url", help="a Qdrant server [default: the embedded engine]")
    parser.add_argument("--dense-and-sparse", action="store_true", help="without multi-vectors")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--query-encoder", choices=("model", "table"), default="model")
    options = parser.parse_args()
    outputs = (
        ("dense", "sparse") if options.dense_and_sparse else ("dense", "sparse", "multivector")
    )
    below = []
    rows: list[list[object]] = []
    for name in options.collections.split(","):
        with tempfile.TemporaryDirectory() as folder:
            place = (
                {"qdrant_url": options.qdrant_url}
                if options.qdrant_url
                else {"qdrant_path": f"{folder}/qdrant"}
            )
            found = measured(
                options.data / name,
                StoreConfig(**place),
                outputs,
                Path(folder),
                options.query_encoder == "table",
            )
        default = found.pop("hybridtei search")
        print(
            f"\n{name}, {len(default)} queries, nDCG@10\n  {'hybridtei search':18} "
            f"{default.mean():.4f}"
        )
        if "by table" in found:
            share = found["by table"].mean() / default.mean()
            default = found.pop("by table")
            print(f"  {'by table':18} {default.mean():.4f}   {share:.1%} of it")
            below += [f"{name}: the table"] * bool(share < 0.97)
        rows.append([name, "default", round(float(default.mean()), 4), 0.0, 0.0, 0.0])
        for way, values in found.items():
            lead, low, high = paired_bootstrap(default - values)
            figures = (float(values.mean()), lead, low, high)
            rows.append([name, way, *(round(figure, 4) for figure in figures)])
            print(f"  {way:18} {values.mean():.4f}   lead {lead:+.4f} [{low:+.4f}, {high:+.4f}]")
            below += [f"{name}: {way}"] * bool(lead <= 0)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print("\nbelow:", *below) if below else print(
        "\nabove all of them everywhere; no document twice; as many as asked for"
    )
    return 1 if below else 0


if __name__ == "__main__":
    sys.exit(main())
