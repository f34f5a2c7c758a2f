"""Inputs of a request -> encodings. Enforces the model's limits in TEI's order, with TEI's
messages.

An input is a text or a list of ids. Ids are decoded to text and tokenised again without special
tokens, as in TEI: clients that send ids rely on the same counts. Inputs of late-interaction models
have their side's marker, and queries are expanded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np
from tokenizers import Encoding as RawEncoding

from hybridtei.batch import UNKNOWN, Characters, Encoding, LocatedEncoding, runs
from hybridtei.errors import EmptyInput, InvalidInput, RequestError
from hybridtei.models.checkpoint.late import Side
from hybridtei.models.checkpoint.rankers import PairTemplate, filled
from hybridtei.models.text.tokenizer import Prompts, Text, Token, Tokenizer
from hybridtei.options import Direction
from hybridtei.system.own_thread import check_awaited
from hybridtei.system.turns import give_way

Input = str | list[int]
T = TypeVar("T", str, list[int], Input)
AnyText = TypeVar("AnyText", bound=Text)
Item = TypeVar("Item")
AnyEncoding = TypeVar("AnyEncoding", bound=Encoding)
# TEI's bound on the work of one input
CHARACTERS_PER_TOKEN = 250
# Tokenised at once; before truncation the tokenizer takes some 400 bytes a token
PORTION_CHARACTERS = 65_536


@dataclass(slots=True)
class _Ready:
    """A text to tokenise, True if it gets special tokens, and its adapter.

    `begin`: the place in the input of its first character, or of that of a pair's second text;
    below 0: of the prompt; None: the input is a list of ids. `is_cut`: it lacks characters of the
    input.
    """

    text: Text
    special_tokens: bool = True
    adapter: int = 0
    begin: int | None = 0
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class TextReader:
    """A tokenizer with a model's limits and prompts. Thread-safe."""

    tokenizer: Tokenizer
    prompts: Prompts
    max_input_length: int
    vocab_size: int
    # The id removed from the end of an input
    skipped: int | None = None

    def read(
        self,
        inputs: Sequence[Input],
        *,
        truncate: bool,
        direction: Direction | None = None,
        prompt_name: str | None = None,
        allow_empty: bool = False,
        special_tokens: bool = True,
    ) -> list[Encoding]:
        """Return one encoding an input, in order. Raises RequestError for the first input that
        breaks a rule."""
        side = direction or self.tokenizer.truncation_side
        prepare = partial(
            self._prepare,
            truncate=truncate,
            direction=side,
            prompt_name=prompt_name,
            allow_empty=allow_empty,
        )
        ready, refused = _until_refused(inputs, prepare)
        texts = [item.text for item in ready]
        wishes = {item.special_tokens for item in ready}
        # Most requests are small, and all their texts get special tokens, or none
        if refused is None and len(wishes) == 1 and sum(map(len, texts)) <= PORTION_CHARACTERS:
            raws = self.tokenizer.encode(texts, add_special_tokens=special_tokens and wishes.pop())
            return self._all_fitted(zip(ready, raws, strict=True), truncate, side)
        if not special_tokens:
            ready = [replace(item, special_tokens=False) for item in ready]
        encodings = self._all_fitted(self._tokenised(ready), truncate, side)
        if refused is not None:
            raise refused
        return encodings

    def read_pairs(
        self, inputs: Sequence[Text], *, truncate: bool, direction: Direction | None = None
    ) -> list[Encoding]:
        """Return one encoding a text or pair of texts, in order. Raises RequestError for the first
        that breaks a rule."""
        side = direction or self.tokenizer.truncation_side
        ready, refused = _until_refused(
            inputs, lambda item: self._prepare_text(item, truncate, side)
        )
        encodings = self._all_fitted(self._tokenised(ready), truncate, side)
        if refused is not None:
            raise refused
        return encodings

    def ask(
        self,
        template: PairTemplate,
        pairs: Sequence[tuple[str, str]],
        *,
        instruction: str | None = None,
        truncate: bool,
        direction: Direction | None = None,
    ) -> list[Encoding]:
        """Fill the template with each pair (query, document); return one encoding a pair. Users'
        texts never become special tokens. Raises the errors of `read`."""
        side = direction or self.tokenizer.truncation_side
        ready, refused = _until_refused(
            pairs, lambda pair: self._prepare_text(pair, truncate, side)
        )
        if instruction is None:
            instruction = template.instruction
        prefix, suffix = (self._trusted(text) for text in (template.prefix, template.suffix))
        pieces = [
            piece for part in template.parts for piece in self.tokenizer.around_specials(part)
        ]
        slots = [piece for piece, special in pieces if not special]
        texts = [filled(slot, instruction, item.text) for item in ready for slot in slots]
        # The tokens of all texts, question after question
        tokenizer = self.tokenizer.literal
        raws = (
            raw
            for portion in _portions(texts)
            for raw in tokenizer.encode(portion, add_special_tokens=False)
        )
        encodings: list[Encoding] = []
        room = self.max_input_length - len(prefix) - len(suffix)
        for item in ready:
            body, (query, document) = self._body(pieces, raws), (item.text[0], item.text[1])
            # What comes after the document, such as the query, is not cut before it
            while truncate and document and len(body) > room and not template.ends_with_document:
                (raw,) = tokenizer.encode([document], add_special_tokens=False, offsets=True)
                document = _kept(document, raw, len(raw) - len(body) + room, side)
                texts = [filled(slot, instruction, (query, document)) for slot in slots]
                body = self._body(pieces, iter(tokenizer.encode(texts, add_special_tokens=False)))
            with _place_in_errors(encodings):
                encodings.append(self._fitted_question(prefix, body, suffix, truncate, side))
        if refused is not None:
            raise refused
        return encodings

    def _body(self, pieces: Sequence[tuple[str, bool]], raws: Iterator[RawEncoding]) -> list[int]:
        return [
            token_id
            for piece, special in pieces
            for token_id in (self._trusted(piece) if special else next(raws).ids)
        ]

    def _trusted(self, text: str) -> list[int]:
        return list(self.tokenizer.encode([text], add_special_tokens=False)[0].ids)

    def _fitted_question(
        self,
        prefix: list[int],
        body: list[int],
        suffix: list[int],
        truncate: bool,
        direction: Direction,
    ) -> Encoding:
        room = self.max_input_length - len(prefix) - len(suffix)
        total = len(prefix) + len(body) + len(suffix)
        if room < 1 or (total > self.max_input_length and not truncate):
            raise InvalidInput(
                f"`inputs` must have less than {self.max_input_length} tokens. Given: {total}"
            )
        input_ids = np.array([*prefix, *_cut(body, room, direction), *suffix], dtype=np.int64)
        extent = UNKNOWN if total > self.max_input_length else None
        return self._finished(Encoding(input_ids, extent=extent))

    def locate(
        self,
        texts: Sequence[str],
        *,
        truncate: bool,
        direction: Direction | None = None,
        prompt_name: str | None = None,
        allow_empty: bool = False,
        times: int = 1,
    ) -> list[LocatedEncoding]:
        """Like `read`, with each token's place in its text. Places in the prompt are below 0.

        `times`: cut texts to this multiple of the model's length, for windows. The bound of
        characters stays.
        """
        side = direction or self.tokenizer.truncation_side
        ready, refused = _until_refused(
            texts,
            lambda text: self._prepare(text, truncate, side, prompt_name, allow_empty=allow_empty),
        )
        prompt = self.prompts.named(prompt_name) or ""
        encodings: list[LocatedEncoding] = []
        # A refused text has no tokens, nor have those after it
        for text, (item, raw) in zip(texts, self._tokenised(ready, offsets=True), strict=False):
            if not truncate:
                with _place_in_errors(encodings):
                    self._check_length(raw)
            shift = len(text) - len(item.text) if side == "left" else -len(prompt)
            located = self.tokenizer.cut_located(
                raw, text, times * self.max_input_length, side, shift=shift
            )
            encodings.append(self._finished(located, item.adapter))
        if refused is not None:
            raise refused
        return encodings

    def cut_to(
        self, texts: Sequence[str], tokens: int, direction: Direction = "right"
    ) -> list[str]:
        """Cut each text to `tokens` tokens. Characters beyond any model's length are cut off
        before tokenising."""
        limit = min(tokens, self.max_input_length) * CHARACTERS_PER_TOKEN
        parts: list[str] = []
        for portion in _portions([_cut(text, limit, direction) for text in texts]):
            raws = self.tokenizer.encode(portion, add_special_tokens=False, offsets=True)
            parts += [
                _kept(text, raw, tokens, direction) for text, raw in zip(portion, raws, strict=True)
            ]
        return parts

    def windows(
        self, text: str, room: int, limit: int, *, truncate: bool, begin: int = 0
    ) -> Iterator[Characters]:
        """Yield the characters of the windows in which a text is read from character `begin` on: at
        most `limit`, of `room` tokens, each with the last eighth of the one before. Without
        `truncate` the last one reaches to the end of the text, even beyond `room`.

        The text is tokenised in portions, as far as windows are asked for."""
        portion, longest = PORTION_CHARACTERS, room * CHARACTERS_PER_TOKEN
        cut_windows = limit if truncate else limit - 1
        while cut_windows > 0 or not truncate:
            end = min(begin + portion, len(text))
            check_awaited()
            give_way()
            (raw,) = self.tokenizer.encode(
                [text[begin:end]], add_special_tokens=False, offsets=True
            )
            # Windows that end before the portion's last token
            first = start = 0
            while cut_windows > 0 and first + room < len(raw):
                _, stop = raw.token_to_chars(first + room - 1) or (0, 0)
                yield begin + start, begin + stop
                cut_windows -= 1
                first += room - room // 8
                start, _ = raw.token_to_chars(first) or (0, 0)
            if end == len(text) or cut_windows == 0:
                if cut_windows > 0 or not truncate:
                    yield begin + start, len(text)
                return
            if first:
                # The next portion begins with the next window
                begin += max(start, 1)
            elif portion < longest:
                portion = min(2 * portion, longest)
            else:
                # These characters are a window, however few tokens they have
                yield begin, end
                cut_windows, begin = cut_windows - 1, end

    def tokens(
        self, text: str, *, add_special_tokens: bool, prompt_name: str | None
    ) -> Iterator[Token]:
        """Return all tokens of a text, without truncation. Raises RequestError."""
        prepared = str(self._prepare(text, False, "right", prompt_name).text)
        return self.tokenizer.tokens(prepared, add_special_tokens=add_special_tokens)

    def check_ids(self, input_ids: Sequence[int], field: str) -> None:
        """Raises InvalidInput for more ids than the allowed characters of an input."""
        if len(input_ids) > self._max_characters:
            raise InvalidInput(
                f"`{field}` must have less than {self._max_characters} ids. Given: {len(input_ids)}"
            )

    def _prepare(
        self,
        item: Input,
        truncate: bool,
        direction: Direction,
        prompt_name: str | None,
        *,
        allow_empty: bool = False,
    ) -> _Ready:
        if not item and not allow_empty:
            raise EmptyInput("`inputs` cannot be empty")
        prompts = self.prompts
        prompt, adapter = prompts.default, prompts.default_adapter
        if prompt_name is not None:
            prompt, adapter = prompts.named(prompt_name), prompts.adapter(prompt_name)
        begin: int | None = -len(prompt or "")
        size = len(item)
        if size > self.max_input_length * CHARACTERS_PER_TOKEN:
            item = self._bounded(item, truncate, direction)
        is_cut = len(item) < size
        if is_cut and direction == "left":
            begin = size - len(item) - len(prompt or "")
        # With a prompt, special tokens around the whole text replace the special tokens in the ids.
        adds_specials = isinstance(item, str) or prompt is not None
        # A single id may decode to a long text
        if not isinstance(item, str):
            item = self._bounded(
                self.tokenizer.text_of(item, skip_special_tokens=adds_specials), truncate, direction
            )
            begin = None
        text = (prompt or "") + item
        return _Ready(text, adds_specials, adapter, begin, is_cut)

    def _prepare_text(self, item: Text, truncate: bool, direction: Direction) -> _Ready:
        if isinstance(item, str):
            return self._prepare(item, truncate, direction, None)
        if not any(item):
            raise EmptyInput("`inputs` cannot be empty")
        if self.prompts.named(None) is not None:
            raise InvalidInput("`prompt_name` cannot be set with dual inputs")
        limit, total = self._max_characters, len(item[0]) + len(item[1])
        if total > limit:
            if not truncate:
                raise InvalidInput(
                    f"`inputs` must have less than {limit} characters. Given: {total}"
                )
            size = len(item[1])
            item = (_cut(item[0], limit // 2, direction), _cut(item[1], limit // 2, direction))
            begin = size - len(item[1]) if direction == "left" else 0
            return _Ready(item, begin=begin, is_cut=True)
        return _Ready(item)

    @property
    def _max_characters(self) -> int:
        return self.max_input_length * CHARACTERS_PER_TOKEN

    def _bounded(self, item: T, truncate: bool, direction: Direction) -> T:
        limit = self._max_characters
        if len(item) > limit and not truncate:
            raise InvalidInput(
                f"`inputs` must have less than {limit} characters. Given: {len(item)}"
            )
        return _cut(item, limit, direction)

    def _tokenised(
        self, ready: Sequence[_Ready], *, offsets: bool = False
    ) -> Iterator[tuple[_Ready, RawEncoding]]:
        """Yield each text with its tokens, before truncation. At most a portion's tokens are in
        memory."""
        rest = iter(ready)
        for texts in _portions([item.text for item in ready]):
            raws: dict[int, RawEncoding] = {}
            items = [*islice(rest, len(texts))]
            for special_tokens in (True, False):
                places = [
                    i for i, item in enumerate(items) if item.special_tokens is special_tokens
                ]
                if places:
                    chosen = [texts[i] for i in places]
                    encodings = self.tokenizer.encode(
                        chosen, add_special_tokens=special_tokens, offsets=offsets
                    )
                    raws.update(zip(places, encodings, strict=True))
            yield from ((item, raws[i]) for i, item in enumerate(items))

    def _check_length(self, raw: RawEncoding) -> None:
        if len(raw) > self.max_input_length:
            raise InvalidInput(
                f"`inputs` must have less than {self.max_input_length} tokens. Given: {len(raw)}"
            )

    def _all_fitted(
        self,
        tokenised: Iterable[tuple[_Ready, RawEncoding]],
        truncate: bool,
        direction: Direction,
    ) -> list[Encoding]:
        encodings: list[Encoding] = []
        try:
            for item, raw in tokenised:
                encodings.append(self._fitted(raw, item, truncate, direction))
        except RequestError as error:
            error.place = len(encodings)
            raise
        return encodings

    def _fitted(
        self, raw: RawEncoding, item: _Ready, truncate: bool, direction: Direction
    ) -> Encoding:
        if not truncate:
            self._check_length(raw)
        encoding = self.tokenizer.cut(raw, self.max_input_length, direction)
        if item.is_cut or len(raw) > self.max_input_length:
            encoding = replace(encoding, extent=self._extent(raw, item, direction))
        return self._finished(encoding, item.adapter)

    def _extent(self, raw: RawEncoding, item: _Ready, direction: Direction) -> Characters:
        """The characters that a cut left of an input."""
        if item.begin is None:
            return UNKNOWN
        first, end = self.tokenizer.extent(
            item.text,
            self.max_input_length,
            direction,
            add_special_tokens=1 in raw.special_tokens_mask,
        )
        return (max(first + item.begin, 0), max(end + item.begin, 0))

    def _finished(self, encoding: AnyEncoding, adapter: int = 0) -> AnyEncoding:
        input_ids = encoding.input_ids
        if not len(input_ids):
            raise InvalidInput("`inputs` holds an input that becomes no token at all")
        # An unknown id would fail the whole batch
        if input_ids.max() >= self.vocab_size:
            raise InvalidInput(
                f"`inputs` becomes the token id {input_ids.max()}, but the model knows ids below "
                f"{self.vocab_size}"
            )
        if self.skipped is not None and input_ids[-1] == self.skipped:
            encoding = self._ended(encoding)
        return replace(encoding, adapter=adapter) if adapter else encoding

    def _ended(self, encoding: AnyEncoding) -> AnyEncoding:
        """Remove `skipped` tokens from the end. If all tokens are skipped ones, keep the first, as
        transformers does."""
        others = np.flatnonzero(encoding.input_ids != self.skipped)
        length = 1
        if len(others):
            length = int(others[-1]) + 1
        columns = {
            name: getattr(encoding, name, None)
            for name in ("input_ids", "token_type_ids", "offsets", "special")
        }
        return replace(
            encoding,
            **{name: column[:length] for name, column in columns.items() if column is not None},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SideReader(TextReader):
    """A reader that leaves room for the side's marker. `longest`: the side's longest input."""

    side: Side
    longest: int

    def _finished(self, encoding: AnyEncoding, adapter: int = 0) -> AnyEncoding:
        encoding = TextReader._finished(self, encoding, adapter)
        return _widened(
            _marked(encoding, self.side, self.tokenizer.leading_specials), self.side, self.longest
        )


def of_side(reader: TextReader, side: Side) -> SideReader:
    """Return a reader of the side's inputs. It locates tokens only on a side without expansion."""
    longest = min(reader.max_input_length, side.length or reader.max_input_length)
    if side.expansion is not None:
        floor = min(side.expansion.length, reader.max_input_length)
        longest = floor if side.expansion.fixed else max(longest, floor)
    return SideReader(
        tokenizer=reader.tokenizer,
        prompts=replace(reader.prompts, default=side.text or None),
        max_input_length=longest - (side.marker is not None),
        vocab_size=reader.vocab_size,
        skipped=reader.skipped,
        side=side,
        longest=longest,
    )


def _marked(encoding: AnyEncoding, side: Side, place: int) -> AnyEncoding:
    if side.marker is None:
        return encoding
    types = encoding.token_type_ids
    if types is not None:
        types = np.insert(types, place, 0)
    input_ids = np.insert(encoding.input_ids, place, side.marker)
    marked = replace(encoding, input_ids=input_ids, token_type_ids=types)
    if not isinstance(marked, LocatedEncoding):
        return marked
    return replace(
        marked,
        offsets=np.insert(marked.offsets, place, 0, axis=0),
        special=np.insert(marked.special, place, values=True),
    )


def _widened(encoding: AnyEncoding, side: Side, longest: int) -> AnyEncoding:
    expansion = side.expansion
    missing = 0 if expansion is None else min(expansion.length, longest) - len(encoding)
    if expansion is None or missing <= 0:
        return encoding
    types = encoding.token_type_ids
    if types is not None:
        types = np.pad(types, (0, missing))
    input_ids = np.pad(encoding.input_ids, (0, missing), constant_values=expansion.token_id)
    unseen = 0 if expansion.attend else missing
    return replace(encoding, input_ids=input_ids, token_type_ids=types, unseen=unseen)


def _portions(texts: Sequence[AnyText]) -> Iterator[Sequence[AnyText]]:
    """Yield the texts in portions of at most `PORTION_CHARACTERS`; a longer text is alone in its
    portion. Between two portions others' short texts are tokenised. Raises CancelledError if
    nothing awaits them any more."""
    sizes = [len(text) if isinstance(text, str) else sum(map(len, text)) for text in texts]
    for begin, end in runs(sizes, PORTION_CHARACTERS):
        if begin:
            check_awaited()
            give_way()
        yield texts[begin:end]


def _kept(text: str, raw: RawEncoding, tokens: int, direction: Direction) -> str:
    if len(raw) <= tokens or tokens < 1:
        return text * (tokens > 0)
    # `raw.offsets` would make a list for all tokens
    if direction == "left":
        first, _ = raw.token_to_chars(len(raw) - tokens) or (0, 0)
        return text[first:]
    _, end = raw.token_to_chars(tokens - 1) or (0, len(text))
    return text[:end]


def _cut(item: T, limit: int, direction: Direction) -> T:
    """Return at most `limit` characters or ids, from the start or from the end."""
    if len(item) <= limit:
        return item
    return item[-limit:] if direction == "left" else item[:limit]


@contextmanager
def _place_in_errors(encodings: Sequence[Any]) -> Iterator[None]:
    """Give an error the place of the input whose encoding would be next."""
    try:
        yield
    except RequestError as error:
        error.place = len(encodings)
        raise


def _until_refused(
    items: Sequence[Item], prepare: Callable[[Item], _Ready]
) -> tuple[list[_Ready], RequestError | None]:
    ready: list[_Ready] = []
    for item in items:
        try:
            ready.append(prepare(item))
        except RequestError as error:
            error.place = len(ready)
            return ready, error
    return ready, None
