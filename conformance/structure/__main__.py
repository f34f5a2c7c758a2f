"""Size and structure of the code, to compare before and after a change: `python -m conformance.structure [--requests]`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from conformance.structure.source import measure

ROOT = Path(__file__).parents[2]


def main() -> None:
    """Print one figure a line."""
    parser = argparse.ArgumentParser(prog="python -m conformance.structure", description=__doc__)
    parser.add_argument(
        "--requests", action="store_true", help="also start a server and count the files that a request runs in"
    )
    parser.add_argument("--files", action="store_true", help="with --requests: name these files")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    figures = measure(ROOT / "hybridtei")
    files = _files_of_requests() if options.requests else {}
    figures |= {f"files of {name}": len(names) for name, names in files.items()}
    if options.json:
        print(json.dumps(figures | ({"files": files} if options.files else {})))
        return
    for name, figure in figures.items():
        print(f"{name:34} {figure}")
    for name, names in files.items() if options.files else ():
        print(f"\n{name}\n  " + "\n  ".join(names))


def _files_of_requests() -> dict[str, list[str]]:
    """In a process of its own: the profile function stays in every thread."""
    command = [sys.executable, "-m", "conformance.structure.requests"]
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, list[str]] = json.loads(ended.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
