"""What a request is counted as: the headers of its answer, which TEI's dashboards and bills read,
and the numbers of its answer, by which memory is bounded."""

import pytest

from hybridtei.server import serve

TEXTS = ["one", "two three", "four"]
# Of all texts together
CHARACTERS = 16
QUERY = "five"
# The query counts once for each document
RANKED = CHARACTERS + 3 * len(QUERY)
EMBEDDED = {
    "/embed": ({"inputs": TEXTS}, CHARACTERS),
    "/embed_sparse": ({"inputs": TEXTS}, CHARACTERS),
    "/embed_all": ({"inputs": TEXTS}, CHARACTERS),
    "/embed_hybrid": ({"inputs": TEXTS}, CHARACTERS),
    "/embed_multivector": ({"inputs": [{"text": "a word", "spans": [[0, 1], [2, 6]]}]}, 6),
    "/v1/embeddings": ({"input": TEXTS}, CHARACTERS),
    "/v2/embed": ({"texts": TEXTS, "input_type": "search_document"}, CHARACTERS),
    "/api/embed": ({"input": TEXTS}, CHARACTERS),
    "/similarity": ({"inputs": {"source_sentence": QUERY, "sentences": TEXTS}}, CHARACTERS + 4),
}
RANKINGS = {
    "/rerank": {"query": QUERY, "texts": TEXTS},
    "/v1/rerank": {"query": QUERY, "documents": TEXTS},
    "/score": {"text_1": QUERY, "text_2": TEXTS},
    "/predict": {"inputs": [[QUERY, text] for text in TEXTS]},
}


@pytest.mark.parametrize(("path", "asked"), EMBEDDED.items(), ids=EMBEDDED)
def test_an_embedding_counts_the_characters_of_its_texts(server, path, asked):
    body, characters = asked
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    assert int(response.headers["x-compute-characters"]) == characters


@pytest.mark.parametrize(("path", "body"), RANKINGS.items(), ids=RANKINGS)
def test_a_ranking_counts_the_query_once_for_each_document(reranker, path, body):
    response = reranker.post(path, body)
    assert response.status_code == 200, response.text
    assert int(response.headers["x-compute-characters"]) == RANKED


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
def test_a_classification_counts_the_characters_of_its_texts(classifier, path):
    response = classifier.post(path, {"input": TEXTS})
    assert response.status_code == 200, response.text
    assert int(response.headers["x-compute-characters"]) == CHARACTERS


def test_labels_of_tokens_count_the_characters_of_the_texts(tagger):
    response = tagger.post("/predict_tokens", {"inputs": TEXTS})
    assert response.status_code == 200, response.text
    assert int(response.headers["x-compute-characters"]) == CHARACTERS


def test_a_text_of_several_pairs_is_embedded_once(dense_server):
    response = dense_server.post("/score", {"text_1": QUERY, "text_2": [*TEXTS, *TEXTS]})
    assert response.status_code == 200, response.text
    assert int(response.headers["x-compute-characters"]) == CHARACTERS + len(QUERY)


WRITTEN = {
    "/embed": {"inputs": TEXTS},
    "/embed_sparse": {"inputs": TEXTS},
    "/embed_all": {"inputs": TEXTS},
    "/embed_hybrid": {"inputs": TEXTS, "sparse_format": "qdrant"},
    "/embed_multivector": {"inputs": TEXTS},
    "/qdrant/inference": {
        "inference": "update",
        "inputs": [
            {"data_type": "text", "data": text, "model": f"small/{kind}"}
            for text in TEXTS
            for kind in ("dense", "sparse", "multivector")
        ],
    },
}


def numbers_in(answer):
    if isinstance(answer, dict):
        answer = list(answer.values())
    return sum(map(numbers_in, answer)) if isinstance(answer, list) else 1


@pytest.mark.parametrize(("path", "body"), WRITTEN.items(), ids=WRITTEN)
def test_the_numbers_of_an_answer_are_those_that_it_writes(server, monkeypatch, path, body):
    counted = []
    real = serve.head_of

    def head_of(reply, *arguments):
        counted.append(reply.numbers)
        return real(reply, *arguments)

    monkeypatch.setattr(serve, "head_of", head_of)
    answer = server.post(path, body).json()
    assert counted == [numbers_in(answer["embeddings"] if path == "/qdrant/inference" else answer)]


def test_the_times_of_an_answer_are_parts_of_its_whole(server):
    headers = server.post("/embed", {"inputs": TEXTS}).headers
    parts = [int(headers[f"x-{part}-time"]) for part in ("tokenization", "queue", "inference")]
    assert 0 <= sum(parts) <= int(headers["x-total-time"]) < 60_000
    assert headers["x-compute-time"] == headers["x-total-time"]
