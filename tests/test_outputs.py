"""Sparse vectors against scipy and dense rows; records of columns against lists."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hybridtei.batch import Ragged
from hybridtei.errors import LoadError, NotANumber
from hybridtei.outputs import Embeddings, HeadOutputs, SparseVectors

WIDTH = 7
DENSE = arrays.arrays(
    np.float32,
    st.tuples(st.integers(1, 6), st.just(WIDTH)),
    elements=st.sampled_from([0.0, 0.0, 0.0, 0.5, 1.25, 3.0]),
)


@given(DENSE)
def test_from_dense_to_dense_is_identity(rows):
    sparse = SparseVectors.from_dense(rows)
    assert np.array_equal(sparse.to_dense(), rows)
    assert np.array_equal(sparse.to_scipy().toarray(), rows)
    assert len(sparse) == len(rows)
    assert sparse.width == WIDTH


@given(DENSE)
def test_indices_ascend_and_no_value_is_zero(rows):
    sparse = SparseVectors.from_dense(rows)
    for i in range(len(sparse)):
        indices, values = sparse.row(i)
        assert (np.diff(indices) > 0).all()
        assert (values != 0).all()


@given(DENSE, st.data())
def test_take_and_concat_equal_the_same_on_dense_rows(rows, data):
    sparse = SparseVectors.from_dense(rows)
    picked = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=9))
    assert np.array_equal(sparse.take(picked).to_dense(), rows[picked])
    joined = SparseVectors.concat([sparse, sparse.take(picked)])
    assert np.array_equal(joined.to_dense(), np.concatenate([rows, rows[picked]]))


def outputs(n, *, start=0):
    """Sequence i has i in its dense row, i + 1 token weights, and weight i at index i."""
    numbers = range(start, start + n)
    return HeadOutputs(
        dense=np.array([[i, i] for i in numbers], dtype=np.float32),
        token_weights=Ragged.from_rows([np.full(i + 1, i, dtype=np.float32) for i in numbers]),
        splade=SparseVectors.from_dense(
            np.diag(np.arange(1, 21, dtype=np.float32))[start : start + n]
        ),
    )


def numbers_of(value):
    numbers = [int(row[0]) for row in value.dense]
    assert [row.tolist() for row in value.token_weights] == [[i] * (i + 1) for i in numbers]
    assert [value.splade.row(k)[0].tolist() for k in range(len(numbers))] == [[i] for i in numbers]
    return numbers


@given(st.integers(1, 8), st.data())
def test_columns_are_taken_together(n, data):
    picked = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=10))
    assert numbers_of(outputs(n).take(picked)) == picked


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_columns_are_joined_together(sizes):
    starts = np.cumsum([0, *sizes])
    parts = [outputs(n, start=int(start)) for n, start in zip(sizes, starts, strict=False)]
    assert numbers_of(HeadOutputs.concat(parts)) == list(range(sum(sizes)))


def test_a_column_that_one_part_lacks_is_left_out():
    whole, bare = outputs(2), HeadOutputs(dense=np.zeros((1, 2), dtype=np.float32))
    joined = HeadOutputs.concat([whole, bare])
    assert len(joined.dense) == 3
    assert joined.token_weights is None
    assert joined.splade is None


@pytest.mark.parametrize("column", ["dense", "sparse", "multivector", "tokens"])
def test_embeddings_are_as_many_as_their_rows(column):
    rows = np.ones((3, 2), dtype=np.float32)
    kinds = {"dense": rows, "sparse": SparseVectors.from_dense(rows)}
    ragged = Ragged(np.ones((4, 2), dtype=np.float32), np.array([0, 2, 2, 4]))
    assert len(Embeddings(**{column: kinds.get(column, ragged)})) == 3


@pytest.mark.parametrize(
    "columns",
    [
        {"dense": np.arange(6, dtype=np.float32).reshape(2, 3)},
        {
            "sparse": SparseVectors.from_dense(np.eye(2, WIDTH, dtype=np.float32)),
            "multivector": Ragged(np.arange(12, dtype=np.int8).reshape(4, 3), np.array([0, 1, 4])),
            "tokens": Ragged(np.ones((3, 2), np.float32), np.array([0, 0, 3])),
        },
        {},
    ],
)
def test_saved_columns_come_back(tmp_path, columns):
    path = tmp_path / "vectors"
    Embeddings(**columns).save(path)
    loaded = Embeddings.load(path)
    for name in ("dense", "sparse", "multivector", "tokens"):
        saved, column = columns.get(name), getattr(loaded, name)
        assert (saved is None) == (column is None)
        if name == "dense" and saved is not None:
            np.testing.assert_array_equal(column, saved)
        for part in getattr(saved, "__dataclass_fields__", ()):
            np.testing.assert_array_equal(getattr(column, part), getattr(saved, part))
            assert type(getattr(column, part)) is type(getattr(saved, part))


@pytest.mark.parametrize("content", [b"", b"{}", b"PK\x03\x04broken", b"\x93NUMPY\x01\x00"])
def test_a_file_of_another_kind_is_named(tmp_path, content):
    path = tmp_path / "vectors"
    path.write_bytes(content)
    with pytest.raises(LoadError, match="vectors: holds no saved Embeddings"):
        Embeddings.load(path)
    np.savez(tmp_path / "other.npz", **{"sparse.indices": np.ones(2)})
    with pytest.raises(LoadError):
        Embeddings.load(tmp_path / "other.npz")


NAN_ROWS = np.array([[1.0], [np.nan], [2.0], [np.inf]], np.float32)
OFFSETS = np.array([0, 0, 1, 2, 4])


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        (HeadOutputs(dense=NAN_ROWS), 1),
        (HeadOutputs(tokens=Ragged(NAN_ROWS, OFFSETS)), 2),
        (HeadOutputs(dense=NAN_ROWS[:1], multivector=Ragged(NAN_ROWS[3:], OFFSETS[:3])), 1),
        (HeadOutputs(splade=SparseVectors(OFFSETS[:4], NAN_ROWS[:, 0], OFFSETS, WIDTH)), 2),
    ],
)
def test_an_output_that_is_not_finite_is_an_error_of_its_text(outputs, text):
    """The first one. A text without rows has none."""
    with pytest.raises(NotANumber, match=f"text {text}, counted from 0, is infinite or NaN"):
        outputs.check_finite()
