"""Arrays as JSON: numbers in their shortest form as TEI prints them, the same bits after a round
trip."""

import base64
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.batch import Ragged
from hybridtei.outputs import SparseVectors
from hybridtei.server import answers as encoding
from hybridtei.server.api.tei import SparseValue
from tests.near import same

floats = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=8)


def through(answer):
    return json.loads(encoding.to_json(answer))


@given(floats)
def test_float32_survives_the_round_trip(values):
    row = np.array(values, dtype=np.float32)
    text = encoding.to_json(row)
    assert b" " not in text
    same(np.array(json.loads(text), dtype=np.float32), row)
    unpacked = np.frombuffer(base64.b64decode(encoding.as_base64(row)), dtype="<f4")
    same(unpacked, row)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.020964134, b"0.020964134"),
        (1.0, b"1.0"),
        (-0.0, b"-0.0"),
        (0.1, b"0.1"),
        (float("nan"), b"null"),
        (float("inf"), b"null"),
        (1e-5, b"0.00001"),
        (1e-6, b"0.000001"),
        (9.9e-7, b"9.9e-7"),
        (9.9e12, b"9900000000000.0"),
    ],
)
def test_numbers_as_tei_prints_them(value, text):
    assert encoding.to_json(np.array([value], dtype=np.float32)) == b"[" + text + b"]"


@given(
    st.lists(
        st.dictionaries(st.integers(0, 50), st.floats(2**-10, 10, width=32), max_size=6),
        min_size=1,
        max_size=4,
    )
)
def test_sparse_formats_agree(rows):
    dense = np.zeros((len(rows), 51), dtype=np.float32)
    for i, row in enumerate(rows):
        for index, value in row.items():
            dense[i, index] = value
    vectors = SparseVectors.from_dense(dense)
    for i, row in enumerate(rows):
        tei = through(encoding.sparse(vectors, i, "tei", str))
        qdrant = through(encoding.sparse(vectors, i, "qdrant", str))
        tokens = through(
            encoding.sparse(vectors, i, "tokens", lambda ids: [f"piece {k}" for k in ids])
        )
        wanted = sorted((index, np.float32(value)) for index, value in row.items())
        assert [(entry["index"], np.float32(entry["value"])) for entry in tei] == wanted
        assert (
            list(zip(qdrant["indices"], map(np.float32, qdrant["values"]), strict=True)) == wanted
        )
        assert {int(name.split()[1]): np.float32(value) for name, value in tokens.items()} == dict(
            wanted
        )


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_ragged_is_a_list_of_lists_of_vectors(lengths):
    rows = [np.full((length, 2), i, dtype=np.float32) for i, length in enumerate(lengths)]
    assert through(encoding.ragged(Ragged.from_rows(rows))) == [row.tolist() for row in rows]


def test_views_with_gaps_and_structs():
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert through({"cut": matrix[:, :2], "every": matrix[0, ::2], "one": matrix[1, 1]}) == {
        "cut": matrix[:, :2].tolist(),
        "every": [0, 2],
        "one": 5,
    }
    assert through([SparseValue(1, 0.5), encoding.Fragment(b"[1]")]) == [
        {"index": 1, "value": 0.5},
        [1],
    ]
    with pytest.raises(TypeError):
        encoding.to_json(object())


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "f2", "i1", "u1"])
def test_base64_is_little_endian(dtype):
    row = np.array([1, 2, 3]).astype(dtype)
    unpacked = np.frombuffer(base64.b64decode(encoding.as_base64(row)), row.dtype.newbyteorder("<"))
    same(unpacked, row)


def test_a_large_answer_is_written_in_pieces_and_comes_out_the_same():
    rows = np.arange(6, dtype=np.float32).reshape(3, 2) / 7
    answers = [
        rows,
        [rows, rows[:1]],
        [],
        {
            "object": "list",
            "data": [{"embedding": rows[0], "index": 0}],
            "usage": {"tokens": 3},
            "row": rows[1],
        },
        [{"score": np.float32(0.1), "label": "a"}],
        encoding.Fragment(b"[1]"),
    ]
    for answer in answers:
        assert encoding.piecewise(answer) == encoding.to_json(answer)


def test_no_call_writes_much_of_a_large_answer(monkeypatch):
    """A call keeps Python's lock: half a second for some payloads."""
    vector = np.zeros(384, dtype=np.float32)
    payloads = {
        "objects": [{"b": 1, "c": [1, 2, {}]} for _ in range(20_000)],
        "numbers": [0.5] * 200_000,
        "text": 'é\n"\u2028' * 1_000_000,
        "names": {f"k{i}": i for i in range(50_000)},
        "deep": [[[[{"a": [[5] * 50_000]}]]]],
    }
    hits = [{"id": 1, "payload": payloads}, {"id": 2, "payload": {}}]
    pieces = []
    to_json = encoding.to_json

    def noted(value):
        pieces.append(to_json(value))
        return pieces[-1]

    monkeypatch.setattr(encoding, "to_json", noted)
    for answer in ({"results": [{"hits": hits}]}, [vector] * 3_000, [np.zeros((500, 384))] * 2):
        pieces.clear()
        whole = to_json(answer)
        assert encoding.piecewise(answer) == whole
        assert max(map(len, pieces)) < 4_100_000 < len(whole) or len(whole) < 4_100_000
        assert max(piece.count(b",") for piece in pieces) <= 110_000
    lazy = {"data": iter([{"embedding": "x"}, {"embedding": "y"}])}
    assert encoding.piecewise(lazy) == b'{"data":[{"embedding":"x"},{"embedding":"y"}]}'


def test_a_long_list_is_not_copied_once_it_is_written():
    """Each copy of an answer of 100 MB takes 100 MB."""
    answer = encoding.piecewise([np.zeros(2, dtype=np.float32), [1, "a"], {"b": None}])
    assert answer == b'[[0.0,0.0],[1,"a"],{"b":null}]'
    assert encoding.to_json(answer) is encoding.piecewise(answer) is answer
    assert encoding.piecewise([]) == b"[]"
