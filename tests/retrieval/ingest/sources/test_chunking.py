"""Chunks fit the model, cover the text, and are cut where sentences end."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.batch import Head
from hybridtei.errors import InvalidInput
from hybridtei.inference.tasks.embed import Embed
from hybridtei.options import EmbedOptions
from hybridtei.retrieval.ingest import chunking
from hybridtei.retrieval.ingest.chunking import (
    Chunker,
    ChunkSettings,
    longest_document,
    settings_for,
    tokens_around,
)
from hybridtei.retrieval.ingest.document import Document
from hybridtei.retrieval.ingest.options import ReadOptions
from hybridtei.retrieval.ingest.run import earlier_hashes, settings_hash
from tests.inference.engine import small
from tests.retrieval.ingest.small_ingest import raw, written

HASH = "938d81cad1ee912b"
THIRD_HASH = "51d8edd27f7b477d"
SECOND_HASH = "bdbec9a26032954d"
PROMPTED = {"document": "passage: "}


@pytest.fixture(scope="module")
def model_and_path(tmp_path_factory):
    return written(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def chunker(model_and_path):
    model, path = model_and_path
    return Chunker(model, raw(path), settings_for(model, 24, 4))


def document(text):
    return Document("source", "id", text)


def cut(chunker, text):
    """The chunks of a text."""
    (chunks,) = chunker.chunks_of([document(text)])
    return chunks


def read_tokens(model, text):
    """The tokens that the encoder would read, without truncation."""
    raws = model.reader.tokenizer.encode([text])
    return len(raws[0])


@given(
    st.text(alphabet="the one two.\n\x01é語 ", min_size=1, max_size=400).map(str.strip).filter(bool)
)
def test_chunks_fit_and_cover_and_stand_where_they_say(model_and_path, chunker, text):
    model, _ = model_and_path
    chunks = cut(chunker, text)
    assert [chunk.number for chunk in chunks] == list(range(len(chunks)))
    covered = set()
    for chunk in chunks:
        assert text[chunk.start :].startswith(chunk.text)
        assert chunk.tokens == read_tokens(model, chunk.text) <= 24
        covered |= set(range(chunk.start, chunk.start + len(chunk.text)))
    assert "".join(letter for at, letter in enumerate(text) if at not in covered).strip() == ""


def test_a_text_that_fits_is_left_as_it_is(chunker):
    text = "one two.  three\n\nfour"
    assert [chunk.text for chunk in cut(chunker, text)] == [text]


def test_chunks_end_where_sentences_do(chunker):
    sentence = "The hybrid search engine finds text by words and meaning."
    chunks = cut(chunker, " ".join([sentence] * 12))
    assert len(chunks) > 5
    assert all(chunk.text.startswith("The") and chunk.text.endswith("meaning.") for chunk in chunks)


def test_neighbours_share_no_more_than_the_overlap(model_and_path):
    model, path = model_and_path
    text = " ".join(["one two three four five six seven"] * 40)
    for overlap in (0, 5):
        chunks = cut(Chunker(model, raw(path), settings_for(model, 24, overlap)), text)
        shared = [one.start + len(one.text) - other.start for one, other in pairwise(chunks)]
        assert (max(shared) > 0) == (overlap > 0)
        for one, count in zip(chunks, shared, strict=False):
            words = one.text[-count:] if count > 0 else ""
            (tokens,) = model.reader.tokenizer.encode([words], add_special_tokens=False)
            assert len(tokens) <= overlap


def test_texts_do_not_depend_on_their_neighbours(chunker):
    texts = ["one two", "three " * 60, "four"]
    together = chunker.chunks_of(list(map(document, texts)))
    assert together == [cut(chunker, text) for text in texts]


def test_a_book_is_cut_before_it_is_split(chunker, monkeypatch):
    monkeypatch.setattr(chunking, "SECTION_CHARACTERS", 200)
    paragraphs = [f"one two three {i}." for i in range(100)]
    text = "\n\n".join(paragraphs)
    chunks = cut(chunker, text)
    assert all(text[chunk.start :].startswith(chunk.text) for chunk in chunks)
    assert all(any(paragraph in chunk.text for chunk in chunks) for paragraph in paragraphs)


def test_a_word_without_end_is_cut_by_characters(chunker):
    chunks = cut(chunker, "x" * 5000)
    assert "".join(chunk.text for chunk in chunks) == "x" * 5000
    assert max(len(chunk.text) for chunk in chunks) <= 24 * chunking.CHARACTERS_PER_TOKEN


def test_without_chunking_a_document_is_one(model_and_path):
    model, path = model_and_path
    whole = Chunker(model, raw(path), settings_for(model, None, None, whole=True))
    chunks = cut(whole, "one " * 500)
    assert [(chunk.start, chunk.tokens) for chunk in chunks] == [(0, small.LONGEST)]


def test_a_prompt_takes_its_place_in_every_chunk(tmp_path):
    model = small.model(small.model_spec(prompts=PROMPTED))
    _, path = written(tmp_path)
    chunker = Chunker(model, raw(path), settings_for(model, 40, 0))
    chunks = cut(chunker, "one two three four " * 30)
    encodings = Embed(
        [chunk.text for chunk in chunks],
        model.spec.heads,
        EmbedOptions(truncate=False, input_type="document"),
    ).read(model)
    assert [len(encoding) for encoding in encodings] == [chunk.tokens for chunk in chunks]
    assert tokens_around(model) > 2


@pytest.mark.parametrize(
    ("tokens", "overlap", "why"),
    [
        (65, None, "between 10 and 64"),
        (9, None, "between 10 and 64"),
        (24, 12, "between 0 and 11"),
        (24, -1, "between 0 and 11"),
    ],
)
def test_what_cannot_be(model_and_path, tokens, overlap, why):
    with pytest.raises(InvalidInput, match=why):
        settings_for(model_and_path[0], tokens, overlap)


def test_defaults(model_and_path):
    found = settings_for(model_and_path[0], None, None)
    assert (found.tokens, found.overlap) == (small.LONGEST, (small.LONGEST - 2) // 8)
    long = small.model(small.model_spec(max_input_length=8192))
    assert longest_document(long) == 8192
    assert settings_for(long, None, None).tokens == chunking.DEFAULT_TOKENS


def test_the_first_hash_of_settings_is_that_of_points_that_are_stored():
    """Another hash would embed every collection again."""
    chunks = ChunkSettings(tokens=200, overlap=25)
    heads = frozenset({Head.DENSE, Head.SPARSE})
    settings = settings_hash(heads, chunks, ReadOptions())
    assert earlier_hashes(heads, chunks, ReadOptions()) == [THIRD_HASH, SECOND_HASH, HASH]
    with_headings = earlier_hashes(heads, replace(chunks, headings=True), ReadOptions())
    assert len(with_headings) == 1
    assert with_headings != [THIRD_HASH]
    assert settings not in (HASH, SECOND_HASH)
