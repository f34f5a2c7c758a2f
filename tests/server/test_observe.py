"""Metrics under TEI's names, as the server shows them."""

import re

import pytest

from hybridtei.server.context import RequestMetrics
from hybridtei.system.metrics import HELP, Registry
from tests.inference.engine import small
from tests.server.conftest import labelled
from tests.server.live import serving

SERIES = {
    "te_request_count": "counter",
    "te_request_success": "counter",
    "te_request_failure": "counter",
    "te_embed_count": "counter",
    "te_embed_success": "counter",
    "te_predict_count": "counter",
    "te_predict_success": "counter",
    "te_queue_size": "gauge",
    **{
        f"te_{scope}_{stage}duration": "histogram"
        for scope in ("request", "embed", "predict")
        for stage in ("", "tokenization_", "queue_", "inference_")
    },
    "te_request_input_length": "histogram",
    "te_batch_next_size": "histogram",
    "te_batch_next_tokens": "histogram",
}
FIRST = [
    "0.000015000000000000002",
    "0.000022500000000000005",
    "0.00003375000000000001",
    "0.00005062500000000001",
]
LAST = ["9.707397373664762", "14.561096060497142"]


@pytest.fixture
def fresh():
    with serving(small.dense_only()) as running:
        yield running


def samples(running):
    response = running.get("/metrics")
    assert response.headers["content-type"] == "text/plain; charset=utf-8"
    lines = [
        line.rpartition(" ")
        for line in response.text.splitlines()
        if line and not line.startswith("#")
    ]
    return {name: float(value) for name, _, value in lines}


def failures(running):
    pattern = re.compile(r'te_request_failure\{err="(\w+)"\}')
    return {
        found[1]: value
        for name, value in samples(running).items()
        if (found := pattern.fullmatch(name))
    }


def test_series_kinds_order_and_bucket_text(server):
    server.post("/embed", {"inputs": ["one", "two"]})
    text = server.get("/metrics").text
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
    assert {name: kinds.get(name) for name in SERIES} == SERIES
    order = list(kinds.values())
    # Counter, gauge, histogram
    assert order == sorted(order)
    assert "# HELP te_" not in text
    assert not re.search(r"^te_\w+_total", text, re.M)
    bounds = re.findall(r'^te_request_duration_bucket\{le="([^"]+)"\}', text, re.M)
    assert len(bounds) == 36
    assert (bounds[:4], bounds[-3:]) == (FIRST, [*LAST, "+Inf"])
    assert "e-" not in "".join(bounds)
    for name, limit in (
        ("te_request_input_length", small.LONGEST),
        ("te_batch_next_size", 4096),
        ("te_batch_next_tokens", 2**20),
    ):
        powers = [str(2**k) for k in range(limit.bit_length())]
        assert re.findall(rf'^{name}_bucket\{{le="([^"]+)"\}}', text, re.M) == [*powers, "+Inf"]
    for name in (
        name for name, kind in SERIES.items() if kind == "histogram" and "predict" not in name
    ):
        counts = [int(count) for count in re.findall(rf"^{name}_bucket\S+ (\d+)$", text, re.M)]
        assert counts == sorted(counts)
        assert counts[-1] == int(re.search(rf"^{name}_count (\d+)$", text, re.M)[1]) > 0


def test_what_is_counted(fresh):
    fresh.post("/embed", {"inputs": "one"})
    fresh.post("/embed", {"inputs": ["one", "two three"]})
    fresh.post("/v1/embeddings", {"input": ["one"]})
    fresh.post("/similarity", {"inputs": {"source_sentence": "one", "sentences": ["two"]}})
    fresh.post("/tokenize", {"inputs": "one"})
    fresh.post("/decode", {"ids": [5]})
    fresh.get("/info")
    seen = samples(fresh)
    assert (
        seen['te_request_count{method="single"}']
        == seen['te_request_success{method="single"}']
        == 1
    )
    assert (
        seen['te_request_count{method="batch"}'] == seen['te_request_success{method="batch"}'] == 3
    )
    assert (
        seen["te_embed_count"] == seen["te_embed_success"] == seen["te_embed_duration_count"] == 6
    )
    assert seen["te_request_duration_count"] == 4
    assert seen["te_request_input_length_sum"] == 3 * 5 + 4
    assert seen["te_batch_next_size_sum"] == 6
    assert (
        seen["hybridtei_forward_passes_total"]
        == seen["te_batch_next_size_count"]
        == fresh.backend.forwards
    )
    assert (
        seen["te_queue_size"]
        == seen["hybridtei_queue_tokens"]
        == seen["hybridtei_running_batches"]
        == 0
    )
    lanes = {name: value for name, value in seen.items() if name.startswith("hybridtei_lane_")}
    assert (
        sum(value for name, value in lanes.items() if "batches" in name) == fresh.backend.forwards
    )
    assert (
        sum(value for name, value in lanes.items() if "tokens" in name)
        == seen["te_batch_next_tokens_sum"]
    )
    assert seen["hybridtei_batch_fill_count"] == fresh.backend.forwards
    assert seen["hybridtei_batch_fill_sum"] * 256 == pytest.approx(seen["te_batch_next_tokens_sum"])
    assert failures(fresh) == {}


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/embed", {"inputs": ["x"] * 33}, "batch_size"),
        ("/embed", {"inputs": ""}, "tokenization"),
        ("/embed", {"inputs": "x", "prompt_name": "x"}, "tokenization"),
        ("/embed", {"inputs": "x " * 99, "truncate": False}, "tokenization"),
        ("/embed", {"inputs": "x", "dimensions": 0}, "validation"),
        ("/embed", {"inputs": "x", "dimensions": 9999}, "validation"),
        ("/embed_sparse", {"inputs": "x"}, "model_type"),
        ("/predict", {"inputs": "x"}, "model_type"),
        ("/rerank", {"query": "x", "texts": ["x"]}, "model_type"),
        ("/embed_multivector", {"inputs": "x"}, "model_type"),
        ("/embed_hybrid", {"inputs": "x", "outputs": ["sparse"]}, "model_type"),
    ],
)
def test_what_a_failure_is_called(fresh, path, body, kind):
    assert fresh.post(path, body).is_client_error
    assert failures(fresh) == {kind: 1}
    assert samples(fresh)["te_queue_size"] == 0


def test_failed_passes_and_overload():
    with serving(engine={"max_concurrent_requests": 1}, fail_on=small.IDS["poison"]) as running:
        assert running.post("/embed", {"inputs": "poison"}).status_code == 424
        assert running.post("/embed", {"inputs": ["one", "two"]}).status_code == 429
        assert failures(running) == {"inference": 1, "overloaded": 1}


def test_one_classified_text_is_one_request_and_one_success():
    """TEI counts it twice, and never as a success."""
    with serving(labelled("a", "b")) as running:
        assert running.post("/predict", {"inputs": "one"}).status_code == 200
        assert running.post("/predict", {"inputs": [["one"], ["two"]]}).status_code == 200
        seen = samples(running)
        assert (
            seen['te_request_count{method="single"}']
            == seen['te_request_success{method="single"}']
            == 1
        )
        assert (
            seen['te_request_count{method="batch"}']
            == seen['te_request_success{method="batch"}']
            == 1
        )
        assert (
            seen["te_predict_count"]
            == seen["te_predict_success"]
            == seen["te_predict_duration_count"]
            == 3
        )
        assert seen["te_request_duration_count"] == 2


def test_length_bounds_end_at_two_to_the_nineteenth():
    registry = Registry()
    RequestMetrics(registry, 2**30)
    reading = next(
        reading for reading in registry.readings() if reading.name == "te_request_input_length"
    )
    assert reading.bounds == tuple(2.0**k for k in range(20))


def test_our_own_metrics_follow_prometheus_conventions(fresh):
    """Every one has a help text, and counters end in `_total`; TEI's names stay as they are."""
    lines = fresh.get("/metrics").text.splitlines()
    kinds = dict(line.split()[2:] for line in lines if line.startswith("# TYPE hybridtei_"))
    assert (
        {name for name in kinds if f"# HELP {name} {HELP[name]}" in lines}
        == set(kinds)
        == set(HELP) & set(kinds)
    )
    assert {
        name for name, kind in kinds.items() if (kind == "counter") != name.endswith("_total")
    } == set()
    assert not [line for line in lines if line.startswith("# HELP te_")]
