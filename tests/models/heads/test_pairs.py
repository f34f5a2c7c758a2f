"""Pairs from JSON lines and from Debian's translation files."""

import gzip
import lzma

import pytest

from conformance.quality.translations import parse_translations, read_translations
from hybridtei.models.heads.run import Pair, read_pairs, select_pairs, sentence_pairs

TRANSLATIONS = """\
Package: 0ad
Description-md5: d943033bedada21853d2ae54a2578a7b
Description-en: Real-time strategy game of ancient warfare
 0 A.D. is a free, cross-platform
 real-time strategy game.
 .
 It is set in antiquité.

Package: empty
Description-md5: 00000000000000000000000000000000
Description-en: title without a body

Package: list
Description-md5: 11111111111111111111111111111111
Description-en: things in a list
 These are:
  - one
  - two
"""
EXPECTED = [
    Pair(
        "Real-time strategy game of ancient warfare",
        "0 A.D. is a free, cross-platform real-time strategy game.\n\nIt is set in antiquité.",
    ),
    Pair("things in a list", "These are: - one - two"),
]


def test_paragraphs_are_joined_and_empty_bodies_left_out():
    assert list(parse_translations(TRANSLATIONS.splitlines(keepends=True))) == EXPECTED
    assert list(parse_translations(TRANSLATIONS.splitlines())) == EXPECTED


@pytest.mark.parametrize(
    ("name", "packed"),
    [
        ("Translation-en", TRANSLATIONS.encode()),
        ("Translation-en.gz", gzip.compress(TRANSLATIONS.encode())),
        ("Translation-en.xz", lzma.compress(TRANSLATIONS.encode())),
    ],
)
def test_packed_files_read_alike(tmp_path, name, packed):
    (tmp_path / name).write_bytes(packed)
    assert list(read_translations(tmp_path / name)) == EXPECTED


def test_a_damaged_lz4_file_is_an_error(tmp_path):
    path = tmp_path / "Translation-en.lz4"
    path.write_bytes(b"no lz4 frame")
    with pytest.raises(RuntimeError, match=r"Translation-en\.lz4"):
        list(read_translations(path))


def test_json_lines(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text(
        '{"query": "a", "text": " b "}\n\n{"title": "c", "text": "d"}\n', encoding="utf-8"
    )
    assert list(read_pairs(path)) == [Pair("a", "b"), Pair("c", "d")]


@pytest.mark.parametrize("line", ["{", "[]", '{"query": "a"}', '{"query": 1, "text": "b"}'])
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"query": "a", "text": "b"}\n' + line, encoding="utf-8")
    with pytest.raises(ValueError, match=r"pairs\.jsonl:2"):
        list(read_pairs(path))


def test_repeats_and_short_texts_are_left_out():
    pairs = [
        Pair("first", "one two three four"),
        Pair("First", "another text of some words"),
        Pair("second", "One two three five"),
        Pair("third", "too short"),
        Pair("", "a text without a query"),
        Pair("fourth", "is quite another text"),
    ]
    assert select_pairs(pairs, min_words=3, opening=10) == [pairs[0], pairs[5]]
    assert select_pairs(pairs, min_words=3, opening=99) == [pairs[0], pairs[2], pairs[5]]


def test_a_sentence_and_its_rest_make_up_the_text():
    text = (
        "Alpha is the first of all. Beta comes second in the list. Gamma is third and is the last."
    )
    (pair,) = sentence_pairs(
        [Pair("letters", text), Pair("short", "Two sentences only. No third.")], 5, seed=3
    )
    assert pair.query in text
    assert sorted(f"{pair.query} {pair.text}".split()) == sorted(text.split())
    assert sentence_pairs([Pair("letters", text)], 5, seed=3) == [pair]
    assert sentence_pairs([Pair("letters", text)], 50, seed=3) == []
