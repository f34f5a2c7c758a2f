"""Runs one evaluation from settings to figures: ingests a missing collection, opens model and
store, measures, and reports.

The report is a table, JSON, or a chart of quality beside latency.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from tqdm.auto import tqdm

from hybridtei.client import AsyncClient
from hybridtei.config import EngineConfig, ModelConfig, StoreConfig
from hybridtei.errors import InvalidInput, StoreError
from hybridtei.retrieval.evaluate.calibrate import calibrated, judged_pairs
from hybridtei.retrieval.evaluate.measures import (
    MEASURES,
    Evaluation,
    Judgements,
    evaluate,
    ways_of,
)
from hybridtei.retrieval.ingest.run import ingest
from hybridtei.retrieval.store import opened
from hybridtei.retrieval.store.collection import check_name
from hybridtei.system.machine import require_extra

CHART_KINDS = (".png", ".svg", ".pdf")
# One for each of MEASURES
COLOURS = ("#1b6ca8", "#7fb3d5", "#d98f2b")


def check_chart(path: Path) -> None:
    """Raises InvalidInput for another kind of file, LoadError without the library. Call it before
    minutes of work."""
    if path.suffix.lower() not in CHART_KINDS:
        raise InvalidInput(f"{path}: a chart should end in {', '.join(CHART_KINDS)}")
    if not path.resolve().parent.is_dir():
        raise InvalidInput(f"{path}: there is no such folder")
    require_extra("eval", "matplotlib")


def write_chart(evaluation: Evaluation, path: Path) -> None:
    """Draw a chart in the format of the path's ending. Raises the errors of `check_chart`, and
    OSError."""
    check_chart(path)
    # Without pyplot: no window, no state
    from matplotlib.figure import Figure

    # Matplotlib draws bars from the bottom up
    results = list(evaluation.results)[::-1]
    figure = Figure(figsize=(11, 1.2 + 0.5 * len(results)), layout="constrained")
    quality, latency = figure.subplots(1, 2, width_ratios=(3, 2))
    bar = 0.8 / len(MEASURES)
    for number, (measure, colour) in enumerate(zip(MEASURES, COLOURS, strict=True)):
        places = [row + 0.4 - bar * (number + 0.5) for row in range(len(results))]
        bars = quality.barh(
            places,
            [result.measures[measure] for result in results],
            bar,
            color=colour,
            label=measure,
        )
        quality.bar_label(bars, fmt="%.3f", padding=2, fontsize=7)
    quality.set_yticks(range(len(results)), [result.name for result in results])
    quality.set_xlim(0, 1.08)
    quality.set_title(f"{evaluation.collection}: {evaluation.queries} queries")
    rows = range(len(results))
    latency.barh(rows, [result.p95_ms for result in results], 0.6, color="#d5dbdb", label="p95")
    latency.barh(rows, [result.p50_ms for result in results], 0.6, color="#5d6d7e", label="p50")
    latency.set_yticks(rows, [""] * len(results))
    latency.set_title("milliseconds a query, without its embedding")
    # Below the axes, so that it hides no bar or number.
    figure.legend(
        *quality.get_legend_handles_labels(),
        loc="outside lower left",
        ncols=len(MEASURES),
        fontsize=7,
    )
    figure.legend(
        *latency.get_legend_handles_labels(), loc="outside lower right", ncols=2, fontsize=7
    )
    figure.savefig(path, dpi=150)


def as_dict(evaluation: Evaluation) -> dict[str, Any]:
    """All figures, rounded. Times are in milliseconds."""
    choice = None if evaluation.choice is None else asdict(evaluation.choice)
    if choice is not None:
        for name, value in choice.items():
            if type(value) is float:
                choice[name] = round(value, 4)
    return {
        "collection": evaluation.collection,
        "queries": evaluation.queries,
        "embed_p50_ms": round(float(np.percentile(evaluation.embed_ms, 50)), 3),
        "embed_p95_ms": round(float(np.percentile(evaluation.embed_ms, 95)), 3),
        "modes": [
            {
                "mode": result.name,
                **{name: round(value, 4) for name, value in result.measures.items()},
                "p50_ms": round(result.p50_ms, 3),
                "p95_ms": round(result.p95_ms, 3),
            }
            for result in evaluation.results
        ],
        "choice": choice,
        "calibration": evaluation.calibration and asdict(evaluation.calibration),
    }


def as_json(evaluation: Evaluation) -> str:
    """One JSON object, a line for each field."""
    return orjson.dumps(as_dict(evaluation), option=orjson.OPT_INDENT_2).decode()


def as_table(evaluation: Evaluation) -> str:
    """A line for each mode. Asterisks mark the best of each measure."""
    width = max([len(result.name) for result in evaluation.results] + [4])
    head = (
        f"{'mode':{width}}"
        + "".join(f"{name:>13}" for name in MEASURES)
        + f"{'p50 ms':>10}{'p95 ms':>9}"
    )
    best = {
        name: max((result.measures[name] for result in evaluation.results), default=0.0)
        for name in MEASURES
    }
    lines = [head, "-" * len(head)]
    for result in evaluation.results:
        cells = "".join(
            f"{result.measures[name]:12.4f}{'*' if result.measures[name] == best[name] else ' '}"
            for name in MEASURES
        )
        lines.append(
            f"{result.name:{width}}{cells}{result.p50_ms:10.1f}{result.p95_ms:9.1f}"
            f"  {_flags(result.name)}".rstrip()
        )
    p50, p95 = np.percentile(evaluation.embed_ms, [50, 95])
    lines.append(
        "\n"
        f"{evaluation.queries:,} queries in {evaluation.collection}; times without the query's "
        f"embedding, which takes {p50:.1f} ms (p95 {p95:.1f}); * best"
    )
    if (choice := evaluation.choice) is not None:
        kind = ", the default" if choice.is_default else ", instead of the default"
        lines.append(
            f"choose {choice.name}{kind}: `{_flags(choice.name) or 'no flag'}` of `hybridtei "
            f"search`, {choice.lead:+.4f} nDCG@10 against {choice.over} (95 % "
            f"interval {choice.low:+.4f} to {choice.high:+.4f}, paired bootstrap over queries)"
        )
    if (fitted := evaluation.calibration) is not None:
        lines.append(
            f"probabilities of {fitted.way}: expected calibration error {fitted.error:.3f} on the "
            f"first ten hits of the half of the queries that was not fitted; of {fitted.pairs:,} "
            f"hits {fitted.relevant:,} are relevant"
        )
    return "\n".join(lines)


def _flags(way: str) -> str:
    """How `hybridtei search` and `/search` are told a way."""
    words = list[str]()
    for option, value in ways_of("MODEL")[way][0].items():
        if isinstance(value, list):
            words.append(f"with {option} of /search: {', '.join(value)}")
        else:
            words.append(f"--{option.replace('_', '-')} {'' if value is True else value}".strip())
    return " ".join(words)


Tell = Callable[[str], None]
Connect = Callable[[], AbstractAsyncContextManager[AsyncClient]]


def run_evaluation(
    connect: Connect,
    collection: str,
    judged: Judgements,
    *,
    rerank: str | None = None,
    calibrate: str | None = None,
    quiet: bool = False,
) -> Evaluation:
    """Measure a collection of a server. `connect`: makes its client. `rerank`: the alias of one of
    its rerankers. `calibrate`: the way of searching whose probabilities to fit. Raises
    HybridTeiError."""

    async def measured() -> Evaluation:
        with tqdm(unit=" queries", disable=quiet, file=sys.stderr) as bar:

            def advance(name: str, done: int) -> None:
                bar.set_description_str(name, refresh=False)
                bar.update()

            async with connect() as client:
                evaluation = await evaluate(
                    client, collection, judged, rerank=rerank, advance=advance
                )
                if calibrate is None:
                    return evaluation
                options, _ = ways_of(rerank)[calibrate]
                pairs = await judged_pairs(client, collection, judged, options)
                return replace(evaluation, calibration=calibrated(*pairs))

    return asyncio.run(measured())


def ingest_missing(
    folder: Path,
    collection: str,
    model: ModelConfig,
    engine: EngineConfig,
    store: StoreConfig,
    *,
    tell: Tell,
    quiet: bool,
) -> None:
    """Ingest a judged folder, unless the collection has points. Raises HybridTeiError, OSError."""
    check_name(collection)
    if asyncio.run(_exists(store, collection)):
        return
    tell(f"{collection} is not there yet: ingesting {folder}, a point a document")
    # judgements rate whole documents, and published figures use the part that a model reads
    summary = ingest(
        folder,
        collection,
        model,
        store,
        engine_config=engine,
        tell=tell,
        no_chunking=True,
        quiet=quiet,
    )
    tell(summary.in_words())
    if summary.status:
        raise StoreError("the ingest is incomplete: run the same command again")


async def _exists(config: StoreConfig, collection: str) -> bool:
    async with opened(config) as store:
        return await store.describe(collection) is not None and await store.count(collection) > 0
