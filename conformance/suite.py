"""The whole suite file by file, each in a process of its own: `python -m conformance.suite [FILE or FOLDER ...]`.

Each file's result is a line of a JSONL file, under the commit it was run on, written when the file is through. A run that was
interrupted goes on where it stopped, and a changed tree is another commit. Ends with 1 where anything failed on this commit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
EVERY = "slow or not slow"
NO_TESTS = 5  # pytest's status where nothing was selected


def commit_of(root: Path) -> str:
    """The commit, and where the tree differs from it, a digest of the difference."""

    def git(*words: str) -> bytes:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, check=True).stdout

    changed = git("diff", "HEAD", "--binary") + git("status", "--porcelain", "--untracked-files=all")
    commit = git("rev-parse", "--short=12", "HEAD").decode().strip()
    return f"{commit}+{sha256(changed).hexdigest()[:8]}" if changed else commit


def files_in(root: Path, places: Iterable[str]) -> list[str]:
    """Files of tests in these files and folders, relative to the root."""
    paths = [root / place for place in places]
    found = [file for path in paths for file in (path.rglob("test_*.py") if path.is_dir() else [path])]
    return sorted({path.relative_to(root).as_posix() for path in found})


def recorded(results: Path, commit: str) -> dict[str, dict[str, Any]]:
    """The last result of each file on this commit."""
    entries: list[dict[str, Any]] = []
    for line in results.read_text().splitlines() if results.exists() else []:
        with suppress(ValueError):  # a run was killed while it wrote
            entries.append(json.loads(line))
    return {entry["file"]: entry for entry in entries if entry["commit"] == commit}


def run_file(root: Path, file: str, expression: str, timeout_s: float) -> dict[str, Any]:
    """What became of a file's tests: counts, the names of those that failed, seconds."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}", "-m", expression]
        try:
            command = [sys.executable, "-m", "pytest", *options, file]
            done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=timeout_s)
            status, output = done.returncode, done.stdout + done.stderr
        except subprocess.TimeoutExpired:
            status, output = -1, f"not through after {timeout_s:g} s"
        cases = [*ElementTree.parse(report).iter("testcase")] if report.exists() else []
    ends = [{child.tag for child in case} for case in cases]
    failed = [str(case.get("name")) for case, tags in zip(cases, ends, strict=True) if tags & {"failure", "error"}]
    if status not in (0, NO_TESTS) and not failed:
        failed = [f"pytest ended with {status}: {output[-2000:]}"]
    skipped = sum("skipped" in tags for tags in ends)
    passed = sum(not tags & {"failure", "error", "skipped"} for tags in ends)
    return {"passed": passed, "skipped": skipped, "failed": failed, "seconds": round(time.monotonic() - began, 1)}


def main(words: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.suite", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("places", nargs="*", default=["tests"], help="files and folders of tests; without any, all")
    parser.add_argument("--results", type=Path, default=root / "suite.jsonl", help="file of results; suite.jsonl by default")
    parser.add_argument("--expression", default=EVERY, help=f"pytest's -m; {EVERY!r} by default")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds a file may take; 1800 by default")
    parser.add_argument("--jobs", type=int, default=1, help="files that run at once; 1 by default")
    parser.add_argument("--again", action="store_true", help="run what failed on this commit again, too")
    given = parser.parse_args(words)
    files, commit = files_in(root, given.places), commit_of(root)
    known = recorded(given.results, commit)
    left = [file for file in files if file not in known or (given.again and known[file]["failed"])]
    print(f"{commit}: {len(files)} files, {len(left)} to run")
    with ThreadPoolExecutor(given.jobs) as pool, given.results.open("a") as record:
        each = pool.map(lambda file: run_file(root, file, given.expression, given.timeout), left)
        for file, found in zip(left, each, strict=True):
            record.write("\n" * bool(record.tell()) + json.dumps({"commit": commit, "file": file, **found}))
            record.flush()
            print(f"{file}: {found['passed']} passed, {found['skipped']} skipped, {found['seconds']} s", flush=True)
            print(*(f"  FAILED {name}" for name in found["failed"]), sep="\n", end="\n" * bool(found["failed"]))
    known = recorded(given.results, commit)
    bad = [file for file in files if known[file]["failed"]]
    print(f"{sum(known[file]['passed'] for file in files)} passed, {len(bad)} of {len(files)} files failed", *bad, sep="\n  ")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
