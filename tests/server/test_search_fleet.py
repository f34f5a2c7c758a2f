"""The real command with a store and two models: points go in, a search comes out, reranked by the other model."""

from __future__ import annotations

import httpx

from tests import tiny
from tests.server.live import process

TEXTS = ["baka bulo", "bomo", "bake balo baka"]


def test_a_loaded_reranker_has_the_last_word(hybrid, tmp_path):
    ranker = tiny.write_classifier(tmp_path / "ranker", "bert")
    command = ["-m", "hybridtei", "serve", "--model-id", str(hybrid), "--model-id", str(ranker)]
    flags = ["--port", "0", "--hostname", "127.0.0.1", "--qdrant-path", str(tmp_path / "store")]
    with process([*command, *flags]) as running, httpx.Client(base_url=running.wait_ready(), timeout=60) as client:
        body = {"points": [{"id": i, "text": text} for i, text in enumerate(TEXTS)], "create": True}
        assert client.post("/collections/papers/points", json=body).json()["upserted"] == 3
        ranks = client.post("/rerank", json={"query": "baka", "texts": TEXTS}).json()
        wanted = {rank["index"]: rank["score"] for rank in ranks}
        for rerank in (True, "ranker"):
            asked = {"collection": "papers", "query": "baka", "mode": "dense", "rerank": rerank, "explain": True}
            answer = client.post("/search", json=asked).json()
            assert {hit["id"]: round(hit["score"], 5) for hit in answer["hits"]} == {
                place: round(score, 5) for place, score in wanted.items()
            }
            assert answer["hits"][0]["score"] == max(hit["score"] for hit in answer["hits"])
            assert [stage["name"] for stage in answer["stages"]] == ["embed", "dense", "search", "rerank"]
        assert client.post("/search", json={"collection": "papers", "query": "baka", "rerank": "nobody"}).status_code == 404
        running.terminate()
        assert running.wait() == 0
    assert (tmp_path / "store").is_dir()
