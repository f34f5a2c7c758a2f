"""The real command with a store and two models: points go in, a search comes out, reranked by the
other model."""

import httpx

from conformance.small import tiny
from tests.server.live import commanded

TEXTS = ["baka bulo", "bomo", "bake balo baka"]


def test_a_loaded_reranker_has_the_last_word(hybrid, tmp_path, caplog):
    ranker = tiny.write_classifier(tmp_path / "ranker", "bert")
    flags = [
        "--model-id",
        str(hybrid),
        "--model-id",
        str(ranker),
        "--qdrant-path",
        str(tmp_path / "store"),
    ]
    with (
        commanded(*flags, "--hostname", "0.0.0.0") as url,
        httpx.Client(base_url=url, timeout=60, trust_env=False) as client,
    ):
        assert "EVERY client may read and change the vector store" in caplog.text
        body = {"points": [{"id": i, "text": text} for i, text in enumerate(TEXTS)], "create": True}
        assert client.post("/collections/papers/points", json=body).json()["upserted"] == 3
        ranks = client.post("/rerank", json={"query": "baka", "texts": TEXTS}).json()
        wanted = {rank["index"]: rank["score"] for rank in ranks}
        for rerank in (True, "ranker"):
            asked = {
                "collection": "papers",
                "query": "baka",
                "mode": "dense",
                "rerank": rerank,
                "explain": True,
            }
            answer = client.post("/search", json=asked).json()
            assert {hit["id"]: round(hit["score"], 5) for hit in answer["hits"]} == {
                place: round(score, 5) for place, score in wanted.items()
            }
            assert answer["hits"][0]["score"] == max(hit["score"] for hit in answer["hits"])
            assert [stage["name"] for stage in answer["stages"]] == [
                "embed",
                "dense",
                "search",
                "rerank",
            ]
        assert (
            client.post(
                "/search", json={"collection": "papers", "query": "baka", "rerank": "nobody"}
            ).status_code
            == 404
        )
    assert (tmp_path / "store").is_dir()
