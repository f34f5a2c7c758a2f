"""The words of a `tokenizer.json` and their ids, whatever kind of model it holds; without building the tokenizer."""

from __future__ import annotations

from pathlib import Path

from hybridtei.checkpoint.files import read_object
from hybridtei.errors import LoadError


def read_vocabulary(file: Path) -> dict[str, int]:
    """Every token, added ones too. Raises LoadError, naming the file."""
    described = read_object(file)
    try:
        listed = described["model"]["vocab"]
        # Of Unigram, a list of pieces and their scores.
        words = dict(listed) if isinstance(listed, dict) else {entry[0]: place for place, entry in enumerate(listed)}
        added = {token["content"]: token["id"] for token in described.get("added_tokens") or []}
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise LoadError(f"{file}: its `model` should hold a `vocab`, and `added_tokens` a `content` and `id` each") from error
    return {**words, **added}
