"""Files that real programs wrote (python-docx, openpyxl, python-pptx, odfpy), read as a person
reads them, and packages that are changed by hand."""

import zipfile
from io import BytesIO

import pytest

from conformance.documents.__main__ import FOLDER
from hybridtei.errors import LoadError
from hybridtei.retrieval.ingest import office
from hybridtei.retrieval.ingest.archive import packed
from hybridtei.retrieval.ingest.document import Rejection
from hybridtei.retrieval.ingest.options import ReadOptions
from tests.retrieval.ingest.sources.archives import zipped
from tests.retrieval.ingest.sources.reading import all_of, text_of

OFFICE = FOLDER / "office"
HEAD = "<w:hdr xmlns:w='w'><w:p><w:r><w:t>Contract No. HX-2207</w:t></w:r></w:p></w:hdr>"
DIAGRAM = "<dgm:dataModel xmlns:dgm='d' xmlns:a='a'><a:p><a:r><a:t>Inspect the hull</a:t></a:r></a:p></dgm:dataModel>"


def changed(name, part, change):
    """The fixture with a part that `change` makes of the part's text, which is empty if new."""
    with zipfile.ZipFile(OFFICE / name) as archive:
        parts = {member: archive.read(member) for member in archive.namelist()}
    parts[part] = change(parts.get(part, b"").decode()).encode()
    return packed(parts)


@pytest.mark.parametrize(
    ("name", "lines", "absent"),
    [
        (
            "letter.docx",
            [
                "Contract No. HX-2207",
                "Page foot 77",
                "The dose is 10^6 units, H2O.",
                "Shown again.",
                "c10 c20 | c21 | c22",
                "Price 700 crowns.",
                "field12",
                "(a+b)/2=xy^3",
                "東京へ行く",
                "Control words",
                "Boxed words",
                "A comment here",
            ],
            ["hidden words", "900", "PAGEREF", "とうきょう", "movedaway"],
        ),
        (
            "parts.xlsx",
            [
                "Anchor | 2026-03-14 | 2026-03-14 15:30:00 | 15:30:00 | 15% | TRUE | 1,234.50 € |  | 0815 | 30:00:00",
                "Merged |  | right",
                "Merged |  | below",
                "Title: Tonnage by quarter Series: Series 1",
                "Check this",
            ],
            ["46095.0", "0.6458"],
        ),
        ("since_1904.xlsx", ["2026-03-14"], []),
        (
            "letter.odt",
            [
                "The price is 700 crowns.",
                "The dose is 10^6 units[1] each x y",
                "At low tide.",
                "The crane lifts eight tonnes.",
                "check this",
                "A | B",
            ],
            ["900", "2026-02-01"],
        ),
        (
            "shifts.ods",
            ["Ada | off | off | off | late | 14.03.26", "Bo |  |  |  | night | 15 %", "same | x"],
            [],
        ),
        ("slides.pptx", ["t10 | t11", "10^6", "Categories: East, West"], []),
        ("show.odp", ["First page words", "Second page words"], []),
    ],
)
def test_a_file_of_a_real_program(tmp_path, name, lines, absent):
    text = text_of(tmp_path / name, (OFFICE / name).read_bytes())
    assert [line for line in lines if line not in text.split("\n")] == []
    assert [words for words in absent if words in text] == []


def test_slides_come_in_the_order_of_the_show_each_with_its_notes(tmp_path):
    (document,) = all_of(tmp_path / "a.pptx", (OFFICE / "slides.pptx").read_bytes())
    words = ("Table slide", "Title slide", "Say that flags are washed", "Chart slide")
    places = [document.text.index(part) + document.shift for part in words]
    assert [document.page_at(place) for place in places] == [1, 2, 3, 4]


def test_headings_of_styles_are_known_by_their_name(tmp_path):
    """A German Word has other ids of styles."""

    def change(styles):
        return styles.replace('w:styleId="Heading1"', 'w:styleId="berschrift1"')

    data = changed("letter.docx", "word/styles.xml", change)
    with zipfile.ZipFile(BytesIO(data)) as archive:
        document = archive.read("word/document.xml").decode()
        parts = {name: archive.read(name) for name in archive.namelist()}
    parts["word/document.xml"] = document.replace('"Heading1"', '"berschrift1"').encode()
    (document,) = all_of(tmp_path / "a.docx", packed(parts))
    assert "Mooring" in [path for _, path, _ in document.outline.places]


@pytest.mark.parametrize(
    ("name", "part", "content", "words"),
    [
        ("letter.docx", "word/header9.xml", HEAD.replace("2207", "3308"), "HX-3308"),
        ("letter.docx", "word/diagrams/data1.xml", DIAGRAM, "Inspect the hull"),
        ("slides.pptx", "ppt/diagrams/data1.xml", DIAGRAM, "Inspect the hull"),
        ("parts.xlsx", "xl/drawings/drawing9.xml", DIAGRAM, "Inspect the hull"),
    ],
)
def test_words_that_the_library_leaves_out_are_added(tmp_path, name, part, content, words):
    assert words in text_of(tmp_path / name, changed(name, part, lambda _: content))


def test_formulas_without_a_value_are_told(tmp_path):
    (document,) = all_of(tmp_path / "a.xlsx", (OFFICE / "parts.xlsx").read_bytes())
    assert document.notes == ["2 formulas have no stored value"]


def test_an_archive_that_lies_about_a_size_is_refused(tmp_path):
    data = BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("word/document.xml", b" " * 10_000)
    (rejection,) = all_of(tmp_path / "a.docx", data.getvalue())
    assert "packed by method 12, which is not read" in rejection.reason


def test_cells_that_repeat_one_text_have_a_budget(tmp_path):
    text = "lighthouse " * 1000
    cells = '<row><c t="s"><v>0</v></c></row>' * 100
    data = zipped(
        xl__sharedStrings_xml=f"<sst><si><t>{text}</t></si></sst>",
        xl__worksheets__sheet1_xml=f"<worksheet>{cells}</worksheet>",
    )
    (rejection,) = all_of(tmp_path / "a.xlsx", data, max_document_characters=100_000)
    assert "cells repeat shared texts" in rejection.reason


def test_a_chapter_that_is_named_often_is_there_once():
    spine = '<itemref idref="a"/>' * 100
    package = f'<package><manifest><item id="a" href="a.html"/></manifest><spine>{spine}</spine></package>'
    content = office.read_epub(zipped(p_opf=package, a_html="<p>words</p>"), ReadOptions())
    assert content.pages == ["words"]


def test_without_the_library_the_file_is_refused_by_its_name(monkeypatch):
    def absent(extra, module):
        raise LoadError(f"{module} is not installed: the extra `{extra}` has it")

    monkeypatch.setattr(office, "require_extra", absent)
    with pytest.raises(LoadError, match="office_oxide is not installed"):
        office.read_docx((OFFICE / "letter.docx").read_bytes(), ReadOptions())


@pytest.mark.parametrize("name", ["letter.docx", "parts.xlsx", "slides.pptx", "letter.odt"])
def test_damaged_files_are_read_or_refused(tmp_path, name):
    """A hundred files, each with 20 changed bytes."""
    data = (OFFICE / name).read_bytes()
    for seed in range(25):
        changed_data = bytearray(data)
        for place in range(20):
            at = (seed * 7919 + place * 104_729) % len(data)
            changed_data[at] = (changed_data[at] + seed + place + 1) % 256
        (part,) = all_of(tmp_path / name, bytes(changed_data))
        assert isinstance(part, Rejection) <= bool(getattr(part, "reason", ""))
