"""What a Python caller gives: the names of keywords, and their values."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

import msgspec

from hybridtei.errors import HybridTeiError, InvalidInput
from hybridtei.system.shape import explain, under

RENAMED = {
    "k": "`limit` is the number of hits, `rrf_k` the constant of rrf",
    "top_k": "`limit` is the number of hits",
    "top_n": "`limit` is the number of hits",
    "query_filter": "write `filter`",
    "batch_size": "leave it out, a pass has `max_batch_tokens` of `Encoder.load`",
    "convert_to_tensor": "write `torch.from_numpy(vectors.dense)`",
    "convert_to_numpy": "leave it out, `dense` of the result is an array",
    "normalize_embeddings": "write `normalize`",
    "show_progress_bar": "write `show_progress`",
}
# JSON's types in Python's words, as they stand in an error
PYTHON_TYPES = {"null": "None", "array": "list", "object": "dict"}
JSON_TYPE = re.compile(r"(?<=`|\s)(null|array|object)(?=`|\s)")


def check_names(call: str, names: Iterable[str], fields: Collection[str]) -> None:
    """Raises TypeError for a keyword that `call` does not have, naming the nearest one."""
    for name in names:
        if name in fields:
            continue
        nearest = get_close_matches(name, fields, 1, 0.5)
        hint = f"known: {', '.join(fields)}"
        if nearest:
            hint = f"did you mean `{nearest[0]}`?"
        raise TypeError(f"{call} has no option `{name}`: {RENAMED.get(name, hint)}")


def check_value(
    name: str, value: Any, hint: Any, error: type[HybridTeiError] = InvalidInput
) -> Any:
    """Return a Python caller's value as the annotated type: NumPy's numbers as Python's, a mapping
    as its struct. Raises `error`, naming field, value and type, if it does not have the type."""
    try:
        return msgspec.convert(value.item() if hasattr(value, "item") else value, hint)
    except msgspec.ValidationError as wrong:
        mistake = explain(wrong, value, hint)
        place = under(name, mistake.path)
        text = JSON_TYPE.sub(lambda match: PYTHON_TYPES[match[0]], mistake.text)
        raise error(f"`{place}` is {mistake.value or repr(value)}: {text}") from None


def listed(name: str, values: Any) -> list[Any]:
    """Return a Python caller's one text, or several values, as a list. Raises InvalidInput for any
    other type."""
    if isinstance(values, str):
        return [values]
    if isinstance(values, bytes | Mapping) or not isinstance(values, Iterable):
        raise InvalidInput(
            f"`{name}` is {values!r:.80}, of type {type(values).__name__}; it should be a text or "
            "a list"
        )
    return list(values)


def check_texts(name: str, texts: Iterable[object]) -> None:
    """Raises InvalidInput, naming the place, if one of a Python caller's values is no text."""
    for place, text in enumerate(texts):
        check_text(f"{name}[{place}]", text)


def check_text(name: str, text: object) -> None:
    """Raises InvalidInput if a Python caller's value is no text."""
    if not isinstance(text, str):
        raise InvalidInput(
            f"`{name}` is {text!r:.80}, of type {type(text).__name__}; it should be a text"
        )
