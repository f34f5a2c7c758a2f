"""The ledger: what was noted is there after any end, and nothing else is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.ingest.files import SourceFile
from hybridtei.ingest.ledger import Ledger

DIGEST, SETTINGS = b"d" * 16, b"s" * 32


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "ledger.jsonl"


def known(path: Path) -> dict[str, int]:
    ledger = Ledger(path)
    found = dict(ledger.items())
    ledger.close()
    return found


def file(size: int = 10, modified: int = 5) -> SourceFile:
    return SourceFile(Path("x"), "label", size, modified)


def test_what_was_noted_is_read_again(path):
    ledger = Ledger(path)
    ledger.add([("a", DIGEST, 2), ("b", DIGEST, 1)])
    ledger.add([("a", b"e" * 16, 3)])
    ledger.remove(["b"])
    assert (len(ledger), ledger.chunks) == (1, 3)
    ledger.close()
    again = Ledger(path)
    assert (again.get("a").digest, again.get("a").chunks, again.get("b")) == (b"e" * 16, 3, None)
    again.close()


@given(cut=st.integers(0, 400), torn=st.binary(max_size=20).filter(lambda data: b"\n" not in data))
def test_a_torn_end_costs_only_itself(tmp_path_factory, cut, torn):
    path = tmp_path_factory.mktemp("ledger") / "ledger.jsonl"
    ledger = Ledger(path)
    for number in range(6):
        ledger.add([(f"d{number}", DIGEST, 1)])
    ledger.close()
    data = path.read_bytes()[:cut]
    path.write_bytes(data + (torn if cut % 2 else b""))
    whole = data.count(b"\n")
    assert known(path) == {f"d{number}": 1 for number in range(whole)}
    ledger = Ledger(path)
    ledger.add([("new", DIGEST, 1)])
    ledger.close()
    assert known(path) == {f"d{number}": 1 for number in range(whole)} | {"new": 1}


@pytest.mark.parametrize("line", [b'{"d": "b"}', b'{"d": "b", "h": "00", "n": 300000000}'])  # more chunks than a document has
def test_a_line_of_nonsense_ends_what_is_trusted(path, line):
    ledger = Ledger(path)
    ledger.add([("a", DIGEST, 1)])
    ledger.close()
    with path.open("ab") as opened:
        opened.write(line + b'\n{"d": "c", "h": "00", "n": 1}\n')
    assert known(path) == {"a": 1}


def test_lines_are_on_the_disk_before_it_goes_on(path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(path.read_bytes()))
    ledger = Ledger(path)
    ledger.add([("a", DIGEST, 1), ("b", DIGEST, 1)])
    assert len(synced) == 1
    assert synced[0].count(b"\n") == 2
    ledger.close()


def test_a_finished_file_is_known_until_it_changes(path):
    ledger = Ledger(path)
    ledger.finish([(file(), 7)], SETTINGS)
    ledger.close()
    ledger = Ledger(path)
    assert ledger.finished(file(), SETTINGS).documents == 7
    assert ledger.finished(file(size=11), SETTINGS) is None
    assert ledger.finished(file(modified=6), SETTINGS) is None
    assert ledger.finished(file(), b"t" * 32) is None
    ledger.add([("a", DIGEST, 1)])
    ledger.remove(["a"])
    assert ledger.finished(file(), SETTINGS) is None
    ledger.close()


def test_clear(path):
    ledger = Ledger(path)
    ledger.add([("a", DIGEST, 1)])
    ledger.clear()
    ledger.add([("b", DIGEST, 1)])
    ledger.close()
    assert known(path) == {"b": 1}
