"""Tokens by key: counted, and bounded by the minute."""

import grpc
import pytest

from hybridtei.errors import LoadError, TokensUsed
from hybridtei.server.http.security import Meter, read_keys
from tests.server.grpc.live import rpc_serving, start
from tests.server.live import JSON, serving


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
