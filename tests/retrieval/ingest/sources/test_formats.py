"""What a file is, by its first bytes: letters, boxes, packed tables, pages and XML of any name."""

import gzip
import json
import mailbox
from email.message import EmailMessage

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from conformance.documents.__main__ import FOLDER
from hybridtei.retrieval.ingest.document import Document
from tests.retrieval.ingest.sources.archives import zipped
from tests.retrieval.ingest.sources.reading import all_of, one_of, text_of

PAGE = "<!DOCTYPE html><html><head><title>Ferry</title><script>var a=1;</script></head><body><p>Leaves at nine.</p></body></html>"
SPACE = "urn:oasis:names:tc:opendocument:xmlns"
FLAT = f'<?xml version="1.0"?><office:document xmlns:office="{SPACE}:office:1.0" xmlns:text="{SPACE}:text:1.0"><office:body><office:text><text:p>At nine.</text:p></office:text></office:body></office:document>'


def letter(words, **fields):
    message = EmailMessage()
    message["From"] = "Ada <a@example.org>"
    for name, value in fields.items():
        message[name.replace("_", "-")] = value
    message.set_content(words, cte="base64")
    message.add_attachment(bytes(range(256)), maintype="image", subtype="png", filename="x.png")
    return message


@pytest.mark.parametrize(
    "name",
    ["view.php?id=3", "index", "a.shtml", "a.aspx", "a.xls", "a.doc", "a.txt", "a.xml", "a.docx"],
)
def test_a_page_of_any_name(tmp_path, name):
    assert text_of(tmp_path / name, PAGE) == "Ferry\nLeaves at nine."
    assert text_of(tmp_path / name, "<%@ Page %>\n<!-- x -->" + PAGE) == "Ferry\nLeaves at nine."
    assert text_of(tmp_path / name, PAGE.encode("utf-16")) == "Ferry\nLeaves at nine."


def test_a_page_of_a_language_stays_a_program(tmp_path):
    assert text_of(tmp_path / "a.php", "<?php echo '<p>'; ?>") == "<?php echo '<p>'; ?>"


@pytest.mark.parametrize(
    ("name", "data", "text"),
    [
        ("a.fodt", FLAT, "At nine."),
        ("a.nxml", '<?xml version="1.0"?><article><p>At ten.</p></article>', "At ten."),
        ("a.docx", "plain words", "plain words"),
    ],
)
def test_the_ending_does_not_decide(tmp_path, name, data, text):
    assert text_of(tmp_path / name, data) == text


@pytest.mark.parametrize("name", ["letter.docx", "parts.xlsx", "slides.pptx", "letter.odt"])
def test_an_archive_is_what_is_in_it(tmp_path, name):
    data = (FOLDER / "office" / name).read_bytes()
    assert text_of(tmp_path / "a", data) == text_of(tmp_path / name, data)
    assert text_of(tmp_path / "a.bak", data) == text_of(tmp_path / name, data)


def test_an_archive_of_other_things_is_refused(tmp_path):
    assert (
        "no reader for what is in this archive"
        in one_of(tmp_path / "a.whl", zipped(setup_py="x = 1")).reason
    )


def test_a_letter_without_its_ending(tmp_path):
    data = bytes(letter("Die Kräne stehen.", Subject="Dock", Date="Mon, 2 Mar 2026 10:00:00 +0100"))
    document = one_of(tmp_path / "1772442000.M1P2.host:2,S", data)
    assert (document.title, document.metadata["date"]) == ("Dock", "2026-03-02T10:00:00+01:00")
    assert document.text.endswith("Attachments: x.png\n\nDie Kräne stehen.")


def test_a_text_with_names_and_colons_is_no_letter(tmp_path):
    data = "Metadata-Version: 2.1\nName: x\nSubject: y\n\nwords"
    assert text_of(tmp_path / "a.txt", data) == data


@pytest.mark.parametrize("packed", [False, True])
def test_a_box_has_a_document_for_each_letter(tmp_path, packed):
    path = tmp_path / "archive.mbox"
    box = mailbox.mbox(path)
    for number, words in enumerate(
        ("It is ordered.\nFrom now on", "Die Kräne stehen.\n\nFrom here on")
    ):
        box.add(letter(words, Subject=f"Letter {number}", Message_ID=f"<{number}@a>"))
    box.close()
    data = path.read_bytes()
    rows = all_of(tmp_path / "b.gz", gzip.compress(data)) if packed else all_of(path, data)
    assert [(row.document_id, row.title, row.location) for row in rows] == [
        ("0@a", "Letter 0", "letter 1"),
        ("1@a", "Letter 1", "letter 2"),
    ]
    assert "Die Kräne stehen.\n\nFrom here on" in rows[1].text
    assert "AAECAwQF" not in rows[1].text


def test_lines_that_a_box_marks_are_as_the_letter_had_them(tmp_path):
    data = (
        "From a@x.org Thu Jan  1 00:00:00 2026\nFrom: a@x.org\nSubject: One\n\n"
        "First\n>From here\n>>From there\n> From quotes\n"
    )
    assert text_of(tmp_path / "b.mbox", data).endswith("\nFrom here\n>From there\n> From quotes")


def test_further_parts_of_a_letter_are_text(tmp_path):
    data = (
        "From: a@example.org\nSubject: Two\nMIME-Version: 1.0\nContent-Type: multipart/mixed; boundary=b\n\n"
        "--b\nContent-Type: text/plain\n\nSee the plan.\n"
        "--b\nContent-Type: image/png\nContent-Disposition: inline\n\nx\n"
        "--b\nContent-Type: text/plain\n\nThe crane comes.\n"
        "--b\nContent-Type: message/rfc822\n\nFrom: c@example.org\nSubject: Old\n\nThe bridge opens.\n--b--\n"
    )
    document = one_of(tmp_path / "a.eml", data)
    assert document.text == (
        "From: a@example.org\nAttachments: unnamed\n\nSee the plan.\n\nThe crane comes.\n\n"
        "From: c@example.org\nSubject: Old\n\nThe bridge opens."
    )
    assert document.notes == ["attachments were not read"]


def test_of_two_versions_the_one_that_holds_the_message(tmp_path):
    data = (
        "From: a@example.org\nSubject: x\nMIME-Version: 1.0\nContent-Type: multipart/alternative; boundary=b\n\n"
        "--b\nContent-Type: text/plain\n\n{}\n--b\nContent-Type: text/html\n\n<p>{}</p>\n--b--\n"
    )
    words = "The crane comes on Tuesday, and the bridge opens at six."
    assert words in text_of(tmp_path / "a.eml", data.format("See the HTML.", words))
    assert "*plain*" in text_of(tmp_path / "a.eml", data.format(f"{words} *plain*", words))


def test_a_field_of_many_words_is_read_in_linear_time(tmp_path):
    data = (
        b"Subject: " + b"=?utf-8?q?a?= " * 40_000 + b"\nTo: " + b"a@b.c, " * 40_000 + b"\n\nhello"
    )
    assert text_of(tmp_path / "a.eml", data).endswith("hello")


@pytest.mark.parametrize(
    ("pack", "ending"), [(gzip.compress, ".gz"), (zstandard.compress, ".zst"), (gzip.compress, "")]
)
def test_packed_tables_are_tables(tmp_path, pack, ending):
    lines = "".join(json.dumps({"id": f"d{n}", "text": f"Buoy {n}."}) + "\n" for n in range(5))
    assert len(all_of(tmp_path / f"a.jsonl{ending}", pack(lines.encode()))) == 5
    assert len(all_of(tmp_path / f"b.csv{ending}", pack(b"id,text\n1,Mast.\n2,Keel.\n"))) == 2
    path = tmp_path / "t.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["one", "two"]}), path)
    rows = all_of(tmp_path / f"c{ending}", pack(path.read_bytes()))
    assert [row.text for row in rows] == ["one", "two"]


@pytest.mark.parametrize(
    ("data", "count"),
    [
        ('{"id": 1, "text": "red"}\n{"id": 2, "text": "green"}\n', 2),
        (json.dumps([{"id": 3, "text": "tall"}, {"id": 4, "text": "short"}], indent=1), 2),
        ('[{"text": "a"}, 5]', 2),
        ('{"speed": 3,\n "text": "x"}', 1),
        ('{"a": 1}\n{"a": 2}\n', 1),
        ('[{"a": 1}]', 1),
        ("[1, 2", 1),
    ],
)
def test_records_in_a_json_file(tmp_path, data, count):
    assert len(all_of(tmp_path / "a.json", data)) == count


def test_text_of_json_has_its_letters_and_its_form(tmp_path):
    data = r'{"a": "Die F\u00e4hre \ud83d\ude00", "b": "\"\u0022 \\u00e4 \ud800 \u0007"}'
    text = r'{"a": "Die Fähre 😀", "b": "\"\u0022 \\u00e4 \ud800 \u0007"}'
    assert text_of(tmp_path / "a.json", data) == text


def test_a_row_of_a_list_has_its_place(tmp_path):
    rows = all_of(tmp_path / "a.json", '[{"text": "a"}, {"text": 5}, {"text": "c"}]')
    assert [isinstance(row, Document) for row in rows] == [True, False, True]
    assert rows[1].location == "record 2"


def test_a_letter_to_a_calendar_holds_its_words(tmp_path):
    message = letter("Come to the quay.", Subject="Meeting")
    message.clear_content()
    message.set_content("Come to the quay.")
    event = (
        "BEGIN:VCALENDAR\nBEGIN:VEVENT\nUID:"
        + 90 * "x"
        + "\nSUMMARY:Quay\nEND:VEVENT\nEND:VCALENDAR"
    )
    message.add_alternative(event, subtype="calendar")
    assert "Come to the quay." in text_of(tmp_path / "a.eml", bytes(message))


@pytest.mark.parametrize(
    ("fields", "body", "text"),
    [
        ("text/plain; format=flowed; delsp=yes", b"Zusam \nmen.", "Zusammen."),
        ("text/plain; charset=utf-7", b"Gr+APwA3w-e", "Grüße"),
        ("multipart/mixed", b"No boundary.", "No boundary."),
    ],
)
def test_what_a_letter_says_of_its_body(tmp_path, fields, body, text):
    head = f"From: a@b.c\nSubject: s\nDate: x\nContent-Type: {fields}\n\n".encode()
    assert text in text_of(tmp_path / "a.eml", head + body)


def test_styles_of_a_saved_page_are_no_text(tmp_path):
    message = letter("The ferry", Subject="Page")
    message.add_attachment("p {color: red}", subtype="css", disposition="inline")
    assert "color" not in text_of(tmp_path / "a.mht", bytes(message))
