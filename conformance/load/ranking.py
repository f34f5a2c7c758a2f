"""What ranking costs on this machine: `/v1/rerank` of one client that waits for each answer.

    python -m conformance.load ranking [--models NAME,...] [--dtypes float32,int8] [--seconds 10]

The models have the shapes of published rerankers (`conformance.families.shapes`) and random weights, so the
times are true and the scores mean nothing. A row is a model, a precision, a number of candidates
and their tokens; `tokens/s` counts queries and candidates. `budget 300`: with `budget_ms: 300`, and
the share of the candidates that were scored. `windows`: documents of 1,500 tokens, of which the
best of at most 10 windows counts.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from tokenizers import Tokenizer

from conformance.families.shapes.checkpoint import read_checkpoints, write_checkpoint
from conformance.load.report import table
from conformance.load.servers import HOST, Server, served, started

FLAGS = {
    "ranking": {
        "--models": "ms-marco-MiniLM-L6-v2,bge-reranker-base",
        "--dtypes": "float32,bfloat16,int8",
        "--seconds": 10.0,
    }
}
QUERY_TOKENS = 8
PATIENCE_SECONDS = 300.0
# Requests of a kind, however long they take; and those before, which do not count
LEAST_REQUESTS, WARM_REQUESTS = 4, 2
# A request of more tokens is not measured for models of more weights than the smallest
MOST_TOKENS = 20_000


class Case(NamedTuple):
    """A kind of request."""

    name: str
    candidates: int
    tokens: int
    fields: Mapping[str, int] = {}


CASES = (
    *(
        Case(f"{candidates} x {tokens}", candidates, tokens)
        for tokens in (60, 250)
        for candidates in (10, 50, 200)
    ),
    Case("200 x 60, budget 300", 200, 60, {"budget_ms": 300}),
    Case("200 x 250, budget 300", 200, 250, {"budget_ms": 300}),
    Case("10 x 1500, windows", 10, 1500, {"max_chunks_per_doc": 10}),
)


def ranking(options: argparse.Namespace) -> int:
    """Measure each model in each precision, one server at a time."""
    checkpoints = read_checkpoints()
    rows = {}
    smallest = min(checkpoints[name].numbers for name in options.models.split(","))
    for name in options.models.split(","):
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / name
            write_checkpoint(folder, checkpoints[name])
            words = whole_words(folder)
            for dtype in options.dtypes.split(","):
                with started(served("--model-id", str(folder), "--dtype", dtype)) as server:
                    for case in CASES:
                        size = case.candidates * case.tokens
                        if size > MOST_TOKENS and checkpoints[name].numbers > smallest:
                            continue
                        row = measured(server, words, case, options.seconds)
                        rows[f"{name} {dtype} {case.name}"] = row
    table(rows)
    return 0


def whole_words(folder: Path) -> list[str]:
    """Words that the tokenizer keeps whole."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    pieces = [piece.removeprefix("▁") for piece in sorted(tokenizer.get_vocab())]
    words = [piece for piece in pieces if piece.isascii() and piece.isalpha() and len(piece) > 2]
    lengths = [len(encoding.ids) for encoding in tokenizer.encode_batch(words)]
    return [word for word, length in zip(words, lengths, strict=True) if length == min(lengths)]


def measured(server: Server, words: list[str], case: Case, seconds: float) -> dict[str, float]:
    """Milliseconds of an answer."""
    times, shares, end = list[float](), list[float](), time.perf_counter() + seconds
    with httpx.Client(timeout=PATIENCE_SECONDS, trust_env=False) as client:
        for body in drawn(words, case):
            began = time.perf_counter()
            if began > end and len(times) >= LEAST_REQUESTS + WARM_REQUESTS:
                break
            answer = client.post(f"http://{HOST}:{server.port}/v1/rerank", json=body)
            times.append((time.perf_counter() - began) * 1e3)
            budget = answer.raise_for_status().json().get("budget")
            shares.append(budget["scored"] / budget["of"] if budget else 1.0)
    times, shares = times[WARM_REQUESTS:], shares[WARM_REQUESTS:]
    median = statistics.median(times)
    tokens = case.candidates * (case.tokens + QUERY_TOKENS) * statistics.mean(shares)
    return {
        "p50 ms": median,
        "p95 ms": statistics.quantiles(times, n=20, method="inclusive")[-1],
        "tokens/s": tokens / median * 1e3,
        "scored": statistics.mean(shares),
        "requests": len(times),
    }


def drawn(words: list[str], case: Case) -> Iterator[dict[str, Any]]:
    """Requests whose texts were not sent before."""
    draw = random.Random(case.name)
    while True:
        yield {
            "query": " ".join(draw.choices(words, k=QUERY_TOKENS)),
            "documents": [
                " ".join(draw.choices(words, k=case.tokens)) for _ in range(case.candidates)
            ],
            "top_n": 10,
            "return_documents": False,
            **case.fields,
        }
