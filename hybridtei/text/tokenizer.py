"""A checkpoint's `tokenizer.json` as the engine needs it: texts or ids in, `Encoding`s out, and back.

The tokenizer is used without padding and without truncation of its own, so one object serves all threads and all requests:
truncation happens here, on the ids. Batches go through `encode_batch`, which frees the GIL; `encode` does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding as RawEncoding
from tokenizers import Tokenizer as RawTokenizer

from hybridtei.batch import Encoding
from hybridtei.errors import InvalidInput, LoadError, TokenizerError

Direction = Literal["left", "right"]


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a text; `start` and `stop` are UTF-8 byte offsets, None for special tokens."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class Tokenizer:
    """Thread-safe wrapper around one `tokenizers.Tokenizer`."""

    def __init__(self, raw: RawTokenizer, *, has_token_types: bool = False) -> None:
        raw.no_padding()
        raw.no_truncation()
        self._raw = raw
        self._has_token_types = has_token_types
        self.vocab_size = raw.get_vocab_size(with_added_tokens=True)

    @classmethod
    def load(cls, path: Path, *, has_token_types: bool = False) -> Tokenizer:
        """Read `tokenizer.json`. Raises LoadError if it cannot be parsed."""
        try:
            return cls(RawTokenizer.from_file(str(path)), has_token_types=has_token_types)
        except Exception as error:  # the library raises bare Exception
            raise LoadError(f"{path}: not a tokenizer: {error}") from error

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[RawEncoding]:
        """All texts, whole. Raises TokenizerError."""
        try:
            return self._raw.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except Exception as error:  # the library raises bare kinds
            raise _refusal(texts, error) from error

    def cut(self, raw: RawEncoding, max_length: int, direction: Direction) -> Encoding:
        """To at most `max_length` tokens, keeping the special tokens that the post-processor put around the text.

        Equal to the tokenizer's own truncation: the text's tokens are cut first, then the template is laid around.
        """
        input_ids = np.array(raw.ids, dtype=np.int64)
        type_ids = np.array(raw.type_ids, dtype=np.int64) if self._has_token_types else None
        if len(input_ids) > max_length:
            kept = _kept(np.array(raw.special_tokens_mask, dtype=bool), max_length, direction)
            input_ids = input_ids[kept]
            type_ids = None if type_ids is None else type_ids[kept]
        return Encoding(input_ids, type_ids)

    def text_of(self, input_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text whose tokens the ids are. Raises InvalidInput on an id that the vocabulary does not have."""
        unknown = next((i for i in input_ids if self._raw.id_to_token(i) is None), None)
        if unknown is not None:
            last = self.vocab_size - 1
            why = f"but the vocabulary ends at {last}" if unknown > last else "which the vocabulary leaves out"
            raise InvalidInput(f"`inputs` holds the id {unknown}, {why}")
        return self._raw.decode(list(input_ids), skip_special_tokens=skip_special_tokens)

    def decode(self, input_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of the ids; ids outside the vocabulary are left out."""
        return self._raw.decode(list(input_ids), skip_special_tokens=skip_special_tokens)

    def pieces(self, input_ids: NDArray[np.int64]) -> list[str]:
        """The vocabulary's own spelling of each id (`##ing`, `▁the`): unlike decoded text, no two ids share one."""
        return [self._raw.id_to_token(int(i)) or f"[id {i}]" for i in input_ids]

    def tokens(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[Token]]:
        """Every token of every text, with its place in the text."""
        try:
            encodings = self._raw.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        except Exception as error:
            raise _refusal(texts, error) from error
        return [_tokens(text, raw) for text, raw in zip(texts, encodings, strict=True)]


def _refusal(texts: Sequence[str], error: Exception) -> TokenizerError:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as surrogate:  # the library's own words for it would blame the type
            return TokenizerError(f"tokenizer error: a lone surrogate at character {surrogate.start} of an input")
    return TokenizerError(f"tokenizer error {error}")


def _kept(special: NDArray[np.bool_], max_length: int, direction: Direction) -> NDArray[np.intp]:
    text = np.flatnonzero(~special)
    room = max(max_length - int(special.sum()), 0)
    text = text[len(text) - room :] if direction == "left" else text[:room]
    return np.sort(np.concatenate([np.flatnonzero(special), text]))[:max_length]


def _tokens(text: str, raw: RawEncoding) -> list[Token]:
    data = text.encode()
    # The library counts characters; the wire counts bytes.
    width = np.fromiter((len(character.encode()) for character in text), dtype=np.int64, count=len(text))
    byte_at = np.concatenate(([0], np.cumsum(width)))
    return [
        Token(token_id, piece, True, None, None) if special else _token(data, token_id, int(byte_at[start]), int(byte_at[stop]))
        for token_id, piece, special, (start, stop) in zip(
            raw.ids, raw.tokens, raw.special_tokens_mask, raw.offsets, strict=True
        )
    ]


def _token(data: bytes, token_id: int, start: int, stop: int) -> Token:
    return Token(token_id, data[start:stop].decode(errors="replace"), False, start, stop)
