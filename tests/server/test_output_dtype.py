"""`output_dtype` on every route that gives vectors; int8 only with ranges measured beforehand: the
embedded model has them."""

import base64

import numpy as np
import pytest

from hybridtei.encoder import Encoder
from hybridtei.errors import LoadError
from hybridtei.inference.tasks.pooling import BUCKETS, quantized
from hybridtei.server.vectors import EMBEDDED_RANGES, ranges_in
from tests.inference.engine import small
from tests.near import near, same
from tests.server.live import serving

TEXTS = ["the hybrid search", "one two three"]
SENTENCES = [
    "The display shows E41.",
    "Beethoven was born in Bonn.",
    "def main() -> None: ...",
    "Tomatoes need six hours.",
]
DTYPES = {
    "float": "<f4",
    "float16": "<f2",
    "int8": "i1",
    "uint8": "u1",
    "binary": "i1",
    "ubinary": "u1",
}


@pytest.fixture(scope="module")
def ranges():
    def width(columns):
        return np.stack([np.full(columns, -0.6), np.full(columns, 0.6)]).astype(np.float32)

    return {"dense": width(small.HIDDEN), "dense_4": width(4) * 2, "multivector": width(small.DIM)}


@pytest.fixture(scope="module")
def ranged(tmp_path_factory, ranges):
    path = tmp_path_factory.mktemp("ranges") / "ranges.npz"
    np.savez(path, **ranges)
    with serving(model={"quantization_ranges": str(path)}) as running:
        yield running


@pytest.mark.parametrize("dtype", DTYPES)
def test_dense_vectors_on_every_route(ranged, ranges, dtype):
    plain = np.float32(ranged.post("/embed", {"inputs": TEXTS}).json())
    wanted = quantized(plain, dtype, ranges["dense"])
    hybrid = ranged.post(
        "/embed_hybrid", {"inputs": TEXTS, "outputs": ["dense"], "output_dtype": dtype}
    ).json()
    same(np.array([item["dense"] for item in hybrid], dtype=DTYPES[dtype]), wanted)
    openai = {"input": TEXTS, "output_dtype": dtype}
    items = ranged.post("/v1/embeddings", openai).json()["data"]
    same(np.array([item["embedding"] for item in items], dtype=DTYPES[dtype]), wanted)
    packed = ranged.post("/v1/embeddings", {**openai, "encoding_format": "base64"}).json()["data"]
    rows = [np.frombuffer(base64.b64decode(item["embedding"]), DTYPES[dtype]) for item in packed]
    same(rows, wanted)
    # Which Cohere does not know
    if dtype != "float16":
        cohere = ranged.post("/v2/embed", {"texts": TEXTS, "embedding_types": [dtype]}).json()[
            "embeddings"
        ]
        same(np.array(cohere[dtype], dtype=DTYPES[dtype]), wanted)


def test_documents_within_a_budget(ranged):
    texts = ["the hybrid search of one two three", "search"]
    full = ranged.post("/embed_multivector", {"inputs": texts}).json()
    rows = ranged.post(
        "/embed_multivector", {"inputs": texts, "multivector": {"max_tokens": 3}}
    ).json()
    assert [len(row) for row in rows] == [min(3, len(row)) for row in full]
    near(np.linalg.norm(np.float32(rows[0]), axis=1), 1, 1e-5)
    body = {
        "inputs": texts,
        "multivector": {"max_tokens": 3, "dtype": "int8"},
        "output_dtype": "ubinary",
    }
    for found, row in zip(ranged.post("/embed_hybrid", body).json(), rows, strict=True):
        whole = np.array(found["multivector"])
        assert np.abs(whole).max(axis=1).tolist() == [127] * len(row)
        near(whole / np.linalg.norm(whole, axis=1, keepdims=True), row, 0.02)
    for found, row in zip(
        ranged.post(
            "/embed_multivector",
            {"inputs": texts, "multivector": {"max_tokens": 3, "dtype": "binary"}},
        ).json(),
        rows,
        strict=True,
    ):
        assert found["shape"] == [len(row), small.DIM]
        bits = np.frombuffer(base64.b64decode(found["data"]), np.uint8).reshape(len(row), -1)
        same(bits, np.packbits(np.float32(row) > 0, axis=1))


def test_queries_are_never_made_smaller(ranged):
    body = {"inputs": TEXTS, "input_type": "query"}
    budget = {"max_tokens": 1, "dtype": "binary"}
    assert ranged.post("/embed_multivector", {**body, "multivector": budget}).json() == (
        ranged.post("/embed_multivector", body).json()
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_multivectors(ranged, ranges, dtype):
    plain = ranged.post("/embed_multivector", {"inputs": TEXTS}).json()
    small_ones = ranged.post("/embed_multivector", {"inputs": TEXTS, "output_dtype": dtype}).json()
    hybrid = ranged.post(
        "/embed_hybrid", {"inputs": TEXTS, "output_dtype": dtype, "sparse_format": "qdrant"}
    ).json()
    for rows, found, item in zip(plain, small_ones, hybrid, strict=True):
        wanted = quantized(np.float32(rows), dtype, ranges["multivector"])
        same(np.array(found, dtype=DTYPES[dtype]), wanted)
        assert item["multivector"] == found


def test_cut_vectors_are_scaled_first_and_have_ranges_of_their_own(ranged, ranges):
    body = {"inputs": TEXTS, "outputs": ["dense"], "dimensions": 4, "output_dtype": "uint8"}
    plain = np.float32(ranged.post("/embed", {"inputs": TEXTS, "dimensions": 4}).json())
    found = [item["dense"] for item in ranged.post("/embed_hybrid", body).json()]
    same(found, quantized(plain, "uint8", ranges["dense_4"]))
    refused = ranged.post("/embed_hybrid", {**body, "dimensions": 5})
    assert refused.status_code == 422
    assert "the range of each of 5 dense dimensions" in refused.json()["error"]
    bits = ranged.post("/embed_hybrid", {**body, "dimensions": 5, "output_dtype": "ubinary"}).json()
    assert [len(item["dense"]) for item in bits] == [1, 1]


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize(
    ("path", "body", "key"),
    [
        ("/embed_hybrid", {"inputs": "one"}, "output_dtype"),
        ("/embed_multivector", {"inputs": "one"}, "output_dtype"),
        ("/v1/embeddings", {"input": "one"}, "output_dtype"),
        ("/v2/embed", {"texts": ["one"]}, "embedding_types"),
    ],
)
def test_without_ranges_it_is_refused_before_any_pass(server, dtype, path, body, key):
    before = server.backend.forwards
    response = server.post(path, {**body, key: dtype if key == "output_dtype" else [dtype]})
    assert response.status_code == 422
    assert f"`{dtype}` needs the range of each of" in response.text
    assert server.backend.forwards == before


def test_a_file_that_cannot_be_read_is_told_at_start():
    with (
        pytest.raises(LoadError, match="not a file of ranges"),
        serving(model={"quantization_ranges": "absent.npy"}),
    ):
        pass


def test_the_embedded_models_ranges_hold_what_it_gives():
    ranges = ranges_in(EMBEDDED_RANGES)
    encoder = Encoder.load(measures=False)
    for width in (64, 128, 192, 256, 384):
        least, most = ranges.get(f"dense_{width}", ranges["dense"])
        dense = encoder.encode(SENTENCES, dimensions=width).dense
        places = quantized(dense, "uint8", np.stack([least, most])).astype(np.float32) + 0.5
        again = least + places * (most - least) / BUCKETS
        cosines = (again * dense).sum(1) / np.linalg.norm(again, axis=1)
        assert cosines.min() > 0.99
    assert ranges["multivector"].shape == (2, encoder.spec.multivector.width)
