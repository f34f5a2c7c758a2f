"""Writes the numbers of limits.md: each stands before a comment that names its constant."""

from __future__ import annotations

import re
from pathlib import Path
from pkgutil import resolve_name

PAGE = Path(__file__).parents[1] / "limits.md"
NUMBER = re.compile(r"[\d,.]*\d<!-- ([\w.]+) -->")


def page() -> str:
    """The file with the current numbers."""
    return NUMBER.sub(_current, PAGE.read_text(encoding="utf-8"))


def _current(mark: re.Match[str]) -> str:
    value = resolve_name(f"hybridtei.{mark[1]}")
    return f"{value:,.15g}<!-- {mark[1]} -->"
