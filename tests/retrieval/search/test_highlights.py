"""Places of shared terms in a text, and the stretch that shows most of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.small import tiny
from hybridtei.encoder import Encoder
from hybridtei.retrieval.search.explain import (
    MAX_HIGHLIGHTS,
    Highlight,
    excerpt,
    highlights,
    in_words,
    shared_terms,
)
from hybridtei.retrieval.search.options import SearchHit, SearchOptions, SearchResult
from tests.inference.engine import small

TOKENIZER = small.tokenizer()


def tokens_of(text):
    return TOKENIZER.tokens(text, add_special_tokens=False)


def test_terms_that_both_have_weigh_as_much_as_their_product():
    query, document = ([3, 5, 9], [1.0, 0.5, 2.0]), ([5, 7, 9], [4.0, 8.0, 0.0])
    assert shared_terms(query, document) == {5: 2.0}
    assert shared_terms(([], []), document) == {}


def test_each_place_of_a_term_and_pieces_that_touch_as_one():
    found = highlights(
        "one xyz one",
        {small.IDS["one"]: 2.0, small.IDS["##y"]: 0.5, small.IDS["##z"]: 0.25},
        tokens_of,
    )
    assert found == [
        Highlight(0, 3, "one", 2.0),
        Highlight(5, 7, "yz", 0.75),
        Highlight(8, 11, "one", 2.0),
    ]
    assert highlights("", {1: 1.0}, tokens_of) == highlights("one", {}, tokens_of) == []


@pytest.mark.parametrize("before", ["é ü ", "日本 ", "😀 a "])
def test_places_are_characters_whatever_the_bytes(before):
    text = f"{before}search"
    (found,) = highlights(text, {small.IDS["search"]: 1.0}, tokens_of)
    assert text[found.start : found.end] == "search"


def test_places_are_those_of_the_text_before_it_is_lowercased(tmp_path):
    """The lower case of `İ` takes two characters."""
    folder = tiny.write_modules(tiny.write_family(tmp_path, "xlm-roberta"), layout="old")
    tiny.edit_json(folder / "sentence_bert_config.json", do_lower_case=True)
    tokens = Encoder.load(str(folder)).tokens_of
    text, terms = "İİİ BAKA", {token.id: 1.0 for token in tokens("baka")}
    (found,) = highlights(text, terms, tokens)
    assert text[found.start : found.end].strip() == "BAKA"


@given(
    st.lists(st.sampled_from([*small.WORDS, "é", "日本"]), max_size=60),
    st.integers(1, 80),
    st.sets(st.sampled_from(small.WORDS)),
)
def test_an_excerpt_lies_within_the_text_and_shows_something_marked(words, width, marked):
    text = " ".join(words)
    found = highlights(text, {small.IDS[word]: 1.0 for word in marked}, tokens_of)
    start, end = excerpt(text, found, width)
    assert 0 <= start <= end <= len(text)
    assert end - start <= max(width + 20, 0)
    if found and width >= 40:
        assert any(start <= mark.start and mark.end <= end for mark in found)


def test_the_excerpt_is_where_most_weight_is():
    text = "one " * 50 + "search engine " + "two " * 50
    found = highlights(
        text,
        {small.IDS["one"]: 0.01, small.IDS["search"]: 1.0, small.IDS["engine"]: 1.0},
        tokens_of,
    )
    start, end = excerpt(text, found, 60)
    assert "search engine" in text[start:end]


def test_of_very_many_the_heaviest_are_given_in_the_order_of_the_text():
    text = "one two " * MAX_HIGHLIGHTS + "search"
    terms = {small.IDS["one"]: 0.5, small.IDS["search"]: 1.0}
    found = highlights(text, terms, tokens_of)
    assert len(found) == MAX_HIGHLIGHTS
    assert found[-1].text == "search"
    assert [mark.start for mark in found] == sorted(mark.start for mark in found)


def test_a_row_of_a_table_is_shown_with_its_file():
    row = {"text": "a berth", "document_id": "line-2", "source": "docs/prices.csv"}
    file = {"text": "a quay", "document_id": "docs/a.md", "source": "docs/a.md"}
    hits = [SearchHit(1, 1.0, row), SearchHit(2, 0.5, file), SearchHit(3, 0.1, {"text": "x"})]
    lines = in_words(SearchResult("dense", hits, []), SearchOptions()).splitlines()
    assert [line.rpartition("[")[2] for line in lines[::2]] == [
        "docs/prices.csv line-2]",
        "docs/a.md]",
        "3]",
    ]
