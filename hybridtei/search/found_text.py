"""What a search found, for people and for scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import orjson

from hybridtei.ingest.chunking import DOCUMENT_ID, TEXT, TITLE
from hybridtei.search.highlights import Highlight, excerpt
from hybridtei.search.searcher import Found, Hit, SearchOptions

EXCERPT_CHARACTERS = 300
MARK, BOLD, FAINT, PLAIN = "*", "\x1b[1m", "\x1b[2m", "\x1b[0m"


def plain(found: Found) -> dict[str, Any]:
    """As JSON has it; what was not asked for is left out."""
    return {
        "mode": found.mode,
        "hits": [_plain_hit(hit) for hit in found.hits],
        "stages": [{**asdict(stage), "milliseconds": round(stage.milliseconds, 3)} for stage in found.stages],
    }


def _plain_hit(hit: Hit) -> dict[str, Any]:
    told: dict[str, Any] = {"id": hit.id, "score": float(hit.score), "payload": hit.payload}
    if hit.highlights is not None:
        told["highlights"] = [asdict(highlight) for highlight in hit.highlights]
    if hit.scores is not None:
        told["scores"] = {name: {"score": float(one.score), "rank": one.rank} for name, one in hit.scores.items()}
    return told


def as_json(found: Found) -> str:
    """One line."""
    return orjson.dumps(plain(found)).decode()


def in_words(found: Found, options: SearchOptions, *, colours: bool = False) -> str:
    """A few lines a hit. `colours`: for a terminal; else matching terms stand between asterisks."""
    lines: list[str] = []
    for place, hit in enumerate(found.hits, options.offset + 1):
        name = hit.payload.get(TITLE) or hit.payload.get(DOCUMENT_ID) or ""
        identity = hit.payload.get(DOCUMENT_ID) or hit.id
        lines.append(f"{place:3}  {hit.score:.4f}  {_one_line(str(name))[:100]}  [{identity}]")
        text = str(hit.payload.get(options.text_field) or hit.payload.get(TEXT) or "")
        if text:
            lines.append(f"     {_marked(text, hit.highlights or [], colours)}")
        if hit.scores:
            lines.append("     " + "   ".join(_score(stage, one.score, one.rank) for stage, one in hit.scores.items()))
    if not found.hits:
        lines.append("nothing was found")
    if options.explain:
        lines.extend(["", f"{'stage':14}{'ms':>9}{'points':>8}"])
        lines.extend(f"{stage.name:14}{stage.milliseconds:9.1f}{stage.candidates:8}" for stage in found.stages)
    return "\n".join(lines)


def _score(stage: str, score: float, rank: int | None) -> str:
    return f"{stage} {score:.4f} ({'not found' if rank is None else f'place {rank}'})"


def _marked(text: str, marks: Sequence[Highlight], colours: bool) -> str:
    start, end = excerpt(text, marks, EXCERPT_CHARACTERS)
    opening, closing = (BOLD, PLAIN) if colours else (MARK, MARK)
    parts, at = [], start
    for mark in marks:
        if mark.start >= at and mark.end <= end:
            parts += [text[at : mark.start], opening, text[mark.start : mark.end], closing]
            at = mark.end
    shown = "".join([*parts, text[at:end]])
    return _one_line(f"{'…' if start else ''}{shown}{'…' if end < len(text) else ''}")


def _one_line(text: str) -> str:
    return " ".join(text.split())
