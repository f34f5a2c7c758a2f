"""The rows beside the routes: what two APIs share under one name is answered to each as its own
server does."""

import json
import urllib.error
import urllib.request

import pytest
from msgspec import Struct

from hybridtei.server.routing import ROUTES
from tests.server.live import serving

CHUNKS = ["one two", "three"]
# Fields that decide how clients read an answer, by the packages that send them: openai 3.57,
# voyageai
# 0.5, cohere 7.3, infinity-client 0.0.78, LlamaIndex' and LangChain's Jina, xinference-client 2.0,
# and vLLM's protocol. Each is a field of its route's request, which obeys or refuses it.
FORMS = {
    "/v1/embeddings": {
        "encoding_format": "bytes",
        "embedding_type": "int8",
        "encoding_type": "int8",
        "output_dtype": "int4",
        "return_multivector": True,
        "return_sparse": True,
        "embed_dtype": "float16",
        "endianness": "big",
        "modality": "image",
        "late_chunking": 5,
    },
    "/embeddings": {"modality": "audio", "embedding_type": "int8", "return_multivector": True},
    "/v1/embed": {"embedding_types": ["int4"], "images": ["data:"]},
    "/v2/embed": {"embedding_types": ["int4"], "images": ["data:"]},
    "/v1/contextualizedembeddings": {"encoding_format": "bytes", "output_dtype": "int4"},
    "/v1/rerank": {"return_embeddings": True, "return_documents": "ids"},
    "/v2/rerank": {"return_embeddings": True, "return_documents": "ids"},
    "/rerank": {"return_embeddings": True, "return_documents": "ids"},
    "/classify": {"raw_scores": "yes", "use_activation": "yes"},
    "/score": {"use_activation": "yes"},
}
ASKED = {
    "/v1/embeddings": {"input": ["one"]},
    "/embeddings": {"input": ["one"]},
    "/v1/embed": {"texts": ["one"]},
    "/v2/embed": {"texts": ["one"]},
    "/v1/contextualizedembeddings": {"inputs": [["one"]]},
    "/v1/rerank": {"query": "one", "documents": ["two"]},
    "/v2/rerank": {"query": "one", "documents": ["two"]},
    "/rerank": {"query": "one", "documents": ["two"]},
    "/classify": {"input": "one"},
    "/score": {"text_1": "one", "text_2": "two"},
}


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [(path, name, value) for path, fields in FORMS.items() for name, value in fields.items()],
)
def test_a_field_that_changes_the_form_is_obeyed_or_refused(server, path, name, value):
    answer = server.post(path, {**ASKED[path], name: value})
    assert answer.status_code in (400, 422), answer.text
    assert name in answer.text


def test_every_field_of_a_row_is_a_field_of_its_requests():
    """Otherwise nobody reads it."""
    for route in ROUTES:
        for wire in filter(None, (route.wire, route.shared_wire)):
            structs = [kind for kind in route.requests if issubclass(kind, Struct)]
            fields = {name for kind in structs for name in kind.__struct_fields__}
            assert {*wire.forms} <= fields
            for old, name in wire.older.items():
                assert old not in fields or name in fields
    rows = [wire for route in ROUTES for wire in (route.wire, route.shared_wire) if wire]
    assert all(wire.tried for wire in rows)


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ({"encoding_type": "base64"}, {"embedding_type": "base64"}),
        ({"encoding_type": ["ubinary"]}, {"embedding_type": ["ubinary"]}),
        ({"normalize": False}, {"normalized": False}),
        ({"output_dimension": 4}, {"dimensions": 4}),
        ({"truncation": True}, {"truncate": True}),
    ],
)
def test_an_older_name_is_read_as_the_newer_one(server, older, newer):
    body = {"input": ["one two " * 400]}
    if "trunc" not in str(older):
        body = {"input": ["one two"]}
    found, expected = (server.post("/v1/embeddings", {**body, **more}) for more in (older, newer))
    assert expected.status_code == 200, expected.text
    assert found.json()["data"] == expected.json()["data"]


def test_logits_under_vllms_older_name(reranker):
    for path, body in (
        ("/v1/score", {"text_1": "one", "text_2": ["two", "three"]}),
        ("/v1/rerank", {"query": "one", "documents": ["two", "three"]}),
    ):
        of_names = [
            reranker.post(path, {**body, name: False}).json()["data"]
            for name in ("activation", "use_activation")
        ]
        assert of_names[0] == of_names[1] != reranker.post(path, body).json()["data"]


def of_voyage(server, path, body, headers):
    """Status and body, with no header that a library adds."""
    fields = {"content-type": "application/json", **headers}
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), fields)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request)
    return caught.value.code, json.load(caught.value)


# What voyageai 0.3.7, 0.4.1 and 0.5.0 send: no name of their own, and nulls
EMBED = {
    "input": [""],
    "model": "m",
    "input_type": None,
    "truncation": True,
    "output_dtype": None,
    "output_dimension": None,
    "encoding_format": "base64",
}
RERANK = {"query": "q", "documents": [], "model": "m", "top_k": None, "truncation": True}


@pytest.mark.parametrize(
    ("path", "body", "agent"),
    [
        ("/v1/embeddings", EMBED, "any"),
        ("/v1/embeddings", {**EMBED, "input": 5}, "any"),
        ("/v1/embeddings", {"input": [""]}, "Voyage/v1 PythonBindings/0.4.1"),
        ("/v1/rerank", RERANK, "any"),
        ("/v1/contextualizedembeddings", {"inputs": []}, "any"),
        ("/v1/multimodalembeddings", {"inputs": []}, "python-requests/2.34.2"),
        ("/v1/multimodalembeddings", {"inputs": []}, "Python/3.11 aiohttp/3.13.1"),
    ],
)
def test_voyages_client_reads_each_error(server, path, body, agent):
    """Up to 0.4.1 it fails where `error` is an object; every version where `detail` is no text."""
    status, answer = of_voyage(server, path, body, {"user-agent": agent})
    assert status in (400, 404, 422)
    assert "error" not in answer
    assert isinstance(answer["detail"], str)
    assert answer["detail"] == answer["message"]


def test_a_text_that_names_voyages_field_is_no_client_of_voyage(server):
    body = {"input": ['"truncation": true', "truncation", ""]}
    _, answer = of_voyage(server, "/v1/embeddings", body, {"user-agent": "any"})
    assert answer["error"]["message"] == answer["detail"]


def test_voyage_reads_a_401(server):
    with serving(server={"api_key": "k"}) as running:
        for agent, has_error in (("python-requests/2.34.2", False), ("OpenAI/Python 3.57.0", True)):
            status, answer = of_voyage(running, "/v1/embeddings", EMBED, {"user-agent": agent})
            assert (status, "error" in answer) == (401, has_error)


@pytest.mark.parametrize(
    ("inputs", "more"),
    [
        (CHUNKS, {"input_type": "query"}),
        (CHUNKS, {"input_type": "document", "enable_auto_chunking": True, "chunk_size": 32000}),
        ([[text] for text in CHUNKS], {"enable_auto_chunking": True}),
    ],
)
def test_each_text_of_a_flat_list_is_a_document(server, inputs, more):
    found = server.post("/v1/contextualizedembeddings", {"inputs": inputs, **more})
    nested = {"inputs": [[text] for text in CHUNKS], "input_type": more.get("input_type")}
    expected = server.post("/v1/contextualizedembeddings", nested).json()["data"]
    assert found.status_code == 200, found.text
    rows = found.json()["data"]
    texts = [chunk.pop("text", None) for row in rows for chunk in row["data"]]
    assert rows == expected
    # Those who leave the chunks to the server read them
    assert texts == (CHUNKS if "enable_auto_chunking" in more else [None, None])


@pytest.mark.parametrize(
    ("path", "body", "headers"),
    [
        ("/api/embed", {"input": 5}, {}),
        ("/api/embeddings", {"prompt": ["a"]}, {}),
        ("/api/embed", {"input": "a"}, {"content-encoding": "gzip"}),
        ("/api/show", {"model": 5}, {}),
        ("/v1/api/embed", {"input": "a"}, {}),
        ("/api/generate", {"prompt": "a"}, {}),
    ],
)
def test_every_error_of_ollama_is_a_text(server, path, body, headers):
    answer = server.post(path, body, headers=headers)
    assert answer.status_code >= 400
    assert isinstance(answer.json()["error"], str)


def test_a_models_length_is_where_clients_of_vllm_and_openrouter_read_it(server):
    length = server.get("/info").json()["max_input_length"]
    (listed, *_) = server.get("/v1/models").json()["data"]
    for model in (listed, server.get("/v1/models/small").json()):
        assert model["max_model_len"] == model["context_length"] == length
