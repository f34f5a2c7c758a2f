"""Inputs of a request -> encodings, with every limit of the model enforced on the way, in TEI's order and words.

An input is a text or a list of ids. Ids are turned into the text they stand for and tokenised again without special
tokens, as TEI does: clients that send ids rely on seeing the same counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenizers import Encoding as RawEncoding

from hybridtei.batch import Encoding
from hybridtei.errors import EmptyInput, InvalidInput, RequestError
from hybridtei.text.prompts import Prompts
from hybridtei.text.tokenizer import Direction, Token, Tokenizer

Input = str | list[int]
CHARACTERS_PER_TOKEN = 250  # TEI's bound on the work that one input can cause


@dataclass(frozen=True, slots=True)
class _Ready:
    """A text to tokenise, and whether special tokens go around it."""

    text: str
    special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class TextReader:
    """A tokenizer with a model's limits and prompts. Thread-safe."""

    tokenizer: Tokenizer
    prompts: Prompts
    max_input_length: int
    vocab_size: int
    lowercase: bool = False

    def read(
        self, inputs: Sequence[Input], *, truncate: bool, direction: Direction = "right", prompt_name: str | None = None
    ) -> list[Encoding]:
        """One encoding an input, in order. Raises RequestError for the first input, by place, that breaks a rule."""
        ready, refused = _until_refused(inputs, lambda item: self._prepare(item, truncate, direction, prompt_name))
        encodings = self._encode(ready, truncate, direction)
        if refused is not None:
            raise refused
        return encodings

    def tokens(self, texts: Sequence[str], *, add_special_tokens: bool, prompt_name: str | None) -> list[list[Token]]:
        """Every token of every text, never cut. Raises RequestError."""
        ready, refused = _until_refused(texts, lambda text: self._prepare(text, False, "right", prompt_name))
        if refused is not None:
            raise refused
        return self.tokenizer.tokens([item.text for item in ready], add_special_tokens=add_special_tokens)

    def _prepare(self, item: Input, truncate: bool, direction: Direction, prompt_name: str | None) -> _Ready:
        if not item:
            raise EmptyInput("`inputs` cannot be empty")
        prompt = self.prompts.named(prompt_name)
        limit = self.max_input_length * CHARACTERS_PER_TOKEN
        if len(item) > limit and not truncate:
            raise InvalidInput(f"`inputs` must have less than {limit} characters. Given: {len(item)}")
        if len(item) > limit:
            item = item[-limit:] if direction == "left" else item[:limit]
        # Under a prompt, the ids' own special tokens give way to those put around the whole.
        whole = isinstance(item, str) or prompt is not None
        text = (prompt or "") + (item if isinstance(item, str) else self.tokenizer.text_of(item, skip_special_tokens=whole))
        return _Ready(text.lower() if self.lowercase else text, special_tokens=whole)

    def _encode(self, ready: Sequence[_Ready], truncate: bool, direction: Direction) -> list[Encoding]:
        raws: dict[int, RawEncoding] = {}
        for special_tokens in (True, False):
            places = [i for i, item in enumerate(ready) if item.special_tokens is special_tokens]
            if places:
                texts = [ready[i].text for i in places]
                raws.update(zip(places, self.tokenizer.encode(texts, add_special_tokens=special_tokens), strict=True))
        return [self._fitted(raws[i], truncate, direction) for i in range(len(ready))]

    def _fitted(self, raw: RawEncoding, truncate: bool, direction: Direction) -> Encoding:
        if len(raw) > self.max_input_length and not truncate:
            raise InvalidInput(f"`inputs` must have less than {self.max_input_length} tokens. Given: {len(raw)}")
        return self._checked(self.tokenizer.cut(raw, self.max_input_length, direction))

    def _checked(self, encoding: Encoding) -> Encoding:
        if not len(encoding):
            raise InvalidInput("`inputs` holds an input that becomes no token at all")
        if encoding.input_ids.max() >= self.vocab_size:  # one such id would fail the whole batch
            raise InvalidInput(
                f"`inputs` becomes the token id {encoding.input_ids.max()}, but the model knows ids below {self.vocab_size}"
            )
        return encoding


def _until_refused(items: Sequence[Input], prepare: Callable[[Input], _Ready]) -> tuple[list[_Ready], RequestError | None]:
    ready: list[_Ready] = []
    for item in items:
        try:
            ready.append(prepare(item))
        except RequestError as error:
            return ready, error
    return ready, None
