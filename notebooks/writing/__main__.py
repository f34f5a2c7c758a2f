"""Writes all that is made from the code: the pages of flags and of Python, tables of models.md and
scale.md, the numbers of limits.md, the server's page of errors, and the pictures.

python -m notebooks.writing [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

from deploy import scale
from notebooks.writing import draw, files, flags, limits, reference


def texts() -> dict[Path, str]:
    """What each file should hold."""
    tables = scale.updated(scale.PAGE.read_text(encoding="utf-8"), scale.Facts())
    return {
        flags.PAGE: flags.page(),
        files.PAGE: files.page(),
        limits.PAGE: limits.page(),
        scale.PAGE: tables,
        **reference.pages(),
        **draw.drawings(),
    }


def write(*, check: bool) -> None:
    """Write the files that differ; `check`: exit with their names."""
    old = {
        path: text
        for path, text in texts().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    }
    if check and old:
        names = ", ".join(path.name for path in old)
        raise SystemExit(f"out of date: {names}: run python -m notebooks.writing")
    for path, text in old.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(check="--check" in sys.argv)
