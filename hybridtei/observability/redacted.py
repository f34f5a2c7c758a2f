"""Settings as one line for the log, in TEI's words, without what a log should not hold.

What is shown partly keeps the outermost letters, as TEI has it: `BAA*/***-*****-**-v1.5`. An API key, which TEI prints, is
never shown: whoever collects logs may not be who may call the server.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from hybridtei.cli.flags import fields_of

HIDDEN = "[hidden]"
LETTERS_MOST, LETTERS_LEAST = 3, 5  # shown at either end; below so many letters none is


def masked(text: str) -> str:
    """Stars for all letters and digits but a third of them, at most three, at either end; anything else stays."""
    letters = sum(character.isalnum() for character in text)
    ends = min(letters // 3, LETTERS_MOST) if letters >= LETTERS_LEAST else 0
    shown, place = [], 0
    for character in text:
        if character.isalnum():
            place += 1
        hides = character.isalnum() and ends < place <= letters - ends
        shown.append("*" if hides else character)
    return "".join(shown)


def described(settings: Sequence[msgspec.Struct], **beside: Any) -> str:
    """`Args { model_id: "BAA*/***", revision: None, … }`; `beside`: values to show besides, or instead."""
    parts = {}
    for one in settings:
        for field, _, meta in fields_of(type(one)):
            value = beside.pop(field.name, getattr(one, field.name))
            parts[field.name] = _shown(value, (meta.extra or {}).get("shown"))
    parts |= {name: _shown(value, None) for name, value in beside.items() if value is not None}
    return f"Args {{ {', '.join(f'{name}: {value}' for name, value in parts.items())} }}"


def _shown(value: Any, how: str | None) -> str:
    if isinstance(value, str):
        text = HIDDEN if how == "never" else masked(value) if how == "partly" else value
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_shown(item, how) for item in value)}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
