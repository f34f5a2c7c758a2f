"""Documents, their chunks, and the payload of a chunk's point; `notebooks/search.md` lists its
keys.

A point is one chunk of one version of a document. Its id is a UUID of the document's source and id,
its digest, the settings and the chunk's number. The indexed text of a document is its title, a line
feed and its text; `start` counts its characters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import chain, islice, pairwise

from tokenizers import Tokenizer as RawTokenizer

from hybridtei.batch import Head
from hybridtei.errors import InvalidInput
from hybridtei.inference.tasks.base import Model
from hybridtei.inference.tasks.embed import Embed
from hybridtei.options import EmbedOptions
from hybridtei.retrieval.ingest.document import Document
from hybridtei.system.machine import available_cores

TEXT, DOCUMENT_ID, SOURCE, CHUNK, CHUNKS, START, CONTEXT = (
    "text",
    "document_id",
    "source",
    "chunk",
    "chunks",
    "start",
    "context",
)
DIGEST, SETTINGS, TITLE, METADATA = "digest", "settings", "title", "metadata"
PAGE = "page"
# Size in bytes and times of the last changes, in ns, of a file that is one document.
FILE = "file"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a document. `tokens`: for the model, special tokens and context included.
    `context`: what the dense vector reads before the text."""

    number: int
    text: str
    start: int
    tokens: int
    context: str = ""


# Default for models that read more, so that a hit is short enough to show
DEFAULT_TOKENS = 512
# At most this part of a chunk is context.
CONTEXT_SHARE = 4
# By default a chunk repeats at most 1/8 of the previous chunk
OVERLAP_SHARE = 8
MIN_TOKENS = 8
SAMPLE_CHARACTERS = 5_000
CHARACTERS_PER_TOKEN = 32
# Longer texts are cut into sections first, since splitting a whole book takes minutes
SECTION_CHARACTERS = 50_000


@dataclass(frozen=True, slots=True)
class ChunkSettings:
    """`tokens`: of a chunk, special tokens included. `overlap`: the most tokens that a chunk
    repeats. `whole`: do not cut. `headings`: chunks have a context."""

    tokens: int
    overlap: int
    whole: bool = False
    headings: bool = False

    def in_words(self) -> str:
        if self.whole:
            return f"one a document, cut at {self.tokens} tokens"
        return f"at most {self.tokens} tokens, {self.overlap} of the chunk before"


def settings_for(
    model: Model,
    tokens: int | None,
    overlap: int | None,
    *,
    whole: bool = False,
    headings: bool = False,
) -> ChunkSettings:
    """The settings of chunks. Default: the model's length, at most 512 tokens. Raises
    InvalidInput."""
    longest = longest_document(model)
    around = tokens_around(model)
    if tokens is None:
        tokens = min(longest, DEFAULT_TOKENS)
    room = tokens - around
    if not whole and (tokens > longest or room < MIN_TOKENS):
        raise InvalidInput(
            f"--chunk-tokens is {tokens}, should be between {MIN_TOKENS + around} and {longest}, "
            "what the model reads"
        )
    if overlap is None:
        overlap = room // OVERLAP_SHARE
    if not 0 <= overlap <= room // 2 and not whole:
        raise InvalidInput(
            f"--chunk-overlap is {overlap}, should be between 0 and {room // 2}, half a chunk"
        )
    return ChunkSettings(tokens, overlap, whole, headings and not whole)


def longest_document(model: Model) -> int:
    """The number of a document's tokens that the model reads, special tokens included."""
    longest, side = model.reader.max_input_length, model.spec.kind.document
    return min(longest, side.length or longest)


def tokens_around(model: Model) -> int:
    """The number of tokens besides a document's own: special tokens, and the prompt for
    documents."""
    word = "a"
    read = Embed(
        [word],
        frozenset({Head.TOKENS}),
        OF_DOCUMENT,
    ).read(model)[0]
    return len(read) - len(model.reader.tokenizer.encode([word], add_special_tokens=False)[0])


OF_DOCUMENT = EmbedOptions(input_type="document")
# {context of a place: (what of it fits, its tokens)}
Contexts = dict[str, tuple[str, int]]


@dataclass(frozen=True, slots=True)
class _Section:
    """A part of a document that is cut alone. `masked`: its text with blanks for line ends at which
    it is not cut. `room`: the tokens of a chunk's text. `count`: its tokens, if it is one chunk."""

    start: int
    text: str
    masked: str
    room: int
    count: int | None = None


class Chunker:
    """Cuts texts into chunks. Thread-safe. `raw`: the model's tokenizer for the splitter."""

    def __init__(self, model: Model, raw: RawTokenizer, settings: ChunkSettings) -> None:
        from semantic_text_splitter import TextSplitter

        raw.no_padding()
        raw.no_truncation()
        self.settings = settings
        # WordPiece and BPE name their unknown token; the binding of Unigram does not tell it
        unknown = getattr(raw.model, "unk_token", None) or "<unk>"
        self._unknown = raw.token_to_id(unknown)
        self._reader = model.reader
        self._tokenizer = model.reader.tokenizer
        self.around = tokens_around(model)
        self._longest = longest_document(model)
        self._room = settings.tokens - self.around
        self._splitter = cache(
            lambda room: TextSplitter.from_huggingface_tokenizer(
                raw, room, overlap=min(settings.overlap, room // 2)
            )
        )
        self._threads = ThreadPoolExecutor(min(4, available_cores()), thread_name_prefix="split")

    def chunks_of(self, documents: Sequence[Document]) -> list[list[Chunk]]:
        """The chunks of each document's indexed text, in order. A text with more than white space
        has at least one."""
        texts = [document.indexed_text for document in documents]
        # Only the beginning of a longer text is counted: it is never one chunk, and its sections
        # are counted later
        counted = None if self.settings.whole else SECTION_CHARACTERS + 1
        counts = self._counts([text[:counted] for text in texts])
        plans = list(map(self._planned, documents, texts, counts))
        # The pieces of all documents' sections, in order
        pieces = self._threads.map(self._pieces, chain.from_iterable(parts for _, parts in plans))
        chunks_by_document: list[list[Chunk]] = []
        for document, (contexts, parts) in zip(documents, plans, strict=True):
            chunks: list[Chunk] = []
            for text, start, count in chain.from_iterable(islice(pieces, len(parts))):
                context, context_tokens = contexts.get(document.context_at(start), ("", 0))
                tokens = min(count + context_tokens + self.around, self._longest)
                chunks.append(Chunk(len(chunks), text, start, tokens, context))
            chunks_by_document.append(chunks)
        return chunks_by_document

    def _planned(
        self, document: Document, text: str, count: int
    ) -> tuple[Contexts, list[_Section]]:
        """(the contexts of a document's places, the parts of its text). `count`: of its tokens."""
        room = self._room
        is_long = len(text) > min(SECTION_CHARACTERS, room * CHARACTERS_PER_TOKEN)
        contexts: Contexts = {}
        if self.settings.headings and (document.outline.places or is_long or count > room):
            contexts = self._contexts(document)
        _, first_tokens = contexts.get(document.context_at(0), ("", 0))
        if self.settings.whole or (not is_long and count + first_tokens <= room):
            return contexts, [_Section(0, text, text, room, count)]
        # Leave room for the longest context
        room -= max((tokens for _, tokens in contexts.values()), default=0)
        masked = self._with_joins(document, text, room)
        parts = [
            _Section(start, text[start : start + len(part)], part, room)
            for start, part in _sections(masked)
        ]
        return contexts, parts

    def unknown_share(self, text: str) -> float:
        """The share of tokens that the model cannot read, in a sample of the text's beginning and
        middle."""
        if self._unknown is None or text.isascii():
            return 0.0
        middle = len(text) // 2
        sample = f"{text[:SAMPLE_CHARACTERS]} {text[middle : middle + SAMPLE_CHARACTERS]}"
        ids = self._tokenizer.encode([sample], add_special_tokens=False)[0].ids
        return ids.count(self._unknown) / max(1, len(ids))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _counts(self, texts: Sequence[str]) -> list[int]:
        return list(map(len, self._tokenizer.encode(texts, add_special_tokens=False)))

    def _contexts(self, document: Document) -> Contexts:
        """The contexts of a document's places."""
        starts = [start + document.shift for start, *_ in document.outline.places]
        # Only chunks after the first character have the title in their context
        contexts = sorted({document.context_at(start) for start in (0, 1, *starts)} - {""})
        fitting = self._reader.cut_to(contexts, self._room // CONTEXT_SHARE)
        lengths = self._counts([f"{context}\n" for context in fitting])
        return dict(zip(contexts, zip(fitting, lengths, strict=True), strict=True))

    def _pieces(self, section: _Section) -> list[tuple[str, int, int]]:
        """(text, start, tokens) of a section's chunks."""
        if section.count is not None:
            return [(section.text, section.start, section.count)]
        longest = section.room * CHARACTERS_PER_TOKEN
        # The splitter reads the masked text; the pieces are the same places of the text itself
        cuts = [
            (begin + cut, section.text[begin + cut : begin + min(cut + longest, len(masked))])
            for begin, masked in self._splitter(section.room).chunk_indices(section.masked)
            for cut in range(0, len(masked), longest)
        ]
        lengths = self._counts([piece for _, piece in cuts])
        return [
            (piece, section.start + begin, length)
            for (begin, piece), length in zip(cuts, lengths, strict=True)
        ]

    def _with_joins(self, document: Document, text: str, room: int) -> str:
        """The text with blanks for line ends in the parts of at most `room` tokens that are not
        cut."""
        shift = document.shift
        joins = [(start + shift, end + shift) for start, end in document.outline.joins]
        # The title stays with the first line
        joins.append((0, shift))
        lengths = self._counts([text[start:end] for start, end in joins])
        letters = list(text)
        for (start, end), length in zip(joins, lengths, strict=True):
            if length <= room:
                letters[start:end] = text[start:end].replace("\n", " ")
        return "".join(letters)


def _sections(text: str) -> Iterator[tuple[int, str]]:
    """(start, text) of sections of at most SECTION_CHARACTERS, cut at the last line end or space,
    if there is one."""
    edges = [0]
    while len(text) - edges[-1] > SECTION_CHARACTERS:
        start, stop = edges[-1], edges[-1] + SECTION_CHARACTERS
        cuts = [text.rfind(separator, start, stop) for separator in ("\n\n", "\n", " ")]
        # A text with an empty line is not cut at a single line end
        if cuts[0] >= 0:
            del cuts[1]
        edges.append(next((cut + 1 for cut in cuts if cut > start), stop))
    return (
        (start, text[start:stop])
        for start, stop in pairwise([*edges, len(text)])
        if text[start:stop].strip()
    )
