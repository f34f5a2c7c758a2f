"""The folder of many kinds: each file is read as `expected.json` says."""

import json

from conformance.documents.__main__ import FOLDER, HERE, differences, read


def test_every_file_is_read_as_expected():
    texts, refusals, _ = read(FOLDER)
    assert differences(texts, refusals) == []


def test_the_folder_has_sixty_files_of_twenty_five_kinds():
    expected = json.loads((HERE / "expected.json").read_text(encoding="utf-8"))
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert {str(path.relative_to(FOLDER)) for path in files} == set(expected)
    assert len(files) >= 60
    assert len({path.suffix for path in files}) >= 25
