"""Files of other kinds: their text as a person reads it, or one reason why not."""

import gzip
import json
import re
import zipfile
from io import BytesIO

import pytest

from conformance.documents.__main__ import FOLDER
from hybridtei.retrieval.ingest.document import Rejection
from hybridtei.retrieval.ingest.files import source_files
from tests.retrieval.ingest.sources.archives import (
    DOCX,
    EPUB,
    ODT,
    changed,
    zipped,
)
from tests.retrieval.ingest.sources.reading import one_of

MANUAL = r""".\" a comment
.TH GREP 1 2020-01-01
.SH NAME
grep \- print \fBlines\fR that match
.TP
.B \-\-color
Surround \(aqmatches\(aq.
.SS "Exit status"
.IR 0 " if found"
"""
NOTEBOOK = json.dumps(
    {
        "cells": [
            {"cell_type": "markdown", "source": ["# A study\n", "of plates"]},
            {
                "cell_type": "code",
                "source": "print(1)",
                "outputs": [{"data": {"image/png": "iVBO"}}],
            },
        ]
    }
)
# As a browser saves a page
PAGE = b"""From: Blink
Subject: A page
MIME-Version: 1.0
Content-Type: multipart/related; type="text/html"; boundary=x

--x
Content-Type: text/html
Content-Transfer-Encoding: quoted-printable

<html><body><h1>Head</h1><p>caf=C3=A9</p></body></html>
--x
Content-Type: image/png

x
--x--
"""
MAIL = b"""From: Ada <ada@example.org>
To: grace@example.org
Subject: =?utf-8?q?Pl=C3=A4ne?=
Date: Mon, 1 Jan 2024 10:00:00 +0000
MIME-Version: 1.0
Content-Type: multipart/mixed; boundary=x

--x
Content-Type: text/plain; charset=iso-8859-1
Content-Transfer-Encoding: quoted-printable

caf=E9
--x
Content-Type: application/pdf
Content-Disposition: attachment; filename=plan.pdf

%PDF
--x--
"""
CALENDAR = (
    "BEGIN:VCALENDAR\r\nPRODID:x\r\nBEGIN:VEVENT\r\nSUMMARY:Review\\, part\r\n  two\r\nDTSTART;TZID=UTC:20240101\r\n"
    "END:VEVENT\r\nEND:VCALENDAR\r\n"
)
SUBTITLES = "WEBVTT\n\n1\n00:00:01.000 --> 00:00:02.000\n<v Ada>Hello\n\n2\n00:00:02.000 --> 00:00:03.000\nHello\nthere\n"


@pytest.mark.parametrize(
    ("name", "data", "title", "text"),
    [
        ("a.rst", "Title\n=====\n\nbody", "Title", "Title\n=====\n\nbody"),
        ("a.adoc", "= Title\n\nbody", "Title", None),
        ("a.org", "#+TITLE: Title\nbody", "Title", None),
        ("a.tex", "\\title{Title}\nbody", "Title", None),
        ("a.py", "def f():\n    return 1", None, "def f():\n    return 1"),
        ("a.ini", "[a]\nb = 1", None, "[a]\nb = 1"),
        ("README", "read me", None, "read me"),
        ("a.unknown", "some text", None, "some text"),
        ("a.txt.gz", gzip.compress(b"packed", mtime=0), None, "packed"),
        ("a.1.gz", gzip.compress(MANUAL.encode(), mtime=0), None, None),
        (
            "a.xml",
            "<?xml version='1.0'?><a><b>one</b><c d='x'>two<![CDATA[ <i>three]]></c>\n<!-- no -->\n</a>",
            None,
            "one two three",
        ),
        (
            "a.1",
            MANUAL,
            None,
            "NAME\ngrep - print lines that match\n\n--color\nSurround 'matches'.\nExit status\n0  if found",
        ),
        ("a.3", "no manual", None, "no manual"),
        ("a.ipynb", NOTEBOOK, "A study", "of plates\n\n```\nprint(1)\n```"),
        (
            "a.eml",
            MAIL,
            "Pläne",
            "From: Ada <ada@example.org>\nTo: grace@example.org\nDate: Mon, 1 Jan 2024 10:00:00 +0000\nAttachments: plan.pdf\n\ncafé",
        ),
        ("a.ics", CALENDAR, None, "SUMMARY: Review, part two\nDTSTART: 20240101"),
        ("a.vtt", SUBTITLES, None, "Hello\nthere"),
        ("a.mhtml", PAGE, "A page", "From: Blink\nAttachments: unnamed\n\nHead\ncafé"),
        ("a.odt", ODT, "The ODF title", "Install\nTurn it\nslowly\nSize | Torque\nM8"),
        ("a.epub", EPUB, "The book", "First\none\n\ntwo"),
    ],
)
def test_a_kind(tmp_path, name, data, title, text):
    document = one_of(tmp_path / name, data)
    assert not isinstance(document, Rejection), document.reason
    assert document.title == title
    if text is not None:
        assert document.text == text


def encrypted():
    data = bytearray(DOCX)
    place = data.index(b"PK\x01\x02")
    data[place + 8] |= 1
    data[6] |= 1
    return bytes(data)


BOMB = zipped(word__document_xml=b"<w:p><w:t>" + b"x" * 30_000_000)
ENTITIES = zipped(word__document_xml='<!DOCTYPE a [<!ENTITY a "b">]><w:p><w:t>&a;</w:t></w:p>')
FAR_CELL = changed(
    "since_1904.xlsx",
    "xl/worksheets/sheet1.xml",
    lambda sheet: sheet.replace(
        "</sheetData>",
        '<row r="1048576"><c r="XFD1048576"><v>2</v></c></row></sheetData>',
    ),
)


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("a.docx", BOMB, "would become"),
        ("a.docx", ENTITIES, "not readable"),
        ("a.docx", encrypted(), "encrypted"),
        ("a.docx", b"\xd0\xcf\x11\xe0" + b"x" * 600, "no reader for what is in this archive"),
        ("a.docx", DOCX[:-200], "not readable: BadZipFile"),
        ("a.xlsx", FAR_CELL, "covers 17179869184 grid positions"),
        ("program", b"\x7fELF" + bytes(2000), "no reader for files ending in ''"),
        ("a", "%!PS-Adobe", "no reader for this format"),
        ("a.txt.gz", gzip.compress(b"x" * 2000, mtime=0), "has 2000 bytes, allowed are 1000"),
        ("a.gz", b"\x1f\x8b broken", "not readable as a packed file"),
        ("a.ipynb", '{"cells": 5}', "not readable as a notebook"),
        ("a.eml", b"", "holds no text"),
    ],
)
def test_what_cannot_be_taken_is_one_reason(tmp_path, name, data, why):
    more = {"max_file_bytes": 1000} if name == "a.txt.gz" else {}
    found = one_of(tmp_path / name, data, **more)
    assert isinstance(found, Rejection)
    assert why in found.reason
    assert found.location == "file"


@pytest.mark.parametrize(
    ("options", "read"),
    [
        ({"include": ["*.md"]}, ["s/a.md", "s/docs/e.md"]),
        ({"exclude": ["docs"]}, ["s/a.md", "s/b.txt"]),
        ({"exclude": ["docs/*"]}, ["s/a.md", "s/b.txt"]),
        ({"include": ["*.md"], "exclude": ["a.*"]}, ["s/docs/e.md"]),
    ],
)
def test_what_to_read_and_what_not(tmp_path, options, read):
    for name in ("a.md", "b.txt", "docs/e.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    files = source_files(tmp_path, "s", **options)
    assert [file.label for file in files if file.left_out is None] == read


def test_an_archive_with_a_broken_member(tmp_path):
    data = BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("word/document.xml", b"<w:p><w:t>" + b"abc" * 200)
    broken = bytearray(data.getvalue())
    broken[45:60] = bytes(15)
    assert "not readable" in one_of(tmp_path / "a.docx", bytes(broken)).reason


@pytest.mark.parametrize(
    ("name", "text", "paths"),
    [
        (
            "a.rst",
            "Manual\n======\n\nIntro.\n\nMooring\n-------\n\nTwo lines.",
            ["Manual", "Manual > Mooring"],
        ),
        (
            "a.rst",
            "======\nManual\n======\n\nMooring\n======\n\nTwo.",
            ["Manual", "Manual > Mooring"],
        ),
        ("a.rst", "a\n\n=====  =====\nx      y\n=====  =====", []),
        (
            "a.adoc",
            "= Manual\n\n== Mooring\n\n----\n== code\n----\nTwo.",
            ["Manual", "Manual > Mooring"],
        ),
        (
            "a.org",
            "#+title: Manual\n* Mooring\n#+begin_src c\n* x\n#+end_src\n** Lines\nTwo.",
            ["Mooring", "Mooring > Lines"],
        ),
    ],
)
def test_headings_of_other_markup(tmp_path, name, text, paths):
    document = one_of(tmp_path / name, text)
    assert document.text == text
    found = [re.sub("(^|> )[=*]+ ", r"\1", path) for _, path, _ in document.outline.places]
    assert found == paths


def test_a_notebook_of_format_3_with_what_it_prints(tmp_path):
    code = {
        "cell_type": "code",
        "input": "tide()",
        "outputs": [
            {"output_type": "stream", "text": ["mean tide 412 cm\n"]},
            {"output_type": "pyerr", "ename": "ValueError", "evalue": "ebb"},
            {"output_type": "display_data", "png": "iVBO", "text": ["<Figure>"]},
        ],
    }
    cells = [{"cell_type": "heading", "level": 2, "source": "Data"}, code]
    document = one_of(tmp_path / "a.ipynb", json.dumps({"worksheets": [{"cells": cells}]}))
    assert document.title is None
    assert document.text.split("\n\n") == [
        "## Data",
        "```\ntide()\n```",
        "```\nmean tide 412 cm\n```",
        "```\nValueError: ebb\n```",
    ]
    assert document.notes == ["1 outputs without text, such as pictures, were not read"]


def test_subtitles_are_what_is_shown(tmp_path):
    shown = "1\n00:00:01,000 --> 00:00:02,000\nRoom\n\n2\n00:00:03,000 --> 00:00:04,000\n42\n"
    assert one_of(tmp_path / "a.srt", shown).text == "Room\n42"
    page = "WEBVTT\n\nNOTE not\nthis\n\ncue\n00:01.000 --> 00:02.000\n<v Bo>Tea &amp; rum</v>\n"
    assert one_of(tmp_path / "a.vtt", page).text == "Tea & rum"


def test_a_notebook_shows_what_its_objects_show(tmp_path):
    document = one_of(tmp_path / "a.ipynb", (FOLDER / "code" / "displays.ipynb").read_bytes())
    assert "IPython" not in document.text
    assert document.notes == ["1 outputs without text, such as pictures, were not read"]


def test_signs_of_a_manual(tmp_path):
    assert one_of(
        tmp_path / "a.1", ".TH A 1\n.SH NAME\na \\(co b \\[rs]n \\[u00E4] \\(xx\n"
    ).text.endswith("a © b \\n ä xx")
