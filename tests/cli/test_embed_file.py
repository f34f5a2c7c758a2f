"""A file of texts -> a file of vectors, over the fake backend."""

import json
import multiprocessing
import os
import signal
from itertools import pairwise

import numpy as np
import pyarrow.parquet
import pytest

from conformance.small.fake_backend import FakeBackend
from hybridtei.cli import embed as module
from hybridtei.cli.embed import embed_file, read_texts
from hybridtei.config import EngineConfig
from hybridtei.encoder import Encoder
from hybridtei.errors import EmptyInput, InvalidInput
from tests.inference.engine import small
from tests.near import near, same

TEXTS = ["a hybrid search", "é 🙂 one", "two two", "one " * 90, " ", "seven"]
ALL = ("dense", "sparse", "multivector")
TOLERANCE = 1e-6


def encoder(**backend):
    model = small.model()
    return Encoder(model, FakeBackend(model.spec, **backend), 256, EngineConfig())


@pytest.fixture(params=["txt", "jsonl", "jsonl of strings"])
def source(request, tmp_path):
    path = tmp_path / f"in.{request.param.split()[0]}"
    if request.param == "txt":
        lines = TEXTS
    elif request.param == "jsonl":
        lines = [json.dumps({"id": i, "text": text}) for i, text in enumerate(TEXTS)]
    else:
        lines = [json.dumps(text, ensure_ascii=False) for text in TEXTS]
    path.write_text("\n".join(lines) + "\n\n")
    return str(path)


@pytest.fixture(params=[2, 1024])
def chunk(request, monkeypatch):
    """Several chunks, or one."""
    monkeypatch.setattr(module, "CHUNK", request.param)
    return request.param


def expected():
    return encoder().encode(TEXTS, ALL)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_rows(source, chunk, tmp_path, suffix):
    target = tmp_path / f"out.{suffix}"
    assert embed_file(encoder(), source, str(target)) == len(TEXTS)
    if suffix == "jsonl":
        rows = [json.loads(line) for line in target.read_text().splitlines()]
    else:
        rows = pyarrow.parquet.read_table(target).to_pylist()
    wanted = expected()
    assert [row["text"] for row in rows] == TEXTS
    for i, row in enumerate(rows):
        near(row["dense"], wanted.dense[i], TOLERANCE)
        near(row["multivector"], wanted.multivector.row(i), TOLERANCE)
        indices, values = wanted.sparse.row(i)
        assert row["sparse"]["indices"] == indices.tolist()
        near(row["sparse"]["values"], values, TOLERANCE)


def texts_in(arrays):
    """Those of a `.npz`, one after the other in UTF-8."""
    ends = arrays["texts_offsets"].tolist()
    return [arrays["texts"][begin:end].tobytes().decode() for begin, end in pairwise(ends)]


def test_npz(source, chunk, tmp_path):
    target = tmp_path / "out.npz"
    embed_file(encoder(), source, str(target))
    wanted = expected()
    with np.load(target) as arrays:
        assert texts_in(arrays) == TEXTS
        near(arrays["dense"], wanted.dense, TOLERANCE)
        same(arrays["sparse_indices"], wanted.sparse.indices)
        same(arrays["sparse_indptr"], wanted.sparse.indptr)
        near(arrays["sparse_values"], wanted.sparse.values, TOLERANCE)
        near(arrays["multivector"], wanted.multivector.values, TOLERANCE)
        same(arrays["multivector_offsets"], wanted.multivector.offsets)


@pytest.mark.parametrize("suffix", ["jsonl", "npz", "parquet"])
def test_only_the_wanted_outputs(tmp_path, suffix):
    (tmp_path / "in.txt").write_text("one\ntwo\n")
    target = tmp_path / f"out.{suffix}"
    embed_file(encoder(), str(tmp_path / "in.txt"), str(target), ["sparse"])
    if suffix == "jsonl":
        assert set(json.loads(target.read_text().splitlines()[0])) == {"text", "sparse"}
    elif suffix == "npz":
        with np.load(target) as arrays:
            names = "texts texts_offsets sparse_indices sparse_values sparse_indptr"
            assert set(arrays) == set(names.split())
    else:
        assert pyarrow.parquet.read_schema(target).names == ["text", "sparse"]


@pytest.mark.parametrize(
    ("name", "data", "line", "why"),
    [
        ("in.jsonl", b'"one"\n\n\nnonsense\n', 4, "not JSON"),
        ("in.jsonl", b'"one"\n{"body": "two"}\n', 2, "`text` should be a string"),
        ("in.jsonl", b'"one"\n5\n', 2, "`text` should be a string"),
        ("in.jsonl", b'"one"\n"\xff"\n', 2, "not UTF-8"),
        ("in.jsonl", b'"one"\n"\\ud800"\n', 2, "surrogate"),
        ("in.jsonl", b'"one"\n' + b"[" * 100_000 + b"\n", 2, "not JSON"),
        ("in.txt", b"one\ntwo\n\xff\n", 3, "not UTF-8"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_left_behind(tmp_path, name, data, line, why):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InvalidInput, match=rf"{name}:{line}: .*{why}"):
        embed_file(encoder(), str(tmp_path / name), str(tmp_path / "out.jsonl"))
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_failure_leaves_the_old_file_whole(tmp_path):
    (tmp_path / "in.txt").write_text("one\npoison\n")
    target = tmp_path / "out.jsonl"
    target.write_text("old")
    with pytest.raises(Exception, match="the batch holds"):
        embed_file(encoder(fail_on=small.IDS["poison"]), str(tmp_path / "in.txt"), str(target))
    assert target.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "out.jsonl"]


@pytest.mark.parametrize(
    ("source", "target", "outputs", "error", "why"),
    [
        ("in.csv", "out.npz", None, InvalidInput, "should end in .txt or .jsonl"),
        ("empty.txt", "out.npz", None, EmptyInput, "holds no text"),
        (
            "in.txt",
            "out.npz",
            ["vectors"],
            InvalidInput,
            "known: dense, multivector, sparse, tokens",
        ),
        ("in.txt", "out.npz", ["dense", "tokens"], InvalidInput, "token states are not written"),
        ("missing.txt", "out.npz", None, FileNotFoundError, "missing.txt"),
    ],
)
def test_what_cannot_be(tmp_path, source, target, outputs, error, why):
    (tmp_path / "in.txt").write_text("one\n")
    (tmp_path / "in.csv").write_text("one\n")
    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(error, match=why):
        embed_file(encoder(), str(tmp_path / source), str(tmp_path / target), outputs)


@pytest.mark.parametrize(
    ("name", "line"), [("in.txt", "one"), ("in.jsonl", '{"text": "one"}'), ("in.jsonl", '"one"')]
)
def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path, name, line):
    path = tmp_path / name
    path.write_text(f"{line}\n{line}\n", encoding="utf-8-sig")
    assert list(read_texts(path)) == ["one", "one"]


def killed_within(folder):
    """Run in a process of its own, which ends in its second chunk."""
    embedded = encoder()
    plain, module.CHUNK = embedded.encode, 1

    def encode(texts, **settings):
        if texts == ["two"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(texts, **settings)

    embedded.encode = encode
    embed_file(embedded, str(folder / "in.txt"), str(folder / "out.jsonl"))


def test_nothing_stays_of_a_run_that_was_killed(tmp_path):
    (tmp_path / "in.txt").write_text("one\ntwo\n")
    child = multiprocessing.get_context("spawn").Process(target=killed_within, args=(tmp_path,))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == ["in.txt"]
