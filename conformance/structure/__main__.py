"""Size and structure of the code, to compare before and after a change: `python -m conformance.structure [--requests]`.

Ends with status 1 if modules import each other in a circle, and names them.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conformance.structure.source import find_circles, measure, read_imports, read_modules

ROOT = Path(__file__).parents[2]


def main() -> None:
    """Print one figure a line. Raises SystemExit for a circle of imports."""
    parser = argparse.ArgumentParser(prog="python -m conformance.structure", description=__doc__)
    parser.add_argument(
        "--requests",
        action="store_true",
        help="also start a server and count the files that a request runs in",
    )
    parser.add_argument("--files", action="store_true", help="with --requests: name these files")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    figures = measure(ROOT / "hybridtei")
    ways = ways_of_requests() if options.requests else {}
    if options.json:
        print(json.dumps(figures | {"requests": ways}))
    else:
        _print(figures, ways, names=options.files)
    circles = find_circles(read_imports(read_modules(ROOT / "hybridtei")))
    if circles:
        sys.exit("these modules import each other:\n  " + "\n  ".join(map(", ".join, circles)))


def _print(
    figures: Mapping[str, object], ways: Mapping[str, Mapping[str, Any]], *, names: bool
) -> None:
    for name, figure in figures.items():
        print(f"{name:34} {figure}")
    for name, way in ways.items():
        print(
            f"{name:34} {len(way['files'])} files, {way['calls']} calls, "
            f"{way['calls_across']} across files, {way['nested']} nested coroutines"
        )
        if names:
            print("  " + "\n  ".join(way["files"]))


def ways_of_requests() -> dict[str, dict[str, Any]]:
    """Request -> the fields of its `requests.Way`.

    Counted in a separate process, since the profile function stays in every thread.
    """
    command = [sys.executable, "-m", "conformance.structure.requests"]
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    ways: dict[str, dict[str, Any]] = json.loads(ended.stdout.splitlines()[-1])
    return ways


if __name__ == "__main__":
    main()
