"""OpenAI's route, in Jina's words too. Its errors: conformance/wire; its own client:
conformance/clients."""

import base64

import numpy as np
import pytest

from tests.inference.engine import small
from tests.near import same

TEXTS = ["one two", "three"]


def vectors(server, **body):
    return [
        item["embedding"]
        for item in server.post("/v1/embeddings", {"input": TEXTS, **body}).json()["data"]
    ]


def native(server, **body):
    return server.post("/embed", {"inputs": TEXTS, **body}).json()


def test_outputs_stand_beside_the_embedding(server):
    body = {"input": ["one two", "three"], "outputs": ["dense", "sparse", "multivector"]}
    hybrid = server.post(
        "/embed_hybrid", {"inputs": body["input"], "sparse_format": "qdrant"}
    ).json()
    data = server.post("/v1/embeddings", body).json()["data"]
    assert [item["embedding"] for item in data] == [item["dense"] for item in hybrid]
    assert [item["sparse_embedding"] for item in data] == [item["sparse"] for item in hybrid]
    assert [item["multivector"] for item in data] == [item["multivector"] for item in hybrid]
    (item, _) = server.post("/v1/embeddings", {**body, "sparse_format": "tei"}).json()["data"]
    assert item["sparse_embedding"] == server.post("/embed_sparse", {"inputs": "one two"}).json()[0]


def test_splades_vector_stands_without_an_embedding(splade_server):
    body = {"input": "one", "outputs": ["sparse"]}
    (item,) = splade_server.post("/v1/embeddings", body).json()["data"]
    assert item["sparse_embedding"]["indices"]
    assert "embedding" not in item


def test_sparse_vectors_by_token_id(server):
    asked = {"inputs": ["one two"], "outputs": ["sparse"]}
    (row,) = server.post("/embed_sparse", {"inputs": ["one two"]}).json()
    answer = server.post("/embed_hybrid", {**asked, "sparse_format": "ids"}).json()
    assert answer[0]["sparse"] == {str(one["index"]): one["value"] for one in row}


def test_texts_may_be_wrapped(server):
    assert vectors(
        server, input=[{"text": text} for text in TEXTS], model="jina", late_chunking=False
    ) == native(server)
    assert vectors(server, input=[TEXTS[0], {"text": TEXTS[1]}]) == native(server)


def test_normalized(server):
    assert vectors(server, normalized=False) == native(server, normalize=False) != native(server)
    assert vectors(server, normalized=True) == native(server)


def test_a_width_of_0_is_all_of_it_for_infinitys_client(server):
    assert vectors(server, dimensions=0, modality="text") == native(server)
    assert vectors(server, dimensions=3, modality="text") == native(server, dimensions=3)


def test_late_chunks_are_spans_of_what_they_make_together(server):
    chunks = ["the hybrid", "search finds\n", "text by words", " and meaning"]
    text = "the hybrid search finds\ntext by words and meaning"
    spans = [[0, 10], [11, 24], [24, 37], [37, 49]]
    wanted = server.post(
        "/embed_hybrid", {"inputs": {"text": text, "spans": spans}, "sparse_format": "qdrant"}
    ).json()[0]
    body = {"input": [{"text": chunk} for chunk in chunks], "late_chunking": True}
    answer = server.post("/v1/embeddings", {**body, "outputs": ["dense", "sparse"]}).json()
    assert [item["embedding"] for item in answer["data"]] == [item["dense"] for item in wanted]
    assert [item["sparse_embedding"] for item in answer["data"]] == [
        item["sparse"] for item in wanted
    ]
    assert answer["usage"]["total_tokens"] == 2 + len(text.split())
    assert vectors(server, **body) != vectors(server, input=chunks)


@pytest.mark.parametrize("form", ["base64", ["base64"]])
def test_base64(server, form):
    unpacked = [
        np.frombuffer(base64.b64decode(text), "<f4")
        for text in vectors(server, embedding_type=form)
    ]
    same(unpacked, np.float32(native(server)))


def test_bits(server):
    bits = np.packbits(np.float32(native(server)) > 0, axis=1)
    same(vectors(server, embedding_type="ubinary"), bits)
    same(vectors(server, embedding_type=["binary"]), bits.astype(int) - 128)


def test_truncate(server):
    text = "one " * 1000
    refused = server.post("/v1/embeddings", {"input": text, "truncate": False})
    assert refused.status_code == 422
    assert vectors(server, input=[text], truncate=True) == native(
        server, inputs=[text], truncate=True
    )


@pytest.mark.parametrize(
    ("task", "word"), [("retrieval.query", "query"), ("retrieval.passage", "document")]
)
def test_task_is_input_type(server, task, word):
    assert vectors(server, task=task) == vectors(server, input_type=word)
    assert vectors(server, task="text-matching") == vectors(server)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"late_chunking": True, "input": [[7, 8], [9]]},
            "`input[0]` holds ids; `late_chunking` takes texts",
        ),
        (
            {"late_chunking": True, "input": ["one", " ", "two"]},
            "`input[1]` is [3, 4], which holds no token",
        ),
        (
            {"late_chunking": True, "input": ["one " * 20, "two " * 45, "six " * 20]},
            "`input[1]` is [80, 260], which holds 45 tokens",
        ),
        (
            {"late_chunking": True, "input": ["one"] * 4097},
            "`input` holds 4097 spans > maximum allowed 4096",
        ),
        (
            {"late_chunking": True, "input": ["one"] * 16001},
            "`input` holds 16001 chunks > maximum allowed 16000",
        ),
        (
            {"embedding_type": ["float", "binary"]},
            "embedding_type: expected `array` of length <= 1",
        ),
        ({"embedding_type": "int2"}, "embedding_type"),
        ({"input": [{"image": "x"}]}, "input"),
    ],
)
def test_what_is_not_offered_is_refused(server, body, message):
    response = server.post("/v1/embeddings", {"input": TEXTS, **body})
    assert response.status_code == 422
    assert message in response.text


@pytest.mark.parametrize("given", [[[9906, 1917]], [9906, 1917], ["one", [9906]]])
def test_ids_of_a_foreign_vocabulary_are_refused_with_advice(server, given):
    response = server.post("/v1/embeddings", {"input": given})
    assert response.status_code == 422
    message = response.json()["message"]
    assert f"holds the id {9906}, but the vocabulary ends at" in message
    assert "check_embedding_ctx_length=False" in message


def test_the_last_id_of_the_vocabulary_is_none_of_them(server):
    last = max(small.IDS.values())
    of_ours, foreign = (
        server.post("/v1/embeddings", {"input": [[small.IDS["[CLS]"], i, small.IDS["[SEP]"]]]})
        for i in (last, last + 1)
    )
    assert of_ours.status_code == 200
    assert (
        f"holds the id {last + 1}, but the vocabulary ends at {last}." in foreign.json()["message"]
    )


@pytest.mark.parametrize(
    ("inputs", "more", "status", "words"),
    [
        ([["one"], ["two", " "]], {}, 422, "`inputs[1][1]` is [3, 4], which holds no token"),
        ([["one"], []], {}, 422, "length >= 1"),
        (
            [["one"], "two three"],
            {"enable_auto_chunking": True, "chunk_size": 3},
            422,
            "`inputs[1]` must have less than 3 tokens. Given: 4",
        ),
        ([["one"] * 8001] * 2, {}, 422, "`inputs` holds 16002 chunks > maximum allowed 16000"),
        ([["one"]] * 2049, {}, 422, "holds 2049 texts > maximum allowed 2048 (max-split-texts)"),
    ],
)
def test_chunks_that_cannot_be(server, inputs, more, status, words):
    response = server.post("/v1/contextualizedembeddings", {"inputs": inputs, **more})
    assert (response.status_code, words in response.text) == (status, True), response.text
