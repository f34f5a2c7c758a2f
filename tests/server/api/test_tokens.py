"""`/tokenize` and `/detokenize` in the words of vLLM and llama.cpp."""

from __future__ import annotations

import asyncio
import tracemalloc

import msgspec
import pytest

from hybridtei.config import ModelConfig, ServerConfig
from hybridtei.observability.metrics import Registry
from hybridtei.server.api.tei import TokenizeRequest
from hybridtei.server.api.tokens import tokenize
from hybridtei.server.app import context_for
from hybridtei.server.context import OFFLOAD_NUMBERS, Reply
from hybridtei.server.http.writers import FORM, Form, encode
from tests.engine import small

TEXT = "one two three"


def of_tei(server, **settings):
    (tokens,) = server.post("/tokenize", {"inputs": TEXT, **settings}).json()
    return tokens


def test_vllms(server):
    tokens = of_tei(server)
    answer = server.post("/tokenize", {"model": "any", "prompt": TEXT}).json()
    assert answer == {
        "count": len(tokens),
        "max_model_len": server.get("/info").json()["max_input_length"],
        "tokens": [token["id"] for token in tokens],
        "token_strs": None,
    }
    body = {"prompt": TEXT, "add_special_tokens": False, "return_token_strs": True}
    assert server.post("/tokenize", body).json()["token_strs"] == TEXT.split()


def test_llama_cpps(server):
    bare, whole = of_tei(server, add_special_tokens=False), of_tei(server)
    assert server.post("/tokenize", {"content": TEXT}).json() == {"tokens": [token["id"] for token in bare]}
    pieces = server.post("/tokenize", {"content": TEXT, "add_special": True, "with_pieces": True}).json()["tokens"]
    assert pieces == [{"id": token["id"], "piece": token["text"]} for token in whole]


def test_back_again(server):
    ids = server.post("/tokenize", {"content": TEXT}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": ids}).json() == {"prompt": TEXT, "content": TEXT}


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/tokenize", {"messages": [{"role": "user", "content": "one"}]}, 422, "`messages` need a chat's template"),
        ("/tokenize", {"prompt": ""}, 400, "cannot be empty"),
        ("/tokenize", {"prompt": 3}, 422, "prompt"),
        ("/tokenize", {"model": "any"}, 422, "field `inputs`"),
        ("/detokenize", {"tokens": []}, 400, "`tokens` cannot be empty"),
        ("/detokenize", {"tokens": [10**6]}, 422, "holds the id 1000000"),
        ("/detokenize", {"tokens": [5] * 70_000}, 422, "`tokens` must have less than 16000 ids. Given: 70000"),
        ("/decode", {"ids": [[5], [5] * 70_000]}, 422, "`ids` must have less than 16000 ids. Given: 70000"),
    ],
)
def test_refusals_name_the_field(server, path, body, status, message):
    response = server.post(path, body)
    assert response.status_code == status
    assert message in response.text


def test_inputs_make_it_teis(server):
    assert server.post("/tokenize", {"inputs": TEXT, "prompt": "two", "content": "three"}).json() == [of_tei(server)]


@pytest.mark.parametrize("msgpack", [False, True])
def test_many_tokens_are_written_aside_and_take_a_few_times_their_answer(msgpack):
    """As objects they would take ten times as much, and stand still all that the event loop has to do."""
    context = context_for(small.service(), ServerConfig(), ModelConfig(model_id="small"), Registry())
    form = Form(msgpack=msgpack)

    async def asked() -> Reply:
        FORM.set(form)
        return await tokenize(context, TokenizeRequest(inputs=["a " * 4000] * 32))

    reply = asyncio.run(asked())
    tracemalloc.start()
    try:
        body, _ = encode(reply.answer, form)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    texts = msgspec.msgpack.decode(body) if msgpack else msgspec.json.decode(body)
    assert [len(tokens) for tokens in texts] == [4002] * 32
    assert texts[0][1] == {"id": small.IDS["a"], "text": "a", "special": False, "start": 0, "stop": 1}
    assert reply.numbers > OFFLOAD_NUMBERS
    assert peak < 4 * len(body)
