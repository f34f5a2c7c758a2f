"""What windows and a budget of time do to the order of `/v1/rerank`, with the embedded model's
MaxSim.

    python -m conformance.quality.reranking --data ../shared/data [--queries 60] [--only windows]

Windows: paragraphs of XQuAD are joined to documents of about 3,000 words, in whose middle a judged
paragraph stands; each query ranks the document of its paragraph and nine others. nDCG@10 of the cut
documents, which the model reads to its longest input, and of the best of their windows, with the 95
% interval of the difference over queries.

Budget: each query of Cranfield ranks the 100 best documents by dense vectors, in that order, within
`budget_ms`. Printed are nDCG@10, the share of documents that were scored, and the median and 95th
percentile of an answer's milliseconds; other programs make fewer documents fit.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
import numpy as np

from conformance.processes import free_port, served, started
from hybridtei.encoder import Encoder
from hybridtei.retrieval.evaluate.measures import (
    Judgements,
    measures_of,
    paired_bootstrap,
    read_judgements,
    scores_by_rank,
)

WORDS, DOCUMENTS, CANDIDATES = 3_000, 10, 100
WINDOWS = 32
BUDGETS_MS = (25, 50, 100, 200, 400, 800, None)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of xquad and cranfield")
    parser.add_argument("--queries", type=int, default=60, help="of each collection")
    parser.add_argument("--only", choices=("windows", "budgets"), help="[default: both]")
    options = parser.parse_args()
    port = free_port()
    with (
        tempfile.TemporaryDirectory() as folder,
        started(served(port), port, Path(folder) / "log"),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600, trust_env=False) as client,
    ):
        if options.only != "budgets":
            windows(client, options.data / "xquad", options.queries)
        if options.only != "windows":
            budgets(client, options.data / "cranfield", options.queries)
    return 0


def texts_of(folder: Path) -> dict[str, str]:
    """The collection's texts by their ids."""
    lines = (folder / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    return {record["id"]: record["text"] or "-" for record in map(json.loads, lines)}


def sampled(judged: Judgements, count: int) -> Judgements:
    names = random.Random(0).sample([*judged.queries], count)
    return Judgements(
        {name: judged.queries[name] for name in names},
        {name: judged.relevance[name] for name in names},
    )


def joined(name: str, texts: Mapping[str, str], draw: random.Random) -> str:
    """A document of `WORDS` words with this paragraph in the middle, between others."""
    others = [other for other in texts if other != name]
    sides = []
    for _ in range(2):
        side: list[str] = []
        while sum(len(text.split()) for text in side) < WORDS // 2:
            side.append(texts[draw.choice(others)])
        sides.append("\n".join(side))
    return "\n".join([sides[0], texts[name], sides[1]])


def windows(client: httpx.Client, folder: Path, count: int) -> None:
    judged, texts, draw = (
        sampled(read_judgements(folder), count),
        texts_of(folder),
        random.Random(1),
    )
    runs: dict[str, dict[str, dict[str, float]]] = {"cut": {}, "windows": {}}
    for query, text in judged.queries.items():
        [own] = judged.relevance[query]
        names = [own, *draw.sample([name for name in texts if name != own], DOCUMENTS - 1)]
        draw.shuffle(names)
        documents = [joined(name, texts, draw) for name in names]
        for way, fields in (("cut", {}), ("windows", {"max_chunks_per_doc": WINDOWS})):
            ranked = rerank(client, text, documents, fields)
            runs[way][query] = scores_by_rank([names[place] for place in ranked])
    gains = {way: measures_of(run, judged)["nDCG@10"] for way, run in runs.items()}
    lead, low, high = paired_bootstrap(gains["windows"] - gains["cut"])
    print(f"{count} queries, {DOCUMENTS} documents of {WORDS} words, nDCG@10")
    for way, values in gains.items():
        print(f"  {way:10} {values.mean():.4f}")
    print(f"  windows lead by {lead:+.4f} [{low:+.4f}, {high:+.4f}]", flush=True)


def budgets(client: httpx.Client, folder: Path, count: int) -> None:
    judged, texts = sampled(read_judgements(folder), count), texts_of(folder)
    names, first = [*texts], dense_order([*texts.values()], [*judged.queries.values()])
    print(f"{count} queries, {CANDIDATES} documents\n  budget ms   nDCG@10  scored    p50    p95")
    for budget in BUDGETS_MS:
        run, times, shares = {}, [], []
        for (query, text), order in zip(judged.queries.items(), first, strict=True):
            documents = [texts[names[place]] for place in order]
            began = time.perf_counter()
            body = {"query": text, "documents": documents, "return_documents": False}
            if budget is not None:
                body["budget_ms"] = budget
            answer = client.post("/v1/rerank", json=body).raise_for_status().json()
            times.append((time.perf_counter() - began) * 1e3)
            scored = answer["budget"]["scored"] if budget is not None else len(documents)
            shares.append(scored / len(documents))
            run[query] = scores_by_rank([names[order[hit["index"]]] for hit in answer["results"]])
        gain = measures_of(run, judged)["nDCG@10"].mean()
        late = statistics.quantiles(times, n=20, method="inclusive")[-1]
        print(
            f"  {budget or 'none':>9} {gain:9.4f} {statistics.mean(shares):7.2f} "
            f"{statistics.median(times):6.0f} {late:6.0f}",
            flush=True,
        )


def dense_order(documents: Sequence[str], queries: Sequence[str]) -> list[list[int]]:
    """The places of each query's `CANDIDATES` nearest documents, the nearest first."""
    encoder = Encoder.load()
    rows, questions = encoder.encode(documents).dense, encoder.encode(queries).dense
    encoder.close()
    assert rows is not None
    assert questions is not None
    return np.argsort(-(questions @ rows.T), axis=1)[:, :CANDIDATES].tolist()


def rerank(
    client: httpx.Client, query: str, documents: Sequence[str], fields: Mapping[str, int]
) -> list[int]:
    """The places of the documents, the best first."""
    body = {"query": query, "documents": documents, "return_documents": False, **fields}
    answer = client.post("/v1/rerank", json=body).raise_for_status().json()
    return [hit["index"] for hit in answer["results"]]


if __name__ == "__main__":
    sys.exit(main())
