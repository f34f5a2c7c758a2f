"""Bytes written from arrays are what protobuf reads."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hybridtei.rpc.messages import DecodeResponse, EmbedResponse, Metadata, float_rows, floats, message
from hybridtei.system.frames import nested, varint

FLOATS = st.floats(width=32, allow_nan=False)


@given(st.integers(0, 2**64 - 1))
def test_varints(number):
    assert Metadata.FromString(b"\x18" + varint(number)).total_time_ns == number


@given(arrays.arrays(np.float32, st.integers(0, 300), elements=FLOATS))
def test_floats(row):
    read = EmbedResponse.FromString(floats(1, row) + nested(2, Metadata(compute_chars=7).SerializeToString()))
    assert np.array_equal(np.array(read.embeddings, dtype=np.float32), row)
    assert read.metadata.compute_chars == 7


@given(arrays.arrays(np.float32, st.tuples(st.integers(0, 5), st.integers(1, 80)), elements=FLOATS))
def test_rows_of_floats(rows):
    read = message("EmbedAllResponse").FromString(float_rows(1, 1, rows)).token_embeddings
    assert len(read) == len(rows)
    assert all(np.array_equal(np.array(one.embeddings, dtype=np.float32), row) for one, row in zip(read, rows, strict=True))


def test_rows_with_gaps_in_memory():
    rows = np.arange(24, dtype=np.float32).reshape(4, 6)[::2, ::3]
    read = message("EmbedAllResponse").FromString(float_rows(1, 1, rows)).token_embeddings
    assert [[*one.embeddings] for one in read] == rows.tolist()
    assert [*EmbedResponse.FromString(floats(1, rows[0])).embeddings] == rows[0].tolist()


def test_text():
    assert DecodeResponse.FromString(nested(1, "é".encode())).text == "é"
