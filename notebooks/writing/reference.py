"""Writes reference.md, of all that `hybridtei` exports, from its docstrings, and the server's page
on errors from errors.md."""

from __future__ import annotations

import enum
import html
import inspect
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

import hybridtei
from hybridtei import errors
from hybridtei.cli.flags import SETTINGS
from hybridtei.config import fields_of
from notebooks.writing.reference_examples import EXAMPLES

FOLDER = Path(__file__).parents[1]
ERRORS = FOLDER / "errors.md"
HEAD = """# The Python interface

Use this page to look up a name that `hybridtei` exports; `python -m notebooks.writing` writes
it from docstrings. Tests run the examples in order; examples with collections need the extra
`qdrant`. Shapes: `n` texts, `t` tokens, `d` width of a vector, `h` hidden width.
Next: [errors, causes and cures](errors.md), or [search](search.md).
"""
GROUPS = {
    "Embed": (
        "Encoder EmbedOptions RankOptions Embeddings SparseVectors Ragged MultivectorBudget Ranked "
        "Prediction Span Head"
    ),
    "A server": "Client AsyncClient Upserted",
    "Search": (
        "Index Searcher SearchOptions SearchResult SearchHit StoredPoint TextModel filter_from"
    ),
    "Ingest": "ingest",
    "Qdrant by its own client": (
        "open_store schema_for create_arguments check_fits to_points as_lists point_id"
    ),
    "Other libraries": "HybridSparseEmbeddings",
    "Settings": "ModelConfig NamedModel EngineConfig ServerConfig StoreConfig",
}
PAGE_HEAD = """<!doctype html>
<html lang="en">
<head>
  <meta charset="utf-8">
  <meta name="viewport" content="width=device-width, initial-scale=1">
  <title>hybridtei: errors</title>
  <link rel="icon" href="icon.svg">
  <link rel="stylesheet" href="page.css">
</head>
<body>
<main class="card">
"""
PAGE_TAIL = "</main>\n</body>\n</html>\n"


def reference() -> str:
    """The whole of reference.md. Raises ValueError where an exported name has no group."""
    grouped = {name for names in GROUPS.values() for name in names.split()}
    exported = {
        name for name in hybridtei.__all__ if name not in vars(errors) and name != "__version__"
    }
    if grouped != exported:
        raise ValueError(
            f"names of GROUPS and of hybridtei.__all__ differ: {sorted(grouped ^ exported)}"
        )
    parts = [HEAD]
    for title, names in GROUPS.items():
        parts.append(f"## {title}\n")
        if title in EXAMPLES:
            parts.append(f"```python\n{EXAMPLES[title].strip()}\n```\n")
        for name in names.split():
            parts.extend(_entry(name, hybridtei.__getattr__(name)))
    return "\n".join(parts)


def _entry(name: str, value: Any) -> Iterator[str]:
    yield f"### {name}\n"
    if not _is_record(value):
        yield f"```text\n{name}{_signature(value)}\n```\n"
    yield _prose(value)
    if isinstance(value, type):
        yield from _fields(value)
        yield from _members(value)


def _is_record(value: Any) -> bool:
    return isinstance(value, type) and (
        issubclass(value, msgspec.Struct | enum.Enum) or is_dataclass(value)
    )


def _fields(kind: type) -> Iterator[str]:
    if issubclass(kind, enum.Enum):
        yield f"Members: {', '.join(f'`{member.name} = {member.value!r}`' for member in kind)}.\n"
    elif kind in SETTINGS:
        yield (
            "Its fields, each a flag and a variable too: "
            f"[flags](flags.md#{kind.__name__.lower()}).\n"
        )
    elif issubclass(kind, msgspec.Struct):
        kinds = {
            name: text
            for base in reversed(kind.__mro__)
            for name, text in vars(base).get("__annotations__", {}).items()
        }
        meanings = _described(kind)
        if meanings:
            rows = [
                f"| `{name}` | {meanings.get(name) or 'see above'} |"
                for name in kind.__struct_fields__
            ]
            yield "\n".join(["| field | meaning |", "| --- | --- |", *rows]) + "\n"
        else:
            names = [f"`{name}: {_plain(kinds[name])}`" for name in kind.__struct_fields__]
            yield f"Fields: {', '.join(names)}.\n"
    elif is_dataclass(kind):
        names = [f"`{field.name}: {_plain(field.type)}`" for field in fields(kind) if field.repr]
        yield f"Fields: {', '.join(names)}.\n"


def _described(kind: type) -> dict[str, str]:
    """What the fields of a struct mean, as far as their annotations say it; types of an extra are
    not looked up."""
    for base in kind.__mro__:
        if base is not msgspec.Struct and issubclass(base, msgspec.Struct):
            with suppress(NameError):
                return {
                    field.name: meta.description
                    for field, _, meta in fields_of(base)
                    if meta.description
                }
    return {}


def _members(kind: type) -> Iterator[str]:
    for name, member in vars(kind).items():
        # `Client`'s verbs are `AsyncClient`'s
        if inspect.isfunction(member) and hasattr(member, "__wrapped__"):
            continue
        function = (
            member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        )
        if (
            name.startswith("_")
            or not (inspect.isfunction(function) or isinstance(member, property))
            or not function.__doc__
        ):
            continue
        shown = f"`{name}`" if isinstance(member, property) else f"`{name}()`"
        yield f"#### {kind.__name__}.{name}\n"
        if not isinstance(member, property):
            yield f"```text\n{name}{_signature(function)}\n```\n"
        else:
            yield f"{shown}: `{_plain(inspect.signature(function).return_annotation)}`\n"
        yield _prose(function)


def _signature(value: Any) -> str:
    """One parameter a line where there are several; annotations as the code spells them."""
    signature = inspect.signature(value)
    shown: list[str] = []
    has_star = False
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not has_star:
            shown.append("*")
        has_star |= parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        kind = (
            "" if parameter.annotation is parameter.empty else f": {_plain(parameter.annotation)}"
        )
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        shown.append(f"{star}{parameter.name}{kind}{default}")
    end = (
        ""
        if signature.return_annotation in (signature.empty, "None", None)
        else f" -> {_plain(signature.return_annotation)}"
    )
    text = f"({', '.join(shown)}){end}"
    return (
        text
        if len(text) <= 100
        else "(\n" + "".join(f"    {line},\n" for line in shown) + f"){end}"
    )


def _plain(annotation: Any) -> str:
    return (
        annotation
        if isinstance(annotation, str)
        else getattr(annotation, "__name__", str(annotation))
    )


def _prose(value: Any) -> str:
    """The docstring: sentences as they are, tables and sessions as text."""
    parts = []
    for block in (inspect.getdoc(value) or "").split("\n\n"):
        is_code = block.startswith(">>>") or re.search(r"^\w+ {2,}\S", block, re.MULTILINE)
        plain = re.sub(r" *# doctest:.*", "", block)
        parts.append(f"```text\n{plain}\n```\n" if is_code else f"{plain}\n")
    return "\n".join(parts)


def errors_page() -> str:
    """errors.md as the server has it: headings with anchors, paragraphs, code."""
    text = ERRORS.read_text(encoding="utf-8")
    return PAGE_HEAD + "".join(_as_html(block) for block in text.strip().split("\n\n")) + PAGE_TAIL


def _as_html(block: str) -> str:
    level = len(block) - len(block.lstrip("#"))
    if level:
        title = html.escape(block[level:].strip())
        return (
            f'<h{level} id="{title.lower()}">{title}</h{level}>\n'
            if level > 1
            else f"<h1>{title}</h1>\n"
        )
    words = html.escape(block, quote=False).replace("\n", " ")
    # Two backticks enclose code that has one
    words = re.sub(r"(`+)( ?)(.+?)\2\1(?!`)", r"<code>\3</code>", words)
    words = re.sub(r"\*([^*]+)\*", r"<em>\1</em>", words)
    # The pages that links lead to are not served
    words = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", words)
    return f"<p>{words}</p>\n"


def pages() -> dict[Path, str]:
    """Each file that this script writes, and what it should hold."""
    served = Path(str(files("hybridtei.server").joinpath("page"))) / "errors.html"
    return {FOLDER / "reference.md": reference(), served: errors_page()}
