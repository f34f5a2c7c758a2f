"""Adapters over HTTP: `prompt_name`, Jina's `task` and what other dialects say of inputs choose
one, each for its request."""

import pytest

from hybridtei.models.checkpoint.sizes import Adapters
from tests.inference.engine import small
from tests.jina import ADAPTERS
from tests.near import near
from tests.server.live import serving

PROMPTS = {**dict.fromkeys(ADAPTERS, ""), "retrieval.query": "one: ", "plain": ""}
TEXT = "hybrid search"


@pytest.fixture(scope="module")
def adapted():
    """The fake backend's states depend on the adapter of a token."""
    adapters = Adapters(ADAPTERS, 4, 0.25, PROMPTS)
    with serving(
        small.model_spec(adapters=adapters, prompts=PROMPTS), engine={"embedding_cache_mb": 1}
    ) as running:
        yield running


def embed(server, text=TEXT, **body):
    return server.post("/embed", {"inputs": [text], **body}).json()[0]


def openai(server, **body):
    return server.post("/v1/embeddings", {"input": [TEXT], **body}).json()["data"][0]["embedding"]


def test_each_name_chooses_its_own_adapter(adapted):
    plain = embed(adapted)
    under = {name: embed(adapted, prompt_name=name) for name in ADAPTERS}
    assert len({tuple(vector) for vector in (plain, *under.values())}) == 1 + len(ADAPTERS)
    # A prompt that is no adapter's
    assert embed(adapted, prompt_name="plain") == plain


def test_the_prompt_is_put_before_the_text(adapted):
    counts = [
        len(adapted.post("/embed_all", {"inputs": TEXT, "prompt_name": name}).json()[0])
        for name in ("retrieval.passage", "retrieval.query")
    ]
    assert counts[1] == counts[0] + 2


@pytest.mark.parametrize("name", ADAPTERS)
def test_jinas_task_is_the_same(adapted, name):
    near(openai(adapted, task=name), embed(adapted, prompt_name=name), 1e-7)


def test_the_side_of_other_dialects_is_the_same(adapted):
    assert openai(adapted, input_type="query") == openai(adapted, task="retrieval.query")
    assert openai(adapted, input_type="document") == openai(adapted, task="retrieval.passage")
    assert openai(adapted) == openai(adapted, input_type="other")


def test_an_unknown_task_is_refused_with_those_there_are(adapted):
    response = adapted.post("/v1/embeddings", {"input": [TEXT], "task": "retrieval"})
    assert response.status_code == 422
    assert (
        f"`task` is not an adapter of the model, which has: {', '.join(ADAPTERS)}"
        in response.json()["message"]
    )
    assert adapted.post("/embed", {"inputs": [TEXT], "prompt_name": "retrieval"}).status_code == 422


def test_info_lists_them(adapted):
    assert adapted.get("/info").json()["hybridtei"]["adapters"] == list(ADAPTERS)
