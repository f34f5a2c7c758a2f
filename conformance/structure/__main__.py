"""Size and structure of the code, to compare before and after a change: `python -m
conformance.structure [--requests]`.

Ends with status 1 if modules import each other in a circle, or if a request has more files, calls
or nested coroutines than `requests.BOUNDS`, and names them.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from conformance.structure.requests import Record, above
from conformance.structure.source import find_circles, measure, read_imports, read_modules

ROOT = Path(__file__).parents[2]


def main() -> None:
    """Print one figure a line. Raises SystemExit for a circle of imports."""
    parser = argparse.ArgumentParser(prog="python -m conformance.structure", description=__doc__)
    parser.add_argument(
        "--requests",
        action="store_true",
        help="also start a server and count what runs for a request",
    )
    parser.add_argument(
        "--files", action="store_true", help="with --requests: name the files and functions"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    figures = measure(ROOT / "hybridtei")
    records = _records_of_requests() if options.requests else {}
    for name, record in records.items():
        figures[f"files of {name}"] = len(record.files)
        figures[f"calls of {name}"] = record.calls
        figures[f"calls across files of {name}"] = record.calls_across_files
        figures[f"nested coroutines of {name}"] = record.nested_coroutines
    details = {name: asdict(record) for name, record in records.items() if options.files}
    if options.json:
        print(json.dumps(figures | details))
    else:
        _print(figures, records if options.files else {})
    if records and (sentences := above(records)):
        sys.exit("\n".join(sentences))
    circles = find_circles(read_imports(read_modules(ROOT / "hybridtei")))
    if circles:
        sys.exit("these modules import each other:\n  " + "\n  ".join(map(", ".join, circles)))


def _print(figures: Mapping[str, object], records: Mapping[str, Record]) -> None:
    for name, figure in figures.items():
        print(f"{name:44} {figure}")
    for name, record in records.items():
        print(f"\n{name}\n  " + "\n  ".join(record.files))
        for function, count in record.functions.items():
            print(f"{count:6} {function}")


def _records_of_requests() -> dict[str, Record]:
    """Runs in a separate process, since the profile function stays in every thread."""
    command = [sys.executable, "-m", "conformance.structure.requests"]
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    records = json.loads(ended.stdout.splitlines()[-1])
    return {name: Record(**fields) for name, fields in records.items()}


if __name__ == "__main__":
    main()
