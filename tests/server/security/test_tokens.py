"""Tokens by key: counted, and bounded by the minute."""

import grpc
import pytest

from hybridtei.errors import LoadError, TokensUsed
from hybridtei.limits import MAX_DEBT_MINUTES, Meter, Spending
from hybridtei.server.http.security import Keyring, read_keys
from tests.server.grpc.live import rpc_serving, start
from tests.server.http.raw import connected
from tests.server.live import HANG, JSON, Hold, serving


def test_a_meter_fills_again_within_a_minute():
    now = [0.0]
    meter = Meter(120, clock=lambda: now[0])
    meter.check()
    meter.spend(300)
    with pytest.raises(TokensUsed) as refused:
        meter.check()
    # It is 180 below, gets 2 a second, and needs one
    assert refused.value.retry_after_s == 91
    now[0] = 90.0
    with pytest.raises(TokensUsed):
        meter.check()
    now[0] = 90.5
    meter.check()
    now[0] = 10_000.0
    meter.check()
    meter.spend(119)
    meter.check()
    meter.spend(1)
    with pytest.raises(TokensUsed) as refused:
        meter.check()
    assert refused.value.retry_after_s == 1


def test_a_debt_is_of_some_minutes():
    now = [0.0]
    meter = Meter(100, clock=lambda: now[0])
    meter.spend(10**9)
    now[0] = 60.0 * MAX_DEBT_MINUTES
    with pytest.raises(TokensUsed) as refused:
        meter.check()
    assert refused.value.retry_after_s == 1


def test_of_many_requests_at_once_one_spends_more_than_is_left():
    """All are let in, then their texts are tokenised; a request that has begun ends."""
    counted, meter = [], Meter(100, clock=lambda: 0.0)
    requests = [Spending(counted.append, meter) for _ in range(16)]
    requests[0].take(5000)
    for other in requests[1:]:
        with pytest.raises(TokensUsed):
            other.take(5000)
    requests[0].take(5000)
    assert counted == [5000, 5000]


def test_a_change_of_the_file_forgives_no_tokens(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("small tokens_per_minute=100:key-a\nother tokens_per_minute=100:key-b\n")
    ring = Keyring(file=keys)
    for name in (b"key-a", b"key-b"):
        ring.find(name).meter.spend(200)
    keys.write_text("renamed tokens_per_minute=100:key-a\nother tokens_per_minute=200:key-b\n")
    ring.reload()
    with pytest.raises(TokensUsed):
        ring.find(b"key-a").meter.check()
    ring.find(b"key-b").meter.check()


def test_who_leaves_before_the_answer_has_spent_its_tokens(tmp_path):
    keys, hold = tmp_path / "keys", Hold()
    keys.write_text("small tokens_per_minute=5:key-a\n")
    with serving(server={"api_key_file": str(keys)}, gate=hold) as running:
        body = b'{"inputs":"one two three four"}'
        head = "POST /embed HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        key = {**JSON, "authorization": "Bearer key-a"}
        with connected(running) as client:
            lines = f"{head}authorization: Bearer key-a\r\ncontent-length: {len(body)}\r\n\r\n"
            client.sendall(lines.encode() + body)
            assert hold.entered.wait(HANG)
        hold.let_go()
        assert running.post("/embed", body, headers=key).status_code == 429
        assert 'hybridtei_key_tokens_total{key="small"} 6\n' in running.get("/metrics").text


def test_a_key_that_has_used_its_tokens_waits(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(
        "small roles=infer tokens_per_minute=5:key-a\nlarge tokens_per_minute=1000000:key-b\nfree:key-c\n"
    )
    with serving(server={"api_key_file": str(keys)}) as running:

        def answer(path, body, key):
            return running.post(path, body, headers={**JSON, "authorization": f"Bearer {key}"})

        for path, body in (
            ("/v1/embeddings", {"input": "one two three four"}),
            ("/embed", {"inputs": "one"}),
        ):
            for key in ("key-b", "key-c"):
                assert answer(path, body, key).status_code == 200
        used = answer("/v1/embeddings", {"input": "one two three four"}, "key-a")
        tokens = used.json()["usage"]["total_tokens"]
        assert tokens == 6
        for path, body in (("/v1/embeddings", {"input": "one"}), ("/embed", {"inputs": "one"})):
            refused = answer(path, body, "key-a")
            assert refused.status_code == 429
            assert 1 <= int(refused.headers["retry-after"]) <= 24
            assert "tokens_per_minute" in refused.text
            assert answer(path, body, "key-b").status_code == 200
        info = running.get("/info", headers={"authorization": "Bearer key-a"})
        assert info.status_code == 200
        metrics = running.get("/metrics").text
        assert f'hybridtei_key_tokens_total{{key="small"}} {tokens}\n' in metrics
        assert 'hybridtei_key_tokens_total{key="free"} 9\n' in metrics
        assert 'hybridtei_refusals_total{limit="tokens_per_minute"} 2\n' in metrics


def test_calls_of_grpc_spend_the_tokens_of_the_same_key(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("small tokens_per_minute=12:key-a\nfree:key-c\n")
    one, four = {"inputs": "one"}, {"inputs": "one two three four"}
    with rpc_serving(server={"api_key_file": str(keys)}) as rpc:
        metadata = {name: [("authorization", f"Bearer key-{name}")] for name in "ac"}

        def post(key):
            headers = {**JSON, "authorization": f"Bearer key-{key}"}
            return rpc.running.post("/embed", one, headers=headers)

        rpc.ask("Info", {}, metadata=metadata["a"])
        # 6 and 3 tokens, and 6 more than are left
        rpc.ask("Embed", four, metadata=metadata["a"])
        assert post("a").status_code == 200
        rpc.ask("Embed", four, metadata=metadata["a"])
        assert post("a").status_code == 429
        code, details = rpc.refusal("Embed", one, metadata=metadata["a"])
        assert (code, "tokens_per_minute" in details) == ("RESOURCE_EXHAUSTED", True)
        rpc.ask("Info", {}, metadata=metadata["a"])
        assert len(rpc.ask("EmbedStream", [four] * 5, metadata=metadata["c"])) == 5
        rpc.ask("Rerank", {"query": "one", "texts": ["two", "three"]}, metadata=metadata["c"])
        counted = 'hybridtei_key_tokens_total{key="%s"}'
        assert rpc.counted(counted % "small") == 15
        assert rpc.counted(counted % "free") > 30


def test_a_stream_ends_when_its_key_has_used_its_tokens(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("small tokens_per_minute=12:key-a\n")
    with rpc_serving(server={"api_key_file": str(keys)}) as rpc:
        metadata = [("authorization", "Bearer key-a")]
        answers = start(
            rpc.channel, "EmbedStream", [{"inputs": "one two three four"}] * 5000, metadata=metadata
        )
        received = []
        with pytest.raises(grpc.RpcError) as refused:
            received.extend(answers)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "tokens_per_minute" in refused.value.details()
        assert 2 <= len(received) < 5000


@pytest.mark.parametrize(
    "owner",
    [
        "a tokens_per_minute=0",
        "a tokens_per_minute=",
        "a tokens_per_minute=1 roles=infer",
        "a tokens_per_minute=-1",
        "a tokens_per_minute=1e3",
    ],
)
def test_what_is_no_number_of_tokens(tmp_path, owner):
    file = tmp_path / "keys"
    file.write_text(f"{owner}:key\n")
    with pytest.raises(LoadError, match="line 1"):
        read_keys(file)
