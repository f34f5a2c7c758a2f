"""Documents into chunks that the model reads whole, counted with its own tokenizer, cut between sentences where that can be.

What fits is one chunk and never meets the splitter, which counts a text many times over while it looks for the best cuts. The
surprise: a word that the vocabulary does not know may be one token however long it is, so characters are bounded too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

from tokenizers import Tokenizer as RawTokenizer

from hybridtei.batch import Head
from hybridtei.errors import InvalidInput, LoadError
from hybridtei.ingest.documents import Chunk
from hybridtei.system.cpu import available_cores
from hybridtei.tasks.embed import Embed, Model

DEFAULT_TOKENS = 512  # of models that read more: what is found should be short enough to show
OVERLAP_SHARE = 8  # by default, a chunk repeats at most an eighth of the one before
LEAST_TOKENS = 8
CHARACTERS_PER_TOKEN = 32
SECTION_CHARACTERS = 50_000  # a longer text is cut before it is split: splitting a book in one go takes minutes


@dataclass(frozen=True, slots=True)
class ChunkSettings:
    """`tokens`: of a chunk, special tokens included. `overlap`: most tokens that a chunk repeats. `whole`: do not cut."""

    tokens: int
    overlap: int
    whole: bool = False


def settings_for(model: Model, tokens: int | None, overlap: int | None, *, whole: bool = False) -> ChunkSettings:
    """Chunks as asked for, or as suit the model: what it can read, but 512 tokens at most. Raises InvalidInput."""
    longest = longest_document(model)
    tokens = min(longest, DEFAULT_TOKENS) if tokens is None else tokens
    room = tokens - tokens_around(model)
    if not whole and (tokens > longest or room < LEAST_TOKENS):
        least = LEAST_TOKENS + tokens_around(model)
        raise InvalidInput(f"--chunk-tokens is {tokens}, should be between {least} and {longest}, what the model reads")
    overlap = room // OVERLAP_SHARE if overlap is None else overlap
    if not 0 <= overlap <= room // 2 and not whole:
        raise InvalidInput(f"--chunk-overlap is {overlap}, should be between 0 and {room // 2}, half a chunk")
    return ChunkSettings(tokens, overlap, whole)


def longest_document(model: Model) -> int:
    """Tokens the model reads of a document, special tokens included."""
    longest, late = model.reader.max_input_length, model.spec.late
    return min(longest, late.document.length or longest) if late is not None else longest


def tokens_around(model: Model) -> int:
    """Tokens that the model reads besides a document's own: special ones, and its prompt for documents."""
    word = "a"
    read = Embed([word], frozenset({Head.TOKENS}), input_type="document").read(model)[0]
    return len(read) - len(model.reader.tokenizer.encode([word], add_special_tokens=False)[0])


class Chunker:
    """Cuts texts; thread-safe. `raw`: the model's tokenizer as the splitter wants it. Raises LoadError without the splitter."""

    def __init__(self, model: Model, raw: RawTokenizer, settings: ChunkSettings) -> None:
        try:
            from semantic_text_splitter import TextSplitter
        except ImportError as error:
            raise LoadError("ingest needs semantic-text-splitter: pip install 'hybridtei[qdrant]'") from error
        raw.no_padding()
        raw.no_truncation()
        self.settings = settings
        self._tokenizer = model.reader.tokenizer
        self._lowercase = model.reader.lowercase
        self.around = tokens_around(model)
        self._longest = longest_document(model)
        self._room = settings.tokens - self.around
        if not settings.whole:
            self._splitter = TextSplitter.from_huggingface_tokenizer(raw, self._room, overlap=settings.overlap)
        self._threads = ThreadPoolExecutor(min(4, available_cores()), thread_name_prefix="split")

    def chunks_of(self, texts: Sequence[str]) -> list[list[Chunk]]:
        """The chunks of each text, in order; a text of more than white space has one at least."""
        sections = [[(0, text)] if self.settings.whole else list(_sections(text)) for text in texts]
        flat = [section for per_text in sections for section in per_text]
        counts = self._counts([text for _, text in flat])
        pieces = iter(self._threads.map(self._pieces, flat, counts))
        return [_numbered([piece for _ in per_text for piece in next(pieces)]) for per_text in sections]

    def close(self) -> None:
        """End its threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _counts(self, texts: Sequence[str]) -> list[int]:
        read = [text.lower() for text in texts] if self._lowercase else texts
        return [len(encoding) for encoding in self._tokenizer.encode(read, add_special_tokens=False)] if read else []

    def _pieces(self, section: tuple[int, str], count: int) -> list[tuple[int, str, int]]:
        """(start, text, tokens) of a section's chunks."""
        start, text = section
        if self.settings.whole:
            return [(start, text, min(count + self.around, self._longest))]
        if count <= self._room and len(text) <= self._room * CHARACTERS_PER_TOKEN:
            return [(start, text, count + self.around)]
        found = [
            (start + at + cut, part) for at, piece in self._splitter.chunk_indices(text) for cut, part in self._short(piece)
        ]
        lengths = self._counts([piece for _, piece in found])
        return [(at, piece, length + self.around) for (at, piece), length in zip(found, lengths, strict=True)]

    def _short(self, piece: str) -> Iterator[tuple[int, str]]:
        most = self._room * CHARACTERS_PER_TOKEN
        return ((at, piece[at : at + most]) for at in range(0, len(piece), most))


def _sections(text: str) -> Iterator[tuple[int, str]]:
    """(start, text) of pieces of at most SECTION_CHARACTERS, cut at the last line end or blank before that, if there is one."""
    edges = [0]
    while len(text) - edges[-1] > SECTION_CHARACTERS:
        start, stop = edges[-1], edges[-1] + SECTION_CHARACTERS
        cut = max(text.rfind("\n\n", start, stop), text.rfind("\n", start, stop) if text.find("\n\n", start, stop) < 0 else -1)
        cut = cut if cut > start else text.rfind(" ", start, stop)
        edges.append(cut + 1 if cut > start else stop)
    return ((start, text[start:stop]) for start, stop in pairwise([*edges, len(text)]) if text[start:stop].strip())


def _numbered(pieces: Sequence[tuple[int, str, int]]) -> list[Chunk]:
    return [Chunk(number, text, start, tokens) for number, (start, text, tokens) in enumerate(pieces)]
