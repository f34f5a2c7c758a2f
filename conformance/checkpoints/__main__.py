"""Checkpoints that vary what hub repositories vary, on every engine, against their oracle.

    python -m conformance.checkpoints [--only PREFIX] [--sample] [--engines ort,torch] [--out
    results.tsv]

Each case is built, loaded by `Encoder.load` in float32 and compared with sentence-transformers or
transformers on seven texts: blank, long, of other scripts, of special tokens. A line a case and
engine; then the shares served and wrong, refused without a clear reason, and served and right.
Appends to `--out`, and skips cases that are in it already. Exit status 1 if one is served and
wrong, unless `KNOWN` of sample.py lists it; and if one that it lists is not wrong any more, or an
engine is missing.
"""

import argparse
import csv
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tqdm import tqdm
from transformers.utils import logging as theirs_logging

from conformance.checkpoints import judge
from conformance.checkpoints.build import Case, build, oracle_of
from conformance.checkpoints.configs import CONFIGS
from conformance.checkpoints.heads import HEADS
from conformance.checkpoints.modules import MODULES
from conformance.checkpoints.sample import COMPILED, KNOWN, SAMPLE
from conformance.checkpoints.tokenizers import TOKENIZERS
from conformance.checkpoints.vectors import VECTORS
from conformance.checkpoints.weights import WEIGHTS

CASES: dict[str, Case] = {**CONFIGS, **TOKENIZERS, **MODULES, **WEIGHTS, **HEADS, **VECTORS}
COLUMNS = ("case", "group", "backend", "verdict", "deviation", "seconds", "message")
BACKENDS = ("ort", "openvino", "torch")
Row = dict[str, str]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m conformance.checkpoints",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default="", help="case names that begin so; several by commas")
    parser.add_argument(
        "--engines", default="all", help=f"of {','.join(BACKENDS)} [default: %(default)s]"
    )
    parser.add_argument("--sample", action="store_true", help="only the fixed sample that CI runs")
    parser.add_argument("--out", type=Path, help="table to append to, and to resume from")
    parser.add_argument("--keep", type=Path, help="folder to leave the checkpoints in")
    options = parser.parse_args(argv)
    engines = BACKENDS if options.engines == "all" else tuple(options.engines.split(","))
    unknown = sorted(set(engines) - set(BACKENDS))
    if unknown:
        parser.error(f"no engine {unknown[0]!r}; there are {', '.join(BACKENDS)}")
    names = SAMPLE if options.sample else tuple(CASES)
    wanted = {
        name: CASES[name] for name in names if name.startswith(tuple(options.only.split(",")))
    }
    rows = read_rows(options.out)
    done = {row["case"] for row in rows}
    for name, case in tqdm(wanted.items(), unit="case", disable=None):
        if name not in done:
            with TemporaryDirectory() as scratch:
                case_engines = engines_of_sample(name, engines) if options.sample else engines
                new = list(run(name, case, Path(options.keep or scratch), case_engines))
            append(options.out, new)
            rows += new
            for row in new:
                tqdm.write("\t".join(row[column] for column in COLUMNS))
    judged = [row for row in rows if row["case"] in wanted]
    print("\n".join(report(judged)))
    faults = faults_of(judged, KNOWN)
    print("\n".join(faults))
    return 1 if faults else 0


def engines_of_sample(name: str, engines: Sequence[str]) -> Sequence[str]:
    """The engines of a case of the sample. OpenVINO, which compiles for longest, has those of
    COMPILED."""
    if name in COMPILED:
        return engines
    return [engine for engine in engines if engine != "openvino"]


def faults_of(rows: Iterable[Row], known: Mapping[tuple[str, str], str]) -> list[str]:
    """A line for each row that is wrong and not known to be, that is known and not wrong, or that
    ran nothing."""
    faults = []
    for row in rows:
        place = row["case"], row["backend"]
        is_wrong = row["verdict"] == judge.WRONG
        if row["verdict"] in ("crashed", "could not be built"):
            faults.append(f"{row['case']} on {row['backend']}: {row['verdict']}: {row['message']}")
        elif is_wrong and place not in known:
            faults.append(f"{row['case']} on {row['backend']} is wrong by {row['deviation']}")
        elif place in known and not is_wrong:
            faults.append(
                f"{row['case']} on {row['backend']} is listed as wrong and is not: remove it from "
                "KNOWN"
            )
    return faults


def run(name: str, case: Case, scratch: Path, backends: Iterable[str]) -> Iterable[Row]:
    """A row an engine."""
    folder = scratch / name
    folder.mkdir(parents=True, exist_ok=True)
    group = name.split("-", maxsplit=1)[0]
    try:
        build(folder, case)
    except Exception as error:
        verdict = judge.Verdict("could not be built", f"{type(error).__name__}: {error}"[:300])
        yield row_of(name, group, "-", verdict, 0)
        return
    try:
        oracle: Any = judge.expected(case.kind, oracle_of(folder, case), case.options)
    except Exception as error:
        oracle = f"no oracle: {type(error).__name__}: {error}".replace(str(folder), "…").replace(
            "\n", " "
        )[:300]
    for backend in backends:
        start = time.perf_counter()
        try:
            verdict = judge.judge(case.kind, folder, backend, oracle, case.options)
        except Exception as error:
            verdict = judge.Verdict("crashed", f"{type(error).__name__}: {error}"[:300])
        if case.by_design and verdict.verdict == judge.WRONG:
            verdict = judge.Verdict(judge.BY_DESIGN, case.by_design, verdict.deviation)
        yield row_of(name, group, backend, verdict, time.perf_counter() - start)


def row_of(name: str, group: str, backend: str, verdict: judge.Verdict, seconds: float) -> Row:
    deviation = "" if verdict.deviation is None else f"{verdict.deviation:.2e}"
    message = verdict.message.replace("\t", " ").replace("\n", " ")
    row = (name, group, backend, verdict.verdict, deviation, f"{seconds:.2f}", message)
    return dict(zip(COLUMNS, row, strict=True))


def read_rows(path: Path | None) -> list[Row]:
    """Rows of a table; none where it is missing."""
    if path is None or not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def append(path: Path | None, rows: Iterable[Row]) -> None:
    if path is not None:
        new = not path.exists()
        with path.open("a", encoding="utf-8") as file:
            file.write("\t".join(COLUMNS) + "\n" if new else "")
            file.writelines("\t".join(row[column] for column in COLUMNS) + "\n" for row in rows)


def report(rows: Sequence[Row]) -> Iterable[str]:
    """Counts, and the three shares, of loads that could be built."""
    counts = Counter(row["verdict"] for row in rows if row["verdict"] != "could not be built")
    total = max(1, sum(counts.values()))
    yield ", ".join(f"{verdict}: {count}" for verdict, count in counts.most_common())
    yield f"served and wrong: {counts[judge.WRONG]} (expected 0)"
    yield (
        "refused without a clear reason: "
        f"{(counts[judge.UNCLEAR] + counts['crashed']) / total:.1%} (expected < 2 %)"
    )
    yield f"served and right: {counts[judge.RIGHT] / total:.1%} (expected >= 70 %)"


def quieten() -> None:
    """Leave the report alone on the terminal; the hub is not asked."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    theirs_logging.set_verbosity_error()
    theirs_logging.disable_progress_bar()
    logging.disable(logging.WARNING)


if __name__ == "__main__":
    quieten()
    sys.exit(main())
