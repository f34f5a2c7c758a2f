"""huggingface_hub's InferenceClient, which needs only the server's URL."""

from __future__ import annotations

from harness import QUERY, TEXTS, Server, call, main, same
from huggingface_hub import InferenceClient, constants

# Which forbids this machine's own address too
constants.HF_HUB_OFFLINE = False


def client(url: str) -> InferenceClient:
    return InferenceClient(url)


@call
def feature_extraction_at_the_root(server: Server) -> None:
    same(client(server.url).feature_extraction(TEXTS), server.vectors())


@call
def feature_extraction_of_one_text(server: Server) -> None:
    same(
        client(f"{server.at(server.embed)}/embed").feature_extraction(TEXTS[0]),
        server.vectors(TEXTS[0]),
    )


@call
def feature_extraction_with_all_options(server: Server) -> None:
    (prompt,) = [*server.ask("/info", alias=server.embed)["hybridtei"]["prompts"]][:1] or [None]
    found = client(server.at(server.embed)).feature_extraction(
        TEXTS,
        normalize=False,
        truncate=True,
        truncation_direction="left",
        prompt_name=prompt,
        dimensions=8,
    )
    same(
        found,
        server.vectors(
            normalize=False,
            truncate=True,
            truncation_direction="left",
            prompt_name=prompt,
            dimensions=8,
        ),
    )


@call
def sentence_similarity(server: Server) -> None:
    wanted = server.ask(
        "/similarity",
        {"inputs": {"source_sentence": QUERY, "sentences": TEXTS}},
        alias=server.embed,
    )
    same(client(server.at(server.embed)).sentence_similarity(QUERY, TEXTS), wanted)


@call
def text_classification(server: Server) -> None:
    (wanted,) = server.labels([TEXTS[0]])
    for url in (server.at(server.classify), f"{server.url}/predict"):
        found = client(url).text_classification(TEXTS[0])
        same(
            [[item.label, item.score] for item in found],
            [[item["label"], item["score"]] for item in wanted],
        )


@call
def text_classification_with_top_k_and_function(server: Server) -> None:
    found = client(server.at(server.classify)).text_classification(
        TEXTS[0], top_k=2, function_to_apply="none"
    )
    (wanted,) = server.labels([TEXTS[0]], raw_scores=True)
    same(
        [[item.label, item.score] for item in found],
        [[item["label"], item["score"]] for item in wanted[:2]],
    )


@call
def token_classification(server: Server) -> None:
    for strategy in ("simple", "first", "average", "max"):
        found = client(server.at(server.tag)).token_classification(
            TEXTS[0], aggregation_strategy=strategy
        )
        body = {"inputs": [TEXTS[0]], "aggregation_strategy": strategy}
        (wanted,) = server.ask("/predict_tokens", body, alias=server.tag)
        assert wanted, f"the tagger found nothing to compare by {strategy}"
        same(
            [[item.word, item.start, item.end, {item.entity_group: item.score}] for item in found],
            [[item["token"], item["start"], item["end"], item["results"]] for item in wanted],
        )


@call
def health_check_and_endpoint_info(server: Server) -> None:
    asking = InferenceClient(server.url, provider="hf-inference")
    assert asking.health_check()
    assert asking.get_endpoint_info()["model_type"].keys() == {"embedding"}


main("huggingface_hub", "huggingface_hub")
