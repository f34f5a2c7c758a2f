"""Draws the pictures of the pages.

`one-pass.svg` shows a request's way. `speed.svg` is a chart of `pictures/speed.json`, of figures of
`python -m conformance.load http_load`: `{"machine": …, "rows": [[name, {traffic: tokens per
second}], …]}`. The others are divided by the first row, the peer. `fusion.svg` is of
`pictures/fusion.json`, which `conformance/quality/default_search.py --json` writes.
"""

from __future__ import annotations

import json
from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).parents[1] / "pictures"
STYLE = (
    "<style>text{font-family:system-ui,sans-serif;font-size:14px;fill:#1f2933}"
    ".small{font-size:12px;fill:#52606d}.bold{font-weight:600}.box{fill:#fff;stroke:#9aa5b1}"
    ".pass{fill:#e6f0ff;stroke:#3366cc}.line{stroke:#52606d;fill:none;"
    "marker-end:url(#arrow)}</style>"
    '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
    'orient="auto">'
    '<path d="M0 0 8 4 0 8z" fill="#52606d"/></marker></defs>'
)
COLOURS = ("#9aa5b1", "#3366cc", "#2a9d6f", "#c46210", "#7b4bb3")
LEFT, BAR, ROW = 170, 420, 16


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> str:
    """Return one line of text."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def box(
    x: float, y: float, width: float, height: float, title: str, *lines: str, kind: str = "box"
) -> str:
    """Return a box with a title and small lines below it."""
    top = y + height / 2 - 9 * len(lines) + 5
    words = [text(x + width / 2, top, title, "bold")]
    words += [
        text(x + width / 2, top + 18 * (i + 1), line, "small") for i, line in enumerate(lines)
    ]
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" class="{kind}"/>'
        + "".join(words)
    )


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path class="line" d="M{x1} {y1} L{x2} {y2}"/>'


def svg(width: int, height: int, title: str, *parts: str) -> str:
    """Return a drawing on a light ground, readable on pages of any colour."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img">'
        f'<title>{escape(title)}</title>{STYLE}<rect width="{width}" height="{height}" rx="10" '
        'fill="#f7f9fb"/>' + "".join(parts) + "</svg>\n"
    )


def one_pass() -> str:
    """Who calls, one pass, three outputs, and where they go."""
    callers = [
        ("TEI, OpenAI, Cohere", 20),
        ("Jina, Voyage, Ollama", 80),
        ("Encoder, in process", 140),
        ("hybridtei ingest", 200),
    ]
    outputs = [
        ("dense", "one vector a text", 20),
        ("sparse", "a weight for each word", 100),
        ("multi-vector", "a vector for each token", 180),
    ]
    parts = [box(20, y, 170, 44, name) + arrow(190, y + 22, 238, 132) for name, y in callers]
    parts.append(box(240, 82, 140, 100, "batches", "of a number of tokens,", "nothing is padded"))
    parts.append(arrow(380, 132, 418, 132))
    parts.append(
        box(
            420, 62, 150, 140, "one forward pass", "ONNX Runtime,", "OpenVINO or torch", kind="pass"
        )
    )
    parts += [
        arrow(570, 132, 618, y + 32) + box(620, y, 170, 64, name, note) for name, note, y in outputs
    ]
    parts += [arrow(790, y + 32, 838, 132) for _, _, y in outputs]
    parts.append(box(840, 82, 140, 100, "the client", "or Qdrant, which", "fuses all three"))
    return svg(
        1000, 264, "One forward pass gives dense vectors, sparse weights and multi-vectors", *parts
    )


def speed() -> str:
    """Bars of tokens per second, as a multiple of the peer's, by kind of traffic."""
    measured = json.loads((FOLDER / "speed.json").read_text(encoding="utf-8"))
    (peer, base), *rows = measured["rows"]
    kinds = list(base)
    scale = BAR / max(values[kind] / base[kind] for _, values in rows for kind in kinds)
    group = ROW * (len(rows) + 1) + 14
    parts = [text(20, 28, f"Tokens per second, as a multiple of {peer}", "bold", "start")]
    for i, kind in enumerate(kinds):
        top = 48 + i * group
        parts.append(text(LEFT - 12, top + group / 2 - 4, kind, "", "end"))
        for j, (name, values) in enumerate([(peer, base), *rows]):
            ratio = values[kind] / base[kind]
            y = top + j * ROW
            parts.append(
                f'<rect x="{LEFT}" y="{y}" width="{ratio * scale:.1f}" height="{ROW - 3}" '
                f'fill="{COLOURS[j]}"/>'
            )
            parts.append(
                text(LEFT + ratio * scale + 8, y + 11, f"{ratio:.1f}  {name}", "small", "start")
            )
    height = 48 + len(kinds) * group + 24
    parts.append(text(20, height - 14, measured["machine"], "small", "start"))
    return svg(820, height, f"Speed as a multiple of {peer}", *parts)


def fusion() -> str:
    """The lead of the default search over each other way, as a dot with its interval."""
    rows = json.loads((FOLDER / "fusion.json").read_text(encoding="utf-8"))
    rows = [row for row in rows if row[1] != "default"]
    lowest = min([0.0, min(row[4] for row in rows)])
    scale = BAR / (max(high for *_, high in rows) - lowest)
    zero = LEFT - lowest * scale
    height = 48 + 26 * len(rows)
    title = "Lead of the default search in nDCG@10, with 95 % intervals"
    parts = [text(20, 28, title, "bold", "start")]
    parts.append(f'<path d="M{zero:.1f} 40 V{height}" stroke="#9aa5b1"/>')
    collections = list(dict.fromkeys(row[0] for row in rows))
    for place, (collection, way, _, lead, low, high) in enumerate(rows):
        y = 56 + 26 * place
        colour = COLOURS[1 + collections.index(collection)]
        begin, middle, end = (zero + value * scale for value in (low, lead, high))
        parts.append(
            text(
                LEFT - 12,
                y + 4,
                f"{collection}, {way}",
                "small",
                "end",
            )
        )
        parts.append(
            f'<path d="M{begin:.1f} {y} H{end:.1f}" stroke="{colour}" stroke-width="3"/>'
            f'<circle cx="{middle:.1f}" cy="{y}" r="5" fill="{colour}"/>'
        )
        parts.append(
            text(
                end + 10,
                y + 4,
                f"{lead:+.3f}",
                "small",
                "start",
            )
        )
    return svg(820, height + 20, title, *parts)


def drawings() -> dict[Path, str]:
    """Return each picture's file and what it should hold."""
    pictures = {FOLDER / "one-pass.svg": one_pass()}
    if (FOLDER / "speed.json").exists():
        pictures[FOLDER / "speed.svg"] = speed()
    if (FOLDER / "fusion.json").exists():
        pictures[FOLDER / "fusion.svg"] = fusion()
    return pictures
