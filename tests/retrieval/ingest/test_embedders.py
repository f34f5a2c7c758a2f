"""Embedders: in process and by a server the same rows; a bad text alone; a server that is busy,
away, or no hybridtei."""

from contextlib import contextmanager
from functools import partial

import orjson
import pytest

from conformance.small.fake_backend import FakeBackend
from hybridtei.batch import Head
from hybridtei.client import Client
from hybridtei.config import EngineConfig
from hybridtei.encoder import Encoder
from hybridtei.errors import BackendError, InvalidInput, NoKey
from hybridtei.inference.tasks.pooling import MultivectorBudget
from hybridtei.retrieval.ingest.pipeline import embed_each
from hybridtei.retrieval.ingest.run import vector_heads
from tests import stand_in
from tests.inference.engine import small
from tests.near import near, same
from tests.server.live import serving

TEXTS = [f"text {i} " + "words " * (i % 5) for i in range(50)]
HEADS = frozenset({Head.DENSE, Head.SPARSE, Head.MULTIVECTOR})


def local(model=None, **backend):
    model = model or small.model()
    return documents_by(
        Encoder(model, FakeBackend(model.spec, **backend), 256, EngineConfig()), HEADS
    )


def documents_by(embedder, heads):
    return partial(
        embedder.encode, outputs=heads, input_type="document", multivector=MultivectorBudget()
    )


def assert_equal(one, other):
    near(one.dense, other.dense, 1e-6)
    near(one.multivector.values, other.multivector.values, 1e-6)
    same(one.multivector.offsets, other.multivector.offsets)
    same(one.sparse.indices, other.sparse.indices)
    same(one.sparse.indptr, other.sparse.indptr)
    near(one.sparse.values, other.sparse.values, 1e-6)


def test_a_servers_spans_are_the_engines():
    spans = [[(0, 4), (5, 6)] * (1 + i % 4) for i in range(len(TEXTS))]
    with serving(server={"max_client_batch_size": 3}) as server, Client(server.url) as remote:
        wanted = local()(TEXTS, spans=spans)
        assert len(wanted) == sum(map(len, spans))
        assert_equal(documents_by(remote, HEADS)(TEXTS, spans=spans), wanted)
        with pytest.raises(InvalidInput, match=r"spans\[1\]. is \[4, 5\], which holds no token"):
            documents_by(remote, HEADS)(["text one"], spans=[[(0, 4), (4, 5)]])


@pytest.mark.parametrize(
    "model",
    [{"multivector_tokens": 2}, {"multivector_dtype": "int8"}, {"multivector_dtype": "binary"}],
)
def test_a_servers_own_budget_is_not_the_collections(model):
    with serving(model=model) as server, Client(server.url) as remote:
        assert_equal(documents_by(remote, HEADS)(TEXTS[:5]), local()(TEXTS[:5]))


def test_a_servers_prompt_for_documents_is_used():
    spec = small.model_spec(prompts={"document": "passage: "})
    wanted = local(small.model(spec))(TEXTS)
    with serving(spec) as server, Client(server.url) as remote:
        assert_equal(documents_by(remote, HEADS)(TEXTS), wanted)


def test_bad_texts_stand_alone():
    texts = [*TEXTS[:5], "poison", *TEXTS[5:9], "", TEXTS[9]]
    found, reasons = embed_each(local(fail_on=small.IDS["poison"]), texts)
    assert [place for place, reason in enumerate(reasons) if reason is not None] == [5, 10]
    assert "the batch holds" in reasons[5]
    assert "cannot be empty" in reasons[10]
    assert_equal(found, local()(TEXTS[:10]))


def test_where_every_text_fails_the_engine_is_at_fault():
    with pytest.raises(BackendError):
        embed_each(local(fail_on=small.IDS["poison"]), ["poison one", "poison two"])
    found, reasons = embed_each(local(fail_on=small.IDS["poison"]), ["poison"])
    assert (found.dense, len(reasons)) == (None, 1)


INFO = {
    "model_id": "m",
    "model_dtype": "float32",
    "max_client_batch_size": 32,
    "hybridtei": {"role": "embedding", "outputs": ["dense"], "prompts": {}},
}


@contextmanager
def answering(fixed):
    """A server of one answer to all but /info."""

    def answer(method, path, _):
        status, headers, body = (200, {}, INFO) if method == "GET" else fixed
        return status, headers, body if isinstance(body, bytes) else orjson.dumps(body)

    with stand_in.answering(answer) as url:
        yield url


@pytest.mark.parametrize(
    ("answer", "error", "why"),
    [
        ((422, {}, {"error": "too long", "error_type": "Validation"}), InvalidInput, "too long"),
        (
            (413, {}, b"Failed to buffer the request body: length limit exceeded"),
            InvalidInput,
            "length limit",
        ),
        ((424, {}, {"error": "pass failed", "error_type": "Backend"}), BackendError, "pass failed"),
        ((200, {}, [{"dense": ["x"]}]), BackendError, "not what was asked for"),
        ((401, {}, b""), NoKey, "status 401"),
        ((404, {}, {"error": "no model", "error_type": "NotFound"}), ConnectionError, "no model"),
        ((200, {}, b"<html>please\n log in"), ConnectionError, "status 200: <html>please log in"),
        ((418, {}, {"error": "teapot", "error_type": "Validation"}), ConnectionError, "status 418"),
    ],
)
def test_only_the_servers_own_errors_are_a_texts_fault(answer, error, why):
    with answering(answer) as url, Client(url, patience_s=1) as client:
        embed = documents_by(client, frozenset({Head.DENSE}))
        with pytest.raises(error, match=why):
            embed(["one"])
        if error in (ConnectionError, NoKey):
            with pytest.raises(error, match=why):
                embed_each(embed, ["one"])
        else:
            (reason,) = embed_each(embed, ["one"])[1]
            assert why in reason


def test_a_sparse_vector_of_unequal_lengths_is_refused():
    wrong = {"sparse": {"indices": [1, 2], "values": [0.5]}}
    with (
        answering((200, {}, [wrong])) as url,
        Client(url, patience_s=1) as client,
        pytest.raises(BackendError, match="2 indices and 1 values"),
    ):
        documents_by(client, frozenset({Head.SPARSE}))(["one"])


def test_outputs():
    assert vector_heads(frozenset(Head), None) == HEADS
    assert vector_heads(HEADS, ["sparse"]) == {Head.SPARSE}
    for names in (["vectors"], ["tokens"]):
        with pytest.raises(InvalidInput, match=r"the model has dense, multivector, sparse"):
            vector_heads(HEADS, names)
    with pytest.raises(InvalidInput, match="the model has dense"):
        vector_heads(frozenset({Head.DENSE, Head.TOKENS}), ["sparse"])
