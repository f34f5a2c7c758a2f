"""A checkpoint's tokenizer: texts or ids -> `Encoding`s, and back.

The library's padding and truncation are off, so all threads and requests share one object; this
module truncates the ids. `encode_batch` releases the GIL; a short text goes through `encode`, which
does not.
"""

from __future__ import annotations

import json
import logging
import re
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from secrets import token_hex

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding as RawEncoding
from tokenizers import Tokenizer as RawTokenizer

from hybridtei.batch import Characters, Encoding, LocatedEncoding
from hybridtei.errors import InvalidInput, LoadError, TokenizerError
from hybridtei.models.checkpoint.tokenizer.settings import (
    UNCHANGED,
    TokenizerSettings,
    apply_settings,
    truncation_side,
)
from hybridtei.models.checkpoint.tokenizer.vocabularies import read_raw
from hybridtei.options import Direction

log = logging.getLogger(__name__)

# Characters of a token that `extent` reckons with at first
LONG_TOKEN = 32
# Shorter texts keep the GIL: taking it back from another thread takes longer than tokenising
SHORT_CHARACTERS = 256

# The checkpoint's template joins a pair to one input
Text = str | tuple[str, str]


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a text. `start` and `stop`: UTF-8 byte offsets, None for special tokens."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class Tokenizer:
    """A thread-safe wrapper of one `tokenizers.Tokenizer`."""

    def __init__(
        self,
        raw: RawTokenizer,
        *,
        has_token_types: bool = False,
        truncation_side: Direction = "right",
    ) -> None:
        raw.no_padding()
        raw.no_truncation()
        self._raw = raw
        self._has_token_types = has_token_types
        # The default of requests
        self.truncation_side = truncation_side
        self.vocab_size = raw.get_vocab_size(with_added_tokens=True)

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        has_token_types: bool = False,
        bare: bool = False,
        settings: TokenizerSettings = UNCHANGED,
    ) -> Tokenizer:
        """Read `tokenizer.json`, or build it from older files, and apply the settings of the other
        files.

        `bare`: texts get no special tokens. Raises LoadError if it cannot be parsed, or lacks a
        setting's token.
        """
        try:
            raw = read_raw(path.parent)
            if bare:
                raw.post_processor = None
            changed = apply_settings(raw, settings, path)
            if changed:
                log.info(
                    "%s: read with the settings of tokenizer_config.json: %s",
                    path,
                    ", ".join(changed),
                )
            return cls(
                raw, has_token_types=has_token_types, truncation_side=truncation_side(raw, settings)
            )
        except LoadError:
            raise
        except BaseException as error:
            # The library raises bare Exceptions, and its panic is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise LoadError(f"{path}: not a tokenizer: {error}") from error

    def encode(
        self, texts: Sequence[Text], *, add_special_tokens: bool = True, offsets: bool = False
    ) -> list[RawEncoding]:
        """Tokenise texts and pairs without truncation. `offsets`: also compute token offsets.
        Raises TokenizerError."""
        try:
            if len(texts) == 1 and isinstance(texts[0], str) and len(texts[0]) <= SHORT_CHARACTERS:
                return [self._raw.encode(texts[0], add_special_tokens=add_special_tokens)]
            encode_batch = self._raw.encode_batch if offsets else self._raw.encode_batch_fast
            return encode_batch(list(texts), add_special_tokens=add_special_tokens)
        except Exception as error:
            # The library raises bare Exceptions
            raise _refusal(texts, error) from error

    def cut(self, raw: RawEncoding, max_length: int, direction: Direction) -> Encoding:
        """Cut to at most `max_length` tokens. The post-processor's special tokens around the text
        stay.

        The result equals the library's own truncation, which cuts the text's tokens before it adds
        the template. In a pair the longer side is cut first.
        """
        input_ids = np.array(raw.ids, dtype=np.int64)
        type_ids = np.array(raw.type_ids, dtype=np.int64) if self._has_token_types else None
        if len(raw) <= max_length:
            return Encoding(input_ids, type_ids)
        places = _fitting_places(raw, max_length, direction)
        return Encoding(input_ids[places], None if type_ids is None else type_ids[places])

    def cut_located(
        self, raw: RawEncoding, text: str, max_length: int, direction: Direction, *, shift: int = 0
    ) -> LocatedEncoding:
        """Like `cut`, with each token's place in `text`. The tokenised part begins at character
        `shift`."""
        encoding = self.cut(raw, max_length, direction)
        special = np.array(raw.special_tokens_mask, dtype=bool)
        offsets = np.array(raw.offsets, dtype=np.int64).reshape(-1, 2) + shift
        offsets[special] = 0
        places = _fitting_places(raw, max_length, direction)
        extent: Characters | None = None
        if places is not None:
            special, offsets = special[places], offsets[places]
            text_offsets = offsets[~special & (offsets[:, 1] > 0)]
            extent = (0, 0)
            if len(text_offsets):
                extent = (int(text_offsets[0, 0].clip(0)), int(text_offsets[-1, 1]))
        return LocatedEncoding(
            encoding.input_ids,
            encoding.token_type_ids,
            extent=extent,
            text=text,
            offsets=offsets,
            special=special,
        )

    def extent(
        self, text: Text, max_length: int, direction: Direction, *, add_special_tokens: bool
    ) -> Characters:
        """The characters that `cut` leaves of a text, or of a pair's second text. Tokenises again,
        at first only as much as tokens of `LONG_TOKEN` characters need."""
        bound = max_length * LONG_TOKEN
        sides = (text,) if isinstance(text, str) else text
        parts = [side[-bound:] if direction == "left" else side[:bound] for side in sides]
        part: Text = parts[0] if isinstance(text, str) else (parts[0], parts[1])
        (raw,) = self.encode([part], add_special_tokens=add_special_tokens, offsets=True)
        if len(raw) <= max_length and part != text:
            part = text
            (raw,) = self.encode([text], add_special_tokens=add_special_tokens, offsets=True)
        places = _fitting_places(raw, max_length, direction)
        if places is None:
            places = np.arange(len(raw))
        last = len(sides) - 1
        side_of = raw.sequence_ids
        places_of_last = [place for place in places.tolist() if side_of[place] == last]
        if not places_of_last:
            return (0, 0)
        first_token = raw.token_to_chars(places_of_last[0]) or (0, 0)
        last_token = raw.token_to_chars(places_of_last[-1]) or (0, 0)
        shift = 0
        if direction == "left":
            shift = len(sides[-1]) - len(part if isinstance(part, str) else part[1])
        return (shift + first_token[0], shift + last_token[1])

    @property
    def continues_words(self) -> bool:
        """True if the vocabulary marks a word's later pieces (WordPiece's ##)."""
        return bool(getattr(self._raw.model, "continuing_subword_prefix", None))

    @cached_property
    def leading_specials(self) -> int:
        """The number of special tokens that the template puts before a text."""
        mask = self._raw.encode("a").special_tokens_mask
        return mask.index(0) if 0 in mask else len(mask)

    @cached_property
    def edges(self) -> tuple[int | None, int | None]:
        """The ids of the special tokens that begin and end each text; None: it has none there."""
        raw = self._raw.encode("a")
        ids, is_special = raw.ids, raw.special_tokens_mask
        if not ids:
            return None, None
        return ids[0] if is_special[0] else None, ids[-1] if is_special[-1] else None

    @cached_property
    def punctuation_ids(self) -> frozenset[int]:
        """Return the ids of tokens that are a single ASCII punctuation mark, at the start of a word
        or inside it."""
        ids = (
            self.id_of(prefix + mark)
            for prefix in ("", "##", "Ġ", "▁")
            for mark in string.punctuation
        )
        return frozenset(token_id for token_id in ids if token_id is not None)

    def id_of(self, token: str | None) -> int | None:
        if token is None:
            return None
        return self._raw.token_to_id(token)

    def around_specials(self, text: str) -> list[tuple[str, bool]]:
        """Split a trusted text into (piece, True if it is a special token), in order."""
        added = {token.content for token in self._raw.get_added_tokens_decoder().values()}
        if not added:
            return [(text, False)]
        pattern = "|".join(re.escape(content) for content in sorted(added, key=len, reverse=True))
        return [(piece, piece in added) for piece in re.split(f"({pattern})", text) if piece]

    @cached_property
    def literal(self) -> Tokenizer:
        """Return a tokenizer that reads special tokens in a text as plain characters."""
        described = json.loads(self._raw.to_str())
        specials = {token["content"] for token in described["added_tokens"]}
        described["added_tokens"] = []
        vocabulary = described["model"].get("vocab")
        # Unigram has them among its pieces; a random name matches no text
        if isinstance(vocabulary, list):
            secret = token_hex(16)
            for entry in vocabulary:
                if entry[0] in specials:
                    entry[0] = secret + entry[0]
        raw = RawTokenizer.from_str(json.dumps(described))
        return Tokenizer(raw, has_token_types=self._has_token_types)

    def text_of(self, input_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Decode ids to text. Raises InvalidInput for an id outside the vocabulary."""
        unknown = next((i for i in input_ids if self._raw.id_to_token(i) is None), None)
        if unknown is not None:
            last = self.vocab_size - 1
            reason = "which the vocabulary leaves out"
            if unknown > last:
                reason = f"but the vocabulary ends at {last}"
            raise InvalidInput(f"`inputs` holds the id {unknown}, {reason}")
        return self.decode(input_ids, skip_special_tokens=skip_special_tokens)

    def decode(self, input_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Decode ids to text. Ids outside the vocabulary are skipped."""
        # The library's `decode` keeps Python's lock: 50 ms for 30,000 ids
        (text,) = self._raw.decode_batch([list(input_ids)], skip_special_tokens=skip_special_tokens)
        return text

    def pieces(self, input_ids: Iterable[int]) -> list[str]:
        """Return the vocabulary's spelling of each id (`##ing`, `▁the`). Unlike decoded text, it is
        unique."""
        return [self._raw.id_to_token(int(i)) or f"[id {i}]" for i in input_ids]

    def tokens(self, text: str, *, add_special_tokens: bool) -> Iterator[Token]:
        """Return a lazy sequence of a text's tokens, since 60,000 tokens at once take 25 MB. Raises
        TokenizerError."""
        (raw,) = self.encode([text], add_special_tokens=add_special_tokens, offsets=True)
        # The library counts characters, the API counts bytes
        widths = (len(character.encode()) for character in text)
        byte_at = np.fromiter(accumulate(widths, initial=0), dtype=np.int64, count=len(text) + 1)
        for place, (token_id, special) in enumerate(
            zip(raw.ids, raw.special_tokens_mask, strict=True)
        ):
            if special:
                yield Token(token_id, self.pieces([token_id])[0], True, None, None)
            else:
                # `raw.offsets` would make a list for all tokens
                start, stop = raw.token_to_chars(place) or (0, 0)
                yield Token(
                    token_id, text[start:stop], False, int(byte_at[start]), int(byte_at[stop])
                )


def _refusal(texts: Sequence[Text], error: Exception) -> TokenizerError:
    for text in texts:
        try:
            for side in (text,) if isinstance(text, str) else text:
                side.encode()
        except UnicodeEncodeError as surrogate:
            # The library's own message would blame the type
            return TokenizerError(
                f"tokenizer error: a lone surrogate at character {surrogate.start} of an input"
            )
    return TokenizerError(f"tokenizer error {error}")


def _fitting_places(
    raw: RawEncoding, max_length: int, direction: Direction
) -> NDArray[np.intp] | None:
    """Return the places of the tokens that fit, or None if all fit."""
    if len(raw) <= max_length:
        return None
    special = np.array(raw.special_tokens_mask, dtype=bool)
    room = max(max_length - int(special.sum()), 0)
    if raw.n_sequences == 1:
        sides, lengths = [np.flatnonzero(~special)], [room]
    else:
        side_of = np.array([-1 if side is None else side for side in raw.sequence_ids])
        sides = [np.flatnonzero(side_of == side) for side in (0, 1)]
        lengths = [*shares(len(sides[0]), len(sides[1]), room)]
    cut = [
        side[len(side) - keep :] if direction == "left" else side[:keep]
        for side, keep in zip(sides, lengths, strict=True)
    ]
    return np.sort(np.concatenate([np.flatnonzero(special), *cut]))[:max_length]


def shares(first: int, second: int, room: int) -> tuple[int, int]:
    """Return the number of tokens to keep of each side of a pair: the longer side is cut first,
    then both get half.

    Source: `longest_first` of the tokenizers library. An odd token goes to the longer side; with
    equal sides, to the second.
    """
    short, long = sorted((first, second))
    long = max(short, room - short) if short <= room else short
    if short + long > room:
        short = room // 2
        long = room - short
    return (short, long) if first <= second else (long, short)


# Characters of a name that a message repeats
LONGEST_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Prompts:
    """The checkpoint's table of prompts (None: it has none), and the default prompt.

    `adapters`: the names of the model's adapters; each has a prompt of the same name.
    `default_adapter`: the adapter without a prompt's name. `own`: the checkpoint's default prompt,
    which only tasks that TEI lacks use; None if the server has a default.
    """

    table: Mapping[str, str] | None = None
    default: str | None = None
    adapters: Sequence[str] = ()
    default_adapter: int = 0
    own: str | None = None

    @classmethod
    def configure(
        cls,
        table: Mapping[str, str] | None,
        *,
        default_prompt: str | None,
        default_prompt_name: str | None,
        adapters: Sequence[str] = (),
        own: str | None = None,
    ) -> Prompts:
        """Apply the server's default, else keep the checkpoint's `own`. Raises LoadError for an
        unknown name or two defaults."""
        if default_prompt is not None and default_prompt_name is not None:
            raise LoadError(
                "`default-prompt` and `default-prompt-name` exclude each other: give one"
            )
        prompts = cls(table, default_prompt, adapters)
        if default_prompt_name is None:
            return replace(prompts, own=own if default_prompt is None else None)
        try:
            default = prompts.named(default_prompt_name)
        except InvalidInput as error:
            raise LoadError(str(error)) from error
        return replace(
            prompts, default=default, default_adapter=prompts.adapter(default_prompt_name)
        )

    def adapter(self, name: str | None) -> int:
        """The number of a prompt's adapter, as in `Encoding`; 0: none."""
        if name is None:
            return self.default_adapter
        return self.adapters.index(name) + 1 if name in self.adapters else 0

    def named(self, name: str | None) -> str | None:
        """The prompt called `name`, or for None the default. Raises InvalidInput with TEI's
        message, which clients parse."""
        if name is None:
            return self.default
        shown = name if len(name) <= LONGEST_SHOWN else f"{name[:LONGEST_SHOWN]}…"
        set_to = f"`default-prompt-name` is set to `{shown}` but"
        if self.table is None:
            raise InvalidInput(
                f"{set_to} no prompts were found in the Sentence Transformers configuration"
            )
        if name not in self.table:
            names = json.dumps(list(self.table), ensure_ascii=False)
            raise InvalidInput(
                f"{set_to} it was not found in the Sentence Transformers prompts. Available "
                f"prompts: {names}"
            )
        return self.table[name]
