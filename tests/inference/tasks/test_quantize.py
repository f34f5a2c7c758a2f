"""Vectors in fewer bytes, as sentence-transformers makes them."""

import numpy as np
import pytest
from sentence_transformers.util.quantization import quantize_embeddings

from conformance.quality.ranges import ranges_of
from hybridtei.errors import LoadError
from hybridtei.inference.tasks.pooling import quantized, read_ranges
from tests.near import same

DRAW = np.random.default_rng(0)


@pytest.mark.parametrize("precision", ["int8", "uint8", "binary", "ubinary"])
@pytest.mark.parametrize("width", [1, 8, 33, 384])
def test_as_sentence_transformers(precision, width):
    known, rows = (DRAW.standard_normal((50, width)).astype(np.float32) for _ in range(2))
    rows[0] = 0
    rows[1] = known[3]
    ranges = ranges_of(known)
    wanted = quantize_embeddings(rows, precision=precision, ranges=ranges)
    found = quantized(rows, precision, ranges)
    assert found.dtype == wanted.dtype
    same(found, wanted)


def test_float16_and_float():
    rows = DRAW.standard_normal((3, 5)).astype(np.float32)
    assert quantized(rows, "float") is rows
    same(quantized(rows, "float16"), rows.astype(np.float16))


@pytest.mark.parametrize("precision", ["int8", "uint8", "binary", "ubinary", "float16"])
def test_a_row_does_not_depend_on_its_neighbours(precision):
    rows = DRAW.standard_normal((9, 24)).astype(np.float32)
    ranges = ranges_of(rows)
    together = quantized(rows, precision, ranges)
    for place, row in enumerate(rows):
        same(quantized(row[None], precision, ranges)[0], together[place])
    assert quantized(rows[:0], precision, ranges).shape == (0, together.shape[1])


def test_a_dimension_without_a_range():
    ranges = np.zeros((2, 4), dtype=np.float32)
    assert quantized(np.ones((1, 4), dtype=np.float32), "uint8", ranges).tolist() == [[1] * 4]


def test_files_of_ranges(tmp_path):
    ranges = np.array([[-1, 0], [1, 2]], dtype=np.float64)
    np.save(tmp_path / "one.npy", ranges)
    np.savez(tmp_path / "many.npz", dense=ranges, multivector=ranges[:, :1], dense_1=ranges[:, :1])
    assert read_ranges(tmp_path / "one.npy").keys() == {"dense"}
    read = read_ranges(tmp_path / "many.npz")
    assert {name: array.shape for name, array in read.items()} == {
        "dense": (2, 2),
        "multivector": (2, 1),
        "dense_1": (2, 1),
    }
    assert {array.dtype for array in read.values()} == {np.dtype(np.float32)}


@pytest.mark.parametrize(
    "ranges", [np.zeros((3, 4)), np.zeros(4), np.array([[1.0], [0.0]]), np.array([["a"], ["b"]])]
)
def test_files_that_hold_something_else(tmp_path, ranges):
    np.save(tmp_path / "bad.npy", ranges)
    with pytest.raises(LoadError, match="least and the most"):
        read_ranges(tmp_path / "bad.npy")
    (tmp_path / "text.npy").write_text("no")
    for name in ("text.npy", "absent.npy"):
        with pytest.raises(LoadError, match="not a file of ranges"):
            read_ranges(tmp_path / name)
