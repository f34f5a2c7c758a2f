"""Why a filter finds nothing: no point has one of its keys."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from itertools import islice
from typing import Any

from hybridtei.retrieval.store.base import Store
from hybridtei.retrieval.store.query import Filter

# Points whose keys are compared with a filter's
SAMPLE = 10
# Keys that are compared with a filter's, and their characters: more would take seconds
MAX_NAMES, MAX_CHARACTERS = 1_000, 200


async def absent_key(store: Store, collection: str, condition: Filter) -> str | None:
    """A sentence about the first key of the filter that no point has, with the nearest one."""
    for key in _keys(condition):
        filled = Filter(must_not=Filter(key=key, is_empty=True))
        points, _ = await store.scroll(
            collection, limit=1, scroll_filter=filled, with_payload=False
        )
        if points:
            continue
        points, _ = await store.scroll(collection, limit=SAMPLE)
        names = {name for point in points for name in islice(_names(point.payload), MAX_NAMES)}
        short = sorted(name for name in names if len(name) <= MAX_CHARACTERS)
        nearest = [name for name in short if name.endswith(f".{key}")]
        nearest += get_close_matches(key[:MAX_CHARACTERS], short, 1)
        return f"no point has `{key}`" + "".join(
            f"; did you mean `{name}`?" for name in nearest[:1]
        )
    return None


def _keys(condition: Filter) -> Iterator[str]:
    """The keys that should have a value."""
    if condition.key is not None and condition.is_empty is None and condition.is_null is None:
        yield condition.key
    for group in (condition.must, condition.should):
        parts = group if isinstance(group, list) else [group]
        for part in filter(None, parts):
            yield from _keys(part)


def _names(payload: dict[str, Any]) -> Iterator[str]:
    for name, value in payload.items():
        yield name
        if isinstance(value, dict):
            yield from (f"{name}.{inner}" for inner in value)
