"""Every call over a real connection: the same answers as HTTP gives, TEI's codes and texts, key,
model and limits."""

from random import Random

import grpc
import numpy as np
import pytest

from hybridtei.server.grpc import messages
from tests.inference.engine import small
from tests.sampled import sampled
from tests.server.conftest import LABELS, labelled
from tests.server.grpc.live import rpc_serving, start

TEXTS = ["one two three", "a hybrid search", "the engine finds text", "words"]


def near(given, wanted):
    return np.allclose(
        np.array(given, dtype=np.float32), np.array(wanted, dtype=np.float32), atol=1e-6
    )


def over_http(rpc, path, **body):
    response = rpc.running.post(path, body)
    assert response.status_code == 200, response.text
    return response


def test_embed_is_that_of_http(rpc):
    wanted = over_http(rpc, "/embed", inputs="one two three").json()[0]
    # Normalised unless told otherwise
    assert near(rpc.ask("Embed", {"inputs": "one two three"}).embeddings, wanted)
    raw = over_http(
        rpc, "/embed", inputs="one two", normalize=False, prompt_name="query", dimensions=3
    ).json()[0]
    asked = {"inputs": "one two", "normalize": False, "prompt_name": "query", "dimensions": 3}
    assert near(rpc.ask("Embed", asked).embeddings, raw)


def test_metadata_tells_what_http_tells_in_headers(rpc):
    headers = over_http(rpc, "/embed", inputs="one two three").headers
    answer, call = start(rpc.channel, "Embed", {"inputs": "one two three"})
    told = dict(call.initial_metadata())
    assert {name for name in headers if name.startswith("x-")} <= told.keys()
    for name in ("x-compute-type", "x-compute-characters", "x-compute-tokens"):
        assert told[name] == headers[name]
    assert (answer.metadata.compute_chars, answer.metadata.compute_tokens) == (13, 5)
    assert answer.metadata.total_time_ns >= answer.metadata.inference_time_ns > 0
    assert not any(
        name.startswith("x-")
        for name, _ in start(rpc.channel, "Tokenize", {"inputs": "a"})[1].initial_metadata()
    )


def test_embed_all(rpc):
    wanted = over_http(rpc, "/embed_all", inputs="one two").json()[0]
    answer = rpc.ask("EmbedAll", {"inputs": "one two"})
    assert near([token.embeddings for token in answer.token_embeddings], wanted)
    assert answer.metadata.compute_tokens == 4


@pytest.mark.parametrize("kind", ["rpc", "splade_rpc"])
def test_embed_sparse(kind, request):
    rpc = request.getfixturevalue(kind)
    wanted = {
        item["index"]: item["value"]
        for item in over_http(rpc, "/embed_sparse", inputs="one two").json()[0]
    }
    answer = rpc.ask("EmbedSparse", {"inputs": "one two"})
    assert {item.index: pytest.approx(item.value) for item in answer.sparse_embeddings} == wanted
    assert wanted
    [streamed] = rpc.ask("EmbedSparseStream", [{"inputs": "one two"}])
    assert streamed.sparse_embeddings == answer.sparse_embeddings


def test_embed_of_a_splade_model(splade_rpc):
    wanted = over_http(splade_rpc, "/embed", inputs="one two", normalize=False).json()[0]
    assert near(
        splade_rpc.ask("Embed", {"inputs": "one two", "normalize": False}).embeddings, wanted
    )


def test_predict(classifier_rpc):
    for raw in (False, True):
        for call, inputs in (
            ("Predict", "one two"),
            ("PredictPair", ["one two"]),
            ("PredictPair", ["one", "two"]),
        ):
            wanted = over_http(classifier_rpc, "/predict", inputs=inputs, raw_scores=raw).json()
            answer = classifier_rpc.ask(call, {"inputs": inputs, "raw_scores": raw})
            assert [item.label for item in answer.predictions] == [item["label"] for item in wanted]
            assert near(
                [item.score for item in answer.predictions], [item["score"] for item in wanted]
            )
    assert {item.label for item in answer.predictions} == {*LABELS}


def test_tokens_and_texts(rpc):
    wanted = over_http(rpc, "/tokenize", inputs="Zürich one", prompt_name="query").json()[0]
    asked = {"inputs": "Zürich one", "add_special_tokens": True, "prompt_name": "query"}
    tokens = rpc.ask("Tokenize", asked).tokens
    for token, item in zip(tokens, wanted, strict=True):
        assert (token.id, token.text, token.special) == (item["id"], item["text"], item["special"])
        assert token.HasField("start") == (item["start"] is not None)
        assert (token.start, token.stop) == (item["start"] or 0, item["stop"] or 0)
    plain = rpc.ask("Tokenize", {"inputs": "one two"}).tokens
    assert [token.text for token in plain] == ["one", "two"]
    ids = [2, small.IDS["one"], 3]
    assert rpc.ask("Decode", {"ids": ids, "skip_special_tokens": True}).text == "one"
    assert (
        rpc.ask("Decode", {"ids": ids}).text
        == over_http(rpc, "/decode", ids=ids, skip_special_tokens=False).json()[0]
    )


def test_info(rpc, classifier_rpc, ranker_rpc):
    told = rpc.running.get("/info").json()
    answer = rpc.ask("Info", {})
    for name in (
        "version",
        "model_id",
        "model_dtype",
        "max_concurrent_requests",
        "max_input_length",
        "max_batch_tokens",
    ):
        assert getattr(answer, name) == told[name]
    assert not answer.HasField("model_sha")
    assert [one.ask("Info", {}).model_type for one in (rpc, classifier_rpc, ranker_rpc)] == [
        0,
        1,
        2,
    ]


@pytest.mark.parametrize(
    "call",
    sampled(
        ["EmbedStream", "EmbedAllStream", "EmbedSparseStream", "TokenizeStream"],
        ["EmbedStream", "TokenizeStream"],
    ),
)
def test_a_stream_answers_each_message_in_order(rpc, call):
    given = [{"inputs": f"{text} {number}"} for number in range(40) for text in TEXTS]
    answers = rpc.ask(call, given)
    alone = [rpc.ask(call.removesuffix("Stream"), item) for item in given]
    for one, other in zip(answers, alone, strict=True):
        assert one.DESCRIPTOR.fields[0].name != "metadata"
        assert getattr(one, one.DESCRIPTOR.fields[0].name) == getattr(
            other, one.DESCRIPTOR.fields[0].name
        )
    assert rpc.ask(call, []) == []
    rpc.is_well()


def test_other_streams(rpc, classifier_rpc):
    texts = [
        answer.text
        for answer in rpc.ask(
            "DecodeStream", [{"ids": [small.IDS[word]]} for word in ("one", "two")]
        )
    ]
    assert texts == ["one", "two"]
    for call, inputs in (("PredictStream", "one"), ("PredictPairStream", ["one", "two"])):
        answers = classifier_rpc.ask(call, [{"inputs": inputs}] * 3)
        assert [len(answer.predictions) for answer in answers] == [3, 3, 3]


LONG = " ".join(["one"] * 100)
# No truncation
REFUSED = [
    ("rpc", "Embed", {}, "INVALID_ARGUMENT", "Input validation error: `inputs` cannot be empty"),
    (
        "rpc",
        "Embed",
        {"inputs": LONG},
        "INVALID_ARGUMENT",
        "must have less than 64 tokens. Given: 102",
    ),
    (
        "rpc",
        "Predict",
        {"inputs": "a"},
        "FAILED_PRECONDITION",
        "Backend error: Model is not a classifier model",
    ),
    (
        "rpc",
        "Decode",
        {},
        "INVALID_ARGUMENT",
        "Input validation error: `input_ids` cannot be empty",
    ),
    (
        "splade_rpc",
        "Embed",
        {"inputs": "a"},
        "FAILED_PRECONDITION",
        "`normalize` is not available for SPLADE models",
    ),
    (
        "dense_rpc",
        "EmbedSparse",
        {"inputs": "a"},
        "FAILED_PRECONDITION",
        "not an embedding model with SPLADE pooling",
    ),
    (
        "classifier_rpc",
        "Embed",
        {"inputs": "a"},
        "FAILED_PRECONDITION",
        "Backend error: Model is not an embedding model",
    ),
    (
        "classifier_rpc",
        "PredictPair",
        {},
        "INVALID_ARGUMENT",
        "`inputs` must have a single or two elements. Given: 0",
    ),
    (
        "classifier_rpc",
        "PredictPair",
        {"inputs": ["a"] * 3},
        "INVALID_ARGUMENT",
        "or two elements. Given: 3",
    ),
]


@pytest.mark.parametrize(("kind", "call", "given", "code", "details"), REFUSED)
def test_what_is_refused_and_how(kind, call, given, code, details, request):
    rpc = request.getfixturevalue(kind)
    told = rpc.refusal(call, given)
    assert told[0] == code
    assert details in told[1]
    if call != "Decode":
        assert rpc.refusal(f"{call}Stream", [given]) == told


def test_truncation_is_as_asked(rpc):
    for side, http in ((0, "Right"), (1, "Left"), (7, "Right")):
        wanted = over_http(
            rpc, "/embed", inputs=f"two {LONG} three", truncation_direction=http
        ).json()[0]
        asked = {"inputs": f"two {LONG} three", "truncate": True, "truncation_direction": side}
        assert near(rpc.ask("Embed", asked).embeddings, wanted)


CALLS = [method.name for service in messages.services() for method in service.methods]


@pytest.mark.parametrize(
    "call",
    [call for call in CALLS if call != "Info"],
    # Whose message has no fields
)
def test_bytes_that_are_no_message_end_the_call_and_nothing_else(rpc, call):
    garbage = b"\xff\xff\xff"
    code, details = rpc.refusal(call, [garbage] if call.endswith("Stream") else garbage)
    assert code == "INTERNAL"
    assert "tei.v1." in details
    rpc.is_well()


@pytest.mark.parametrize("call", CALLS)
def test_any_bytes_are_answered_or_refused(rpc, call):
    """INTERNAL only of what is no message, as gRPC has it; never UNKNOWN, UNAVAILABLE or no end."""
    draw = Random(call)
    for _ in range(40):
        noise = bytes([draw.choice((8, 10, 16, 24, 34)), draw.randrange(8)]) * draw.randrange(
            3
        ) + draw.randbytes(draw.randrange(9))
        try:
            rpc.ask(call, [noise] if call.endswith("Stream") else noise)
        except grpc.RpcError as error:
            code, details = error.code().name, error.details()
            assert code not in (
                "UNKNOWN",
                "UNAVAILABLE",
                "DEADLINE_EXCEEDED",
                "DATA_LOSS",
                "ABORTED",
            ), details
            assert code != "INTERNAL" or "tei.v1." in details
    rpc.is_well()


@pytest.mark.parametrize(
    "path", ["/", "/x", "//", "/tei.v1.Embed/Nope", "/tei.v1.Nope/Embed", "/tei.v1.Embed/Embed/x"]
)
def test_a_wrong_path_is_unimplemented(rpc, path):
    with pytest.raises(grpc.RpcError) as refused:
        rpc.channel.unary_unary(path)(b"", timeout=20)
    assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_a_message_beyond_the_limit_is_refused():
    # TEI's bound is 4 MiB; --payload-limit can only raise it
    with rpc_serving(server={"payload_limit": 1000}) as rpc:
        small = {"inputs": "one " * 1000}
        assert rpc.refusal("Embed", small)[0] == "INVALID_ARGUMENT"
        large = {"inputs": "one " * 2**20}
        assert rpc.refusal("Embed", large)[0] == "RESOURCE_EXHAUSTED"
        assert rpc.refusal("EmbedStream", [large])[0] == "RESOURCE_EXHAUSTED"
        assert rpc.ask("Embed", {"inputs": "one"}).metadata.compute_tokens == 3
        packed = grpc.insecure_channel(rpc.address, compression=grpc.Compression.Gzip)
        with packed:
            bomb = {"inputs": "one " * 2**21}
            with pytest.raises(grpc.RpcError) as caught:
                start(packed, "Embed", bomb)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        rpc.is_well()


def test_the_key():
    with rpc_serving(server={"api_key": "secret"}) as rpc:
        for sent in ((), (("authorization", "Bearer other"),), (("authorization", "secret"),)):
            for call, given in (
                ("Info", {}),
                ("Embed", b"\xff"),
                ("EmbedStream", [{"inputs": "a"}]),
                ("RerankStream", []),
            ):
                assert rpc.refusal(call, given, metadata=sent) == (
                    "UNAUTHENTICATED",
                    "No valid auth token",
                )
        sent = (("authorization", "Bearer secret"),)
        assert rpc.ask("Embed", {"inputs": "one"}, metadata=sent).embeddings
        assert len(rpc.ask("EmbedStream", [{"inputs": "one"}], metadata=sent)) == 1


def test_calls_are_counted_with_those_of_http():
    with rpc_serving() as rpc:
        rpc.ask("Embed", {"inputs": "one"})
        rpc.ask("EmbedStream", [{"inputs": "one"}, {"inputs": "two"}])
        rpc.refusal("Embed", {})
        rpc.refusal("Tokenize", {})
        over_http(rpc, "/embed", inputs="one")
        assert rpc.counted('te_request_count{method="single"}') == 5
        assert (
            rpc.counted('te_request_success{method="single"}')
            == rpc.counted("te_embed_success")
            == 4
        )
        assert rpc.counted('te_request_failure{err="tokenization"}') == 2
        assert rpc.counted("te_request_duration_count") == 4


def test_a_pass_that_fails_fails_the_call():
    with rpc_serving(fail_on=small.IDS["poison"]) as rpc:
        code, details = rpc.refusal("Embed", {"inputs": "poison"})
        assert code == "FAILED_PRECONDITION"
        assert details.startswith("Backend error: ")
        rpc.is_well()


def test_an_unforeseen_error_is_told_without_its_words(monkeypatch):
    with rpc_serving(labelled(*LABELS)) as rpc:
        monkeypatch.setattr(rpc.running.service.engine, "run", None)
        assert rpc.refusal("Predict", {"inputs": "one"}) == (
            "INTERNAL",
            "internal error: TypeError",
        )
        monkeypatch.undo()
        assert rpc.ask("Predict", {"inputs": "one"}).predictions
