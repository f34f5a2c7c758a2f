"""A filter in Qdrant's JSON, checked before anything is done with it; a mistake is told by its place.

The surprise: a condition is one of nine kinds, so pydantic reports one mistake nine times, once for each kind it might have
been. The report that came deepest is about the kind that was meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from pydantic import ValidationError
from qdrant_client import models

from hybridtei.errors import InvalidInput

MAX_BYTES, MAX_DEPTH = 100_000, 16
PLAIN_TYPES = frozenset({"int", "str", "uuid", "float", "bool", "date", "datetime"})  # no field goes by these names


def filter_from(given: Any, field: str = "filter") -> models.Filter | None:
    """An object (or its JSON) -> a filter; None stays None. Raises InvalidInput, naming the place."""
    if given is None:
        return None
    if isinstance(given, str | bytes):
        try:
            given = orjson.loads(given)
        except orjson.JSONDecodeError as error:
            raise InvalidInput(f"`{field}` is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise InvalidInput(f"`{field}` should be an object with `must`, `should` or `must_not`, not {type(given).__name__}")
    if _depth(given) > MAX_DEPTH:
        raise InvalidInput(f"`{field}` is nested deeper than {MAX_DEPTH} levels")
    try:
        size = len(orjson.dumps(given))
    except TypeError as error:  # a number beyond 64 bits
        raise InvalidInput(f"`{field}` cannot be read: {error}") from None
    if size > MAX_BYTES:
        raise InvalidInput(f"`{field}` has more than {MAX_BYTES} bytes")
    try:
        return models.Filter.model_validate(given)
    except ValidationError as error:
        raise InvalidInput(_told(error, field)) from None


def _depth(value: Any) -> int:
    """Without recursion: it may be deeper than that goes."""
    deepest, level = 0, [value]
    while level and deepest <= MAX_DEPTH * 4:
        level = [
            item for one in level for item in (one.values() if isinstance(one, dict) else one) if isinstance(item, dict | list)
        ]
        deepest += 1
    return deepest // 2  # an object and its list are one level


def _told(error: ValidationError, field: str) -> str:
    mistakes = error.errors(include_url=False, include_context=False, include_input=False)
    deepest = max(mistakes, key=lambda mistake: (len(_place(mistake["loc"])), mistake["type"] != "extra_forbidden"))
    path = field
    for part in _place(deepest["loc"]):
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return f"`{path}`: {deepest['msg']}"


def _place(location: Sequence[int | str]) -> list[int | str]:
    """Without the names of the types that were tried."""
    return [
        part
        for part in location
        if isinstance(part, int) or (part[:1].islower() and "[" not in part and part not in PLAIN_TYPES)
    ]
