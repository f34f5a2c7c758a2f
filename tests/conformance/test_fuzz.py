"""`conformance/fuzz`: a short storm over each kind of model, and that the fuzzer finds what is
wrong."""

import asyncio
import json
import socket
import threading
from contextlib import contextmanager
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.fuzz import peer
from conformance.fuzz.bodies import OURS, POSTS
from conformance.fuzz.heads import request
from conformance.fuzz.judge import faults
from conformance.fuzz.mutations import mutated
from conformance.fuzz.run import flatness
from conformance.fuzz.servers import Plan, Server
from conformance.fuzz.shot import Shot
from conformance.fuzz.storm import Storm
from hybridtei.server.api import cohere, ollama, openai, points, predict, rerank, search, tei
from hybridtei.server.api import embed as hybrid
from hybridtei.server.api import qdrant_inference as inference
from hybridtei.server.api import scoring as score
from hybridtei.server.http.body import BodyError, decode
from hybridtei.server.routing import ROUTES
from tests.inference.engine import small
from tests.sampled import sampled
from tests.server.conftest import LABELS, TAGS, labelled
from tests.server.live import serving

SEED = "7"
PLANS = {
    "hybrid": small.model_spec,
    "splade": small.splade,
    "reranker": lambda: labelled("LABEL_0"),
    "classifier": lambda: labelled(*LABELS),
    "tagger": lambda: labelled(*TAGS, tags=True),
}
KINDS = [
    tei.EmbedRequest,
    tei.PredictRequest,
    tei.SimilarityRequest,
    tei.DecodeRequest,
    tei.VertexRequest,
    tei.TokenizeRequest,
    openai.OpenAICompatRequest,
    cohere.CohereEmbedRequest,
    ollama.OllamaEmbedRequest,
    hybrid.EmbedHybridRequest,
    rerank.RerankRequest,
    rerank.DocumentsRequest,
    score.ScoreRequest,
    predict.ClassifyRequest,
    predict.PredictTokensRequest,
    search.SearchRequest,
    points.PointsRequest,
    inference.InferenceRequest,
]


def server_of(running, name):
    return Server(Plan(name, (name,), 1), "127.0.0.1", running.port, None, None)


@pytest.mark.parametrize("name", sampled(PLANS, ["hybrid", "classifier"]))
def test_a_storm_leaves_nothing_behind(name):
    found, requests = [], 200
    with serving(PLANS[name]()) as running:
        tally = asyncio.run(Storm(server_of(running, name), SEED, requests, found.append).run())
        assert running.service.admission.free == running.service.config.max_concurrent_requests
    assert [(finding.reasons, finding.shot.data[:500]) for finding in found] == []
    assert tally.requests >= requests
    assert tally.valid > requests // 100
    assert {"200", "400", "415", "422"} <= {status for _, status in tally.statuses}


def test_every_post_route_is_asked():
    paths = {path for route in ROUTES if "POST" in route.methods for path in route.paths}
    assert {path.replace("{name:str}", "docs") for path in paths} - POSTS.keys() == set()


def read_or_refused(body, kind):
    try:
        return isinstance(decode(body, kind), kind)
    except BodyError as error:
        return error.status in (400, 413, 415, 422)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(seed=st.integers(0, 2**32), noise=st.binary(max_size=60))
def test_bytes_are_read_or_refused(kind, seed, noise):
    """Nothing but a `BodyError` comes of reading, whatever the bytes."""
    draw = Random(seed)
    route = draw.choice([*POSTS])
    for body in (noise, b'{"inputs":' + noise + b"}", mutated(draw, POSTS[route](draw))):
        assert read_or_refused(body, kind)


@contextmanager
def answering(talk):
    """A server of another kind: `talk` is given what it reads."""

    def run():
        while True:
            try:
                plug, _ = listening.accept()
            except OSError:
                return
            with plug:
                while data := plug.recv(65536):
                    if talk(data, plug) is not None:
                        break

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield Server(
            Plan("tagger", ("tagger",), 1, peers=1),
            "127.0.0.1",
            listening.getsockname()[1],
            None,
            None,
        )
        listening.shutdown(socket.SHUT_RDWR)
    thread.join(60)


def said(status, body):
    return b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        status,
        len(body),
        body,
    )


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (said(500, b"{}"), "status 500"),
        (said(502, b""), "status 502"),
        (said(200, b"[NaN]"), "no JSON: NaN"),
        (said(200, b"[1"), "no JSON"),
        (b"HTTP/1.1 200 OK\r\nx: y\r\n\r\n", "without a length"),
        (b"hello\r\n\r\n", "status line"),
        (b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n", "header"),
        (b"", "1 of 1 answers missing"),
    ],
)
def test_wrong_answers_are_found(answer, reason):
    def talk(_, plug):
        plug.sendall(answer)
        return True

    with answering(talk) as server:
        shot = Shot("plain", (request(b"/embed", b"{}"),))
        outcome = asyncio.run(peer.Peer(server.host, server.port).ask(shot))
        assert reason in "; ".join(faults(shot, outcome))


def test_a_valid_request_that_is_answered_otherwise_is_found():
    answers = iter(range(1000))

    def talk(_, plug):
        plug.sendall(said(200, json.dumps([next(answers)]).encode()))

    found = []
    with answering(talk) as server:
        asyncio.run(Storm(server, SEED, 0, found.append).run())
    assert ["has changed" in finding.reasons[0] for finding in found] == [True]


@pytest.mark.parametrize(
    ("megabytes", "grows"),
    [
        ([100.0 + 2 * step for step in range(100)], "from 148 to 228 MB"),
        (
            [100.0 + 2 * step for step in range(20)] + [140.0] * 80,
            "",
            # It has seen its largest request
        ),
        (
            [300.0 + 400 * (step % 10 > 2) for step in range(100)],
            "",
            # What large requests take is given back
        ),
        ([300.0 + step / 2 + 400 * (step % 10 > 2) for step in range(100)], "from 316 to 336 MB"),
        # A step that stays, late
        ([300.0] * 60 + [400.0] * 40, "from 300 to 400 MB"),
        # Too short to say
        ([100.0 + 2 * step for step in range(50)], ""),
    ],
)
def test_memory_that_grows_is_found(megabytes, grows):
    server = Server(Plan("hybrid", ("hybrid",), 1), "x", 1, None, None)
    server.megabytes = megabytes
    assert flatness(server) == ([f"memory grows: its low-water mark {grows}"] if grows else [])


@pytest.mark.parametrize("path", ["/embed", "/embed_hybrid", "/v1/rerank", "/search"])
def test_every_field_of_a_body_is_drawn(path):
    draw = Random(7)
    names = {name for _ in range(800) for name in POSTS[path](draw)}
    (body,) = OURS.variants(OURS.media[path]["schema"])
    assert body["properties"].keys() == names
