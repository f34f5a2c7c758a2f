"""What the several forms of `inputs` mean: a text, ids, or a list of these; texts and pairs for classification.

A union in msgspec holds one array type only, so the wire structs take `inputs` loosely, and these functions sort it out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hybridtei.outputs import Load
from hybridtei.server.http.body import SchemaError
from hybridtei.text.reader import Input
from hybridtei.text.tokenizer import Direction, Text

TruncationDirection = Literal["Left", "left", "Right", "right"]


@dataclass(frozen=True, slots=True)
class Inputs:
    """What `inputs` meant: its items, and whether it was a list of them."""

    items: list[Input]
    is_batch: bool

    @property
    def load(self) -> Load:
        """Unicode characters of texts, length of id lists: what `x-compute-characters` counts."""
        return Load(len(self.items), sum(map(len, self.items)), self.is_batch)


@dataclass(frozen=True, slots=True)
class Texts:
    """The same of `/predict`, whose items are texts and pairs."""

    items: list[Text]
    is_batch: bool

    @property
    def load(self) -> Load:
        """Of a pair, both sides count."""
        characters = sum(len(item) if isinstance(item, str) else len(item[0]) + len(item[1]) for item in self.items)
        return Load(len(self.items), characters, self.is_batch)


def direction(name: TruncationDirection) -> Direction:
    """The wire's four spellings -> ours."""
    return "left" if name in ("Left", "left") else "right"


def check_inputs(raw: Any, field: str = "inputs") -> None:
    """Raises SchemaError for what `parse_inputs` would not understand: ids and texts in one list."""
    if isinstance(raw, list):
        kinds = set(map(type, raw))  # of a million ids within twenty milliseconds
        if int in kinds and len(kinds) > 1:
            wrong = "data did not match any variant of untagged enum Input: ids and texts mixed in one list"
            raise SchemaError(f"{field}: {wrong}")


def parse_inputs(raw: Any) -> Inputs:
    """A text; a list of ids, which is one input (so is []); or a list of texts and id lists; see `check_inputs`."""
    if isinstance(raw, str) or not raw or type(raw[0]) is int:
        return Inputs([raw], is_batch=False)
    return Inputs(raw, is_batch=True)


def check_ids(raw: list[int | list[int]]) -> None:
    """Raises SchemaError for what `parse_ids` would not understand: ids and lists of them in one list."""
    if len(set(map(type, raw))) > 1:
        raise SchemaError("ids: data did not match any variant of untagged enum InputIds")


def parse_ids(raw: list[int | list[int]]) -> list[list[int]]:
    """A list of ids is one sequence, a list of lists is many; see `check_ids`."""
    return raw if raw and type(raw[0]) is list else [raw]  # type: ignore[list-item, return-value]


PREDICT_FORMS = (
    "expected a string, a pair of strings [string, string] or a batch of mixed strings and pairs "
    "[[string], [string, string], ...]"
)


def check_predict(raw: str | list[str | list[str]]) -> None:
    """Raises SchemaError for what `parse_predict` would not understand."""
    if isinstance(raw, str):
        return
    kinds = set(map(type, raw))
    if len(kinds) > 1:
        raise SchemaError(f"inputs: texts and lists mixed in one list, {PREDICT_FORMS}")
    parts = raw if kinds == {list} else [raw]
    if not {1, 2}.issuperset(map(len, parts)):
        wrong = next(length for length in map(len, parts) if not 1 <= length <= 2)
        raise SchemaError(f"inputs: invalid length {wrong}, {PREDICT_FORMS}")


def parse_predict(raw: Any) -> Texts:
    """A text, [text], [text, text] (one pair), or a batch of lists of these; see `check_predict`."""
    if isinstance(raw, str):
        return Texts([raw], is_batch=False)
    if isinstance(raw[0], str):
        return Texts([raw[0] if len(raw) == 1 else (raw[0], raw[1])], is_batch=False)
    return Texts([parts[0] if len(parts) == 1 else (parts[0], parts[1]) for parts in raw], is_batch=True)
