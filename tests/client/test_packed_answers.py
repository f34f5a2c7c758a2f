"""Vectors in base64, as the server writes them and the client reads them; and servers of 0.3, which
know no base64."""

import numpy as np
import orjson
import pytest

from hybridtei import Client
from hybridtei.asking import embeddings_of
from hybridtei.batch import Ragged, offsets_of
from hybridtei.outputs import Embeddings
from hybridtei.server.answers import as_base64, hybrid
from tests.stand_in import answering

WIDTH = 16


@pytest.mark.parametrize("counts", [[3, 0, 5], [0, 2], [0, 0], [4]])
@pytest.mark.parametrize(("dtype", "columns"), [("f4", WIDTH), ("i1", WIDTH), ("u1", WIDTH // 8)])
def test_packed_rows_are_read_as_they_were(counts, dtype, columns):
    random = np.random.default_rng(0)
    values = random.integers(-99, 99, (sum(counts), columns)).astype(dtype)
    answer = Embeddings(
        dense=random.normal(size=(len(counts), WIDTH)).astype(np.float32),
        multivector=Ragged(values, offsets_of(counts)),
    )
    rows = hybrid(answer, "qdrant", lambda ids: [], WIDTH)
    for row in rows:
        row["dense"] = as_base64(row["dense"])
    read = embeddings_of(rows, ["dense", "multivector"], None, {"multivector": WIDTH}, "a server")
    assert np.array_equal(read.dense, answer.dense)
    assert read.dense.flags.writeable
    assert np.array_equal(read.multivector.offsets, answer.multivector.offsets)
    assert np.array_equal(read.multivector.values, values) or not any(counts)
    assert read.multivector.values.dtype == np.dtype(dtype) or not any(counts)


@pytest.mark.parametrize("facts", [{}, {"encoding_formats": ["float", "base64"]}])
def test_a_server_that_knows_no_base64_is_not_asked_for_it(facts):
    bodies = []

    def answer(method, path, body):
        if path == "/info":
            return 200, {}, orjson.dumps({"hybridtei": {"dimensions": {"dense": 2}, **facts}})
        bodies.append(body)
        return 200, {}, b'[{"dense":[0.5,0.25]}]'

    with answering(answer) as url, Client(url) as client:
        assert client.encode("a").dense.tolist() == [[0.5, 0.25]]
    assert [b"base64" in body for body in bodies] == [bool(facts)]
