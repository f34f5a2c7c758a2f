"""An evaluation as a picture: how good each mode is, beside how long it takes."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from hybridtei.errors import InvalidInput, LoadError
from hybridtei.evaluate.measures import MEASURES, Evaluation

KINDS = (".png", ".svg", ".pdf")
COLOURS = ("#1b6ca8", "#7fb3d5", "#d98f2b")


def check_chart(path: Path) -> None:
    """Before minutes of work. Raises InvalidInput for another kind of file, LoadError without the library."""
    if path.suffix.lower() not in KINDS:
        raise InvalidInput(f"{path}: a chart should end in {', '.join(KINDS)}")
    if not path.resolve().parent.is_dir():
        raise InvalidInput(f"{path}: there is no such folder")
    if find_spec("matplotlib") is None:
        raise LoadError("the package `matplotlib` is missing: pip install 'hybridtei[eval]'")


def write_chart(evaluation: Evaluation, path: Path) -> None:
    """Draw it; the ending says as what. Raises as `check_chart` does, and OSError."""
    check_chart(path)
    from matplotlib.figure import Figure  # without pyplot: no window, no state

    results = list(evaluation.results)[::-1]  # bars are drawn from below
    figure = Figure(figsize=(11, 1.2 + 0.5 * len(results)), layout="constrained")
    quality, latency = figure.subplots(1, 2, width_ratios=(3, 2))
    bar = 0.8 / len(MEASURES)
    for number, (measure, colour) in enumerate(zip(MEASURES, COLOURS, strict=True)):
        places = [row + 0.4 - bar * (number + 0.5) for row in range(len(results))]
        bars = quality.barh(places, [result.measures[measure] for result in results], bar, color=colour, label=measure)
        quality.bar_label(bars, fmt="%.3f", padding=2, fontsize=7)
    quality.set_yticks(range(len(results)), [result.name for result in results])
    quality.set_xlim(0, 1.08)
    quality.set_title(f"{evaluation.collection}: {evaluation.queries} queries")
    quality.legend(fontsize=7, loc="lower right")
    rows = range(len(results))
    latency.barh(rows, [result.p95_ms for result in results], 0.6, color="#d5dbdb", label="p95")
    latency.barh(rows, [result.p50_ms for result in results], 0.6, color="#5d6d7e", label="p50")
    latency.set_yticks(rows, [""] * len(results))
    latency.set_title("milliseconds a query, without its embedding")
    latency.legend(fontsize=7, loc="lower right")
    figure.savefig(path, dpi=150)


def as_dict(evaluation: Evaluation) -> dict[str, Any]:
    """All figures, rounded; times in milliseconds."""
    return {
        "collection": evaluation.collection,
        "queries": evaluation.queries,
        "points": evaluation.documents,
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
    }


def as_json(evaluation: Evaluation) -> str:
    """One object, a line a field."""
    return orjson.dumps(as_dict(evaluation), option=orjson.OPT_INDENT_2).decode()


def as_table(evaluation: Evaluation) -> str:
    """A line a mode, the best of each measure marked."""
    width = max([len(result.name) for result in evaluation.results] + [4])
    head = f"{'mode':{width}}" + "".join(f"{name:>13}" for name in MEASURES) + f"{'p50 ms':>10}{'p95 ms':>9}"
    best = {name: max((result.measures[name] for result in evaluation.results), default=0.0) for name in MEASURES}
    lines = [head, "-" * len(head)]
    for result in evaluation.results:
        cells = "".join(
            f"{result.measures[name]:12.4f}{'*' if result.measures[name] == best[name] else ' '}" for name in MEASURES
        )
        lines.append(f"{result.name:{width}}{cells}{result.p50_ms:10.1f}{result.p95_ms:9.1f}")
    p50, p95 = np.percentile(evaluation.embed_ms, [50, 95])
    lines.append(
        f"\n{evaluation.queries:,} queries, {evaluation.documents:,} points in {evaluation.collection}; times without the "
        f"query's embedding, which takes {p50:.1f} ms (p95 {p95:.1f}); * best"
    )
    return "\n".join(lines)
