"""An evaluation as a table for people and as JSON for scripts."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson

from hybridtei.evaluate.measures import MEASURES, Evaluation


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
