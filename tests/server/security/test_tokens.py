"""Tokens by key: counted, and bounded by the minute."""

import pytest

from hybridtei.errors import LoadError, TokensUsed
from hybridtei.server.http.security import Meter, read_keys
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
