"""Runs notebooks from their first cell in a fresh kernel, and stores or compares what they show.

    python -m notebooks.writing.execute [--check] [NOTEBOOK …]        all of this folder by default

Knows nothing of hybridtei. Two runs of a right notebook differ, in the last digits of a number and
in everything that is a time; so numbers are compared with a tolerance, and a cell tagged `varies`
only has to run.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

FOLDER = Path(__file__).parents[1]
CELL_SECONDS = 300
# Of a number that took another way through a batch, or through another processor
TOLERANCE = 0.02
VARIES = "varies"
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
KERNEL = {
    "HF_HUB_OFFLINE": "1",
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    "OMP_NUM_THREADS": "1",
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    "PYTHONWARNINGS": "ignore",
    "TQDM_DISABLE": "1",
}


def notebooks() -> list[Path]:
    """All of this folder, in the order of their names."""
    return sorted(FOLDER.glob("*.ipynb"))


def executed(path: Path) -> Any:
    """A notebook with the outputs of a fresh run, in its own folder. Raises CellExecutionError at
    the first cell that fails."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.metadata = {name: value for name, value in cell.metadata.items() if name == "tags"}
    client = NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        extra_arguments=[
            "--log-level=ERROR"
            # Else a cell shows the kernel's warning that it talks over TCP
        ],
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute(env={**os.environ, **KERNEL})
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


def differences(stored: Any, fresh: Any) -> Iterator[str]:
    """What a fresh run shows that the stored one does not, cell by cell; cells tagged `varies` are
    left out."""
    for place, (old, new) in enumerate(zip(stored.cells, fresh.cells, strict=True)):
        if old.cell_type == "code" and VARIES not in old.metadata.get("tags", []):
            was, now = shown(old), shown(new)
            if not alike(was, now):
                yield f"cell {place} shows\n{now}\nand not\n{was}"


def shown(cell: Any) -> str:
    """The text that a cell shows: what it printed, and its value."""
    parts = [
        output.get("text") or output.get("data", {}).get("text/plain", "")
        for output in cell.outputs
        if output.output_type != "stream" or output.name == "stdout"
    ]
    return "".join(parts).strip()


def alike(was: str, now: str) -> bool:
    """The same words, with numbers that are nearly the same."""
    if NUMBER.sub("0", was).split() != NUMBER.sub("0", now).split():
        return False
    pairs = zip(NUMBER.findall(was), NUMBER.findall(now), strict=True)
    return all(
        math.isclose(float(before), float(after), rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        for before, after in pairs
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 1 if a notebook fails, or with `--check` shows something else."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("notebooks", nargs="*", type=Path, metavar="NOTEBOOK")
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    arguments = parser.parse_args(argv)
    bad = 0
    for path in arguments.notebooks or notebooks():
        stored = nbformat.read(path, as_version=4)
        try:
            fresh = executed(path.resolve())
        except CellExecutionError as error:
            print(f"{path.name}: {error}", file=sys.stderr)
            bad = 1
            continue
        if not arguments.check:
            nbformat.write(fresh, path)
            print(f"{path.name}: written")
            continue
        lines = list(differences(stored, fresh))
        for line in lines:
            print(f"{path.name}: {line}", file=sys.stderr)
        bad |= bool(lines)
        print(f"{path.name}: {'differs' if lines else 'as stored'}")
    return bad


if __name__ == "__main__":
    raise SystemExit(main())
