"""Our routes: several outputs of one pass, equal to what each route of its own gives."""

import base64

import numpy as np
import pytest

from hybridtei.models.checkpoint.heads import SparseHead
from tests.inference.engine import small
from tests.near import near
from tests.server.live import serving

TEXTS = ["a hybrid search", "one two one two three"]
TOLERANCE = 1e-6


def test_by_default_all_that_the_model_has(server, dense_server, splade_server):
    for running, outputs in (
        (server, ["dense", "sparse", "multivector"]),
        (dense_server, ["dense"]),
        (splade_server, ["sparse"]),
    ):
        for body in ({"inputs": TEXTS}, {"inputs": TEXTS, "outputs": None}):
            response = running.post("/embed_hybrid", body)
            assert [list(item) for item in response.json()] == [outputs] * 2
            assert response.headers["x-compute-tokens"] == "12"


@pytest.mark.parametrize(
    "outputs",
    [["dense"], ["sparse"], ["multivector"], ["multivector", "dense"], ["sparse", "sparse"]],
)
def test_only_what_was_asked_for(server, outputs):
    for item in server.post("/embed_hybrid", {"inputs": TEXTS, "outputs": outputs}).json():
        assert set(item) == set(outputs)


def unpacked(vectors, dtype):
    raw = np.frombuffer(base64.b64decode(vectors["data"]), dtype)
    return raw.reshape(vectors["shape"]).tolist()


@pytest.mark.parametrize("dtype", [None, "int8"])
def test_base64_has_the_same_numbers(server, dtype):
    body = {"inputs": TEXTS, "dimensions": 6, "multivector": {"dtype": dtype or "float"}}
    stored = dtype or "<f4"
    plain, packed = (
        server.post("/embed_hybrid", {**body, "encoding_format": form}).json()
        for form in ("float", "base64")
    )
    for row, other in zip(packed, plain, strict=True):
        assert row["sparse"] == other["sparse"]
        dense = np.frombuffer(base64.b64decode(row["dense"]), "<f4")
        np.testing.assert_allclose(dense, other["dense"], atol=1e-7)
        found = unpacked(row["multivector"], stored)
        np.testing.assert_allclose(found, other["multivector"], atol=1e-7)
    alone = server.post("/embed_multivector", {**body, "encoding_format": "base64"}).json()
    assert alone == [row["multivector"] for row in packed]
    spanned = {"inputs": {"text": TEXTS[0], "spans": [[0, 1]]}, "encoding_format": "base64"}
    ((one,),) = server.post("/embed_hybrid", spanned).json()
    assert isinstance(one["dense"], str)


def test_each_output_is_what_its_own_route_gives(server):
    hybrid = server.post("/embed_hybrid", {"inputs": TEXTS}).json()
    assert [item["dense"] for item in hybrid] == server.post("/embed", {"inputs": TEXTS}).json()
    assert [item["sparse"] for item in hybrid] == server.post(
        "/embed_sparse", {"inputs": TEXTS}
    ).json()
    assert [item["multivector"] for item in hybrid] == server.post(
        "/embed_multivector", {"inputs": TEXTS}
    ).json()


def test_the_three_sparse_formats_say_the_same(server):
    tei, qdrant, tokens = (
        [
            item["sparse"]
            for item in server.post(
                "/embed_hybrid", {"inputs": TEXTS, "sparse_format": form}
            ).json()
        ]
        for form in ("tei", "qdrant", "tokens")
    )
    for entries, columns, named in zip(tei, qdrant, tokens, strict=True):
        weights = {entry["index"]: entry["value"] for entry in entries}
        assert weights
        assert dict(zip(columns["indices"], columns["values"], strict=True)) == weights
        assert {small.IDS[piece]: value for piece, value in named.items()} == weights
        assert list(named.values()) == sorted(named.values(), reverse=True)


@pytest.mark.parametrize(
    ("form", "empty"), [("tei", []), ("qdrant", {"indices": [], "values": []}), ("tokens", {})]
)
def test_a_text_without_lexical_weight(server, form, empty):
    (item,) = server.post(
        "/embed_hybrid", {"inputs": " ", "outputs": ["sparse"], "sparse_format": form}
    ).json()
    assert item == {"sparse": empty}


def test_one_request_is_one_pass(server):
    before = server.backend.forwards
    server.post("/embed_hybrid", {"inputs": TEXTS})
    assert server.backend.forwards == before + 1


def test_normalize_and_dimensions(server):
    body = {"inputs": TEXTS, "outputs": ["dense", "multivector"]}
    raw = server.post("/embed_hybrid", {**body, "normalize": False, "dimensions": 4}).json()
    whole = server.post("/embed_hybrid", {**body, "normalize": False}).json()
    for short, long in zip(raw, whole, strict=True):
        assert short["dense"] == long["dense"][:4]
        assert np.shape(short["multivector"]) == (len(long["multivector"]), 4)
        near(np.linalg.norm(short["multivector"], axis=1), 1, TOLERANCE)
    between = server.post("/embed_hybrid", {**body, "dimensions": small.DIM + 2}).json()
    assert np.shape(between[0]["dense"]) == (small.DIM + 2,)
    assert np.shape(between[0]["multivector"])[1] == small.DIM


def test_no_outputs_at_all(server):
    response = server.post("/embed_hybrid", {"inputs": "one", "outputs": []})
    assert response.status_code == 422
    assert response.text.startswith(
        "Failed to deserialize the JSON body into the target type: outputs: "
    )


@pytest.mark.parametrize("path", ["/embed_hybrid", "/embed_multivector"])
@pytest.mark.parametrize("padding", ["", "x" * 5000])
def test_a_field_that_is_not_known_is_refused_by_name(server, path, padding):
    before = server.backend.forwards
    response = server.post(path, {"inputs": f"one {padding}", "dimension": 4})
    assert response.status_code == 422
    assert "unknown field `dimension`" in response.text
    assert server.backend.forwards == before
    assert server.post(path, {"inputs": "one", "model": "small"}).status_code == 200
    # TEI ignores them
    assert server.post("/embed_all", {"inputs": "one", "dimension": 4}).status_code == 200


def test_latents_are_not_spelled_as_tokens():
    with serving(
        small.model_spec(sparse=SparseHead("code", width=96, active=8), multivector=None)
    ) as running:
        for path, field in (("/embed_hybrid", "inputs"), ("/v1/embeddings", "input")):
            body = {field: TEXTS, "outputs": ["sparse"], "sparse_format": "tokens"}
            response = running.post(path, body)
            assert response.status_code == 424
            assert "latents" in response.text


SPANNED = {"text": "hybrid search finds text", "spans": [[0, 13], [7, 24], [0, 24]]}
# Of the text's tokens, behind the first special one
PLACES = [
    slice(1, 3),
    slice(2, 5),
    slice(1, 5),
]


def test_spans_are_slices_of_whole_texts(server):
    before = server.backend.forwards
    spans = server.post("/embed_hybrid", {"inputs": SPANNED, "normalize": False}).json()[0]
    assert server.backend.forwards == before + 1
    states = server.post("/embed_all", {"inputs": SPANNED["text"]}).json()[0]
    rows = server.post("/embed_multivector", {"inputs": SPANNED["text"]}).json()[0]
    (multivector,) = server.post("/embed_multivector", {"inputs": SPANNED}).json()
    for place, tokens in enumerate(PLACES):
        near(spans[place]["dense"], np.mean(states[tokens], axis=0), TOLERANCE)
        near(multivector[place], rows[tokens.start - 1 : tokens.stop - 1], TOLERANCE)
        assert spans[place]["multivector"] == multivector[place]
    assert spans[2]["sparse"] == server.post("/embed_sparse", {"inputs": SPANNED["text"]}).json()[0]
    several = server.post(
        "/embed_hybrid",
        {"inputs": [SPANNED, {"text": "one", "spans": [[0, 3]]}], "normalize": False},
    ).json()
    assert several[0] == spans
    assert len(several[1]) == 1


@pytest.mark.parametrize("path", ["/embed_hybrid", "/embed_multivector"])
@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (
            [SPANNED, {"text": "one two", "spans": [[0, 3], [3, 4]]}],
            "`inputs[1].spans[1]` is [3, 4], which holds no token",
        ),
        (
            {"text": "one two", "spans": [[0, 8]]},
            "`inputs[0].spans[0]` is [0, 8], which ends beyond the text: 7 code points",
        ),
        ([SPANNED, "one"], "texts with spans and texts without"),
        ({"text": "one", "spans": []}, "length >= 1"),
        ({"text": "one", "spans": [[0]]}, "length 2"),
        ({"text": "one", "spans": [[-1, 3]]}, ">= 0"),
        ({"text": "one", "spans": [[0, 3]], "span": 1}, "span"),
    ],
)
def test_wrong_spans_are_refused_with_their_place(server, path, inputs, words):
    before = server.backend.forwards
    response = server.post(path, {"inputs": inputs})
    assert response.status_code in (400, 413, 422)
    assert words in response.text
    assert server.backend.forwards == before


@pytest.mark.parametrize("dtype", ["float", "int8", "binary"])
def test_every_route_of_multivectors_has_the_servers_budget(dtype):
    texts = ["one two three four five six seven eight", "one"]
    with serving(model={"multivector_tokens": 3, "multivector_dtype": dtype}) as running:
        hybrid = running.post("/embed_hybrid", {"inputs": texts, "outputs": ["multivector"]}).json()
        alone = running.post("/embed_multivector", {"inputs": texts}).json()
        body = {"input": texts, "model": "small", "outputs": ["multivector"]}
        openai = running.post("/v1/embeddings", body).json()["data"]
    wanted = [item["multivector"] for item in hybrid]
    assert wanted == alone == [item["multivector"] for item in openai]
    assert max(len(row) for row in wanted) == 3 or dtype == "binary"
