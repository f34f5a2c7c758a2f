"""Reranking over a real connection: as HTTP ranks; a stream has one answer."""

import pytest

from tests.server.conftest import labelled
from tests.server.grpc.live import rpc_serving, start

TEXTS = ["one two", "three", "one two", "a hybrid search engine", ""]


def ranked(answer):
    return [(rank.index, pytest.approx(rank.score, abs=1e-6), rank.text) for rank in answer.ranks]


def over_http(rpc, **body):
    answer = rpc.running.post("/rerank", body)
    assert answer.status_code == 200, answer.text
    return [(item["index"], item["score"], item.get("text", "")) for item in answer.json()]


@pytest.mark.parametrize(
    "kind",
    ["ranker_rpc", "rpc"],
    # Reads both texts together; compares their vectors
)
@pytest.mark.parametrize("raw_scores", [False, True])
@pytest.mark.parametrize("return_text", [False, True])
def test_it_ranks_as_http_does(kind, raw_scores, return_text, request):
    rpc = request.getfixturevalue(kind)
    texts = TEXTS if kind == "ranker_rpc" else TEXTS[:-1]
    told = {"raw_scores": raw_scores, "return_text": return_text}
    wanted = over_http(rpc, query="one", texts=texts, **told)
    answer, call = start(rpc.channel, "Rerank", {"query": "one", "texts": texts, **told})
    assert ranked(answer) == wanted
    assert all(rank.HasField("text") == return_text for rank in answer.ranks)
    assert dict(call.initial_metadata())["x-compute-characters"] == str(
        answer.metadata.compute_chars
    )
    streamed, call = start(
        rpc.channel, "RerankStream", [{"query": "one", "text": text, **told} for text in texts]
    )
    assert ranked(streamed) == wanted
    assert streamed.metadata.compute_chars == answer.metadata.compute_chars
    assert streamed.metadata.compute_tokens == answer.metadata.compute_tokens
    assert "x-compute-tokens" in dict(call.initial_metadata())


def test_each_text_of_a_stream_is_ranked_by_its_own_query(ranker_rpc):
    queries = ["one", "two", "one", "three"]
    scores = {}
    for place, (query, text) in enumerate(zip(queries, TEXTS[:4], strict=True)):
        [(_, scores[place], _)] = over_http(ranker_rpc, query=query, texts=[text])
    messages = [{"query": query, "text": text} for query, text in zip(queries, TEXTS, strict=False)]
    answer = ranker_rpc.ask("RerankStream", messages)
    assert {rank.index: pytest.approx(rank.score, abs=1e-6) for rank in answer.ranks} == scores
    assert [rank.score for rank in answer.ranks] == sorted(
        (rank.score for rank in answer.ranks), reverse=True
    )
    assert answer.metadata.compute_chars == sum(
        len(item["query"] + item["text"]) for item in messages
    )


def test_the_first_message_decides_for_all(ranker_rpc):
    first = {"query": "one", "text": "two", "raw_scores": True, "return_text": True}
    answer = ranker_rpc.ask("RerankStream", [first, {"query": "one", "text": "three"}])
    assert {rank.text for rank in answer.ranks} == {"two", "three"}
    assert ranked(answer) == over_http(
        ranker_rpc, query="one", texts=["two", "three"], raw_scores=True, return_text=True
    )


def test_a_stream_holds_more_texts_than_a_single_request_may(ranker_rpc):
    texts = [f"two {number}" for number in range(300)]
    answer = ranker_rpc.ask("RerankStream", [{"query": "one", "text": text} for text in texts])
    assert sorted(rank.index for rank in answer.ranks) == [*range(300)]
    code, details = ranker_rpc.refusal("Rerank", {"query": "one", "texts": texts})
    assert (code, details) == ("INVALID_ARGUMENT", "batch size 300 > maximum allowed batch size 32")
    # A group each
    many = ranker_rpc.ask("RerankStream", [{"query": text, "text": "one"} for text in texts])
    assert len(many.ranks) == 300
    assert ranker_rpc.admission.free == 512


LONG = " ".join(["one"] * 100)
REFUSED = [
    ("ranker_rpc", {"query": "one"}, "INVALID_ARGUMENT", "`texts` cannot be empty"),
    (
        "ranker_rpc",
        {"texts": [""]},
        "INVALID_ARGUMENT",
        "Input validation error: `inputs` cannot be empty",
    ),
    (
        "ranker_rpc",
        {"texts": [LONG]},
        "INVALID_ARGUMENT",
        "`inputs` must have less than 64 tokens. Given: 103",
    ),
    (
        "classifier_rpc",
        {"query": "one", "texts": ["b"]},
        "FAILED_PRECONDITION",
        "model is not a re-ranker model",
    ),
    (
        "dense_rpc",
        {"query": "one", "texts": ["b"]},
        "FAILED_PRECONDITION",
        "model is not a classifier model",
    ),
]


@pytest.mark.parametrize(("kind", "given", "code", "details"), REFUSED)
def test_what_is_refused_and_how(kind, given, code, details, request):
    rpc = request.getfixturevalue(kind)
    told = rpc.refusal("Rerank", given)
    assert told == (code, details) or (told[0] == code and told[1].endswith(details))
    assert ("Backend" in told[1]) is False
    stream = [{"query": given.get("query", ""), "text": text} for text in given.get("texts", [])]
    assert rpc.refusal("RerankStream", stream) == told
    assert rpc.admission.free == 512


def test_a_stream_is_bounded():
    with rpc_serving(
        labelled("LABEL_0"), server={"max_rerank_documents": 3, "payload_limit": 50}
    ) as rpc:
        text = {"query": "a", "text": "one"}
        assert len(rpc.ask("RerankStream", [text] * 3).ranks) == 3
        assert rpc.refusal("RerankStream", [text] * 4) == (
            "INVALID_ARGUMENT",
            "a stream of more than 3 texts (max-rerank-documents)",
        )
    with rpc_serving(labelled("LABEL_0"), server={"payload_limit": 50}) as rpc:
        code, details = rpc.refusal("RerankStream", [{"query": "a", "text": "one " * 10}] * 20)
        assert (code, details) == (
            "INVALID_ARGUMENT",
            "a stream of more than 800 bytes (16 times payload-limit)",
        )
