"""What an ingest left out or noted is one table, by reason."""

import json

from hybridtei.config import ModelConfig
from hybridtei.retrieval.ingest.report import MAX_REASONS, Report
from hybridtei.retrieval.ingest.run import ingest


def test_reasons_that_differ_in_numbers_are_one():
    report = Report()
    for size in (10, 2_000):
        report.add("files", f"the file has {size} bytes", f"a{size}.txt")
    report.add("rows", "`text` is empty", "a.csv, line 3")
    (files, rows) = report
    assert (files.what, files.count, files.reason, files.example) == (
        "files",
        2,
        "the file has 10 bytes",
        "a10.txt",
    )
    assert rows.count == 1


def test_reasons_are_bounded():
    report = Report()
    for number in range(500):
        letters = "".join(chr(97 + int(digit)) for digit in str(number))
        report.add("files", letters, "x")
    entries = list(report)
    assert len(entries) == MAX_REASONS + 1
    assert sum(entry.count for entry in entries) == 500


def test_a_folder_says_what_it_lacks(tmp_path, monkeypatch):
    # The quarantine is written to the working folder
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "docs"
    (source / "node_modules").mkdir(parents=True)
    (source / "program").write_bytes(b"\x7fELF" + bytes(1000))
    (source / "a.csv").write_text("id,text\n1,one\n2,\n3,\n")
    (source / "b.txt").write_bytes("naïve café".encode("cp1252"))
    (source / "c.txt").write_text("สวัสดีชาวโลก นี่คือข้อความภาษาไทย")
    summary = ingest(source, "docs", ModelConfig(), tmp_path / "qdrant", quiet=True, dry_run=True)
    report = {(entry.what, entry.count, entry.example) for entry in summary.report}
    assert report == {
        ("left out", 1, "docs/node_modules"),
        ("files", 1, "docs/program, file"),
        ("rows", 2, "docs/a.csv, line 3"),
        ("documents", 1, "docs/b.txt"),
        ("documents", 1, "docs/c.txt"),
    }
    words = summary.in_words()
    assert "2 rows: `text` is empty (docs/a.csv, line 3)" in words
    assert "a multilingual model" in words
    assert "read as cp1252, by a guess" in words
    written = json.loads(summary.as_json())["report"]
    assert {
        "what": "rows",
        "reason": "`text` is empty",
        "example": "docs/a.csv, line 3",
        "count": 2,
    } in written
