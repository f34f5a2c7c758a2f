"""Refusals of `/tokenize` and `/decode`, and the memory that long answers take."""

from __future__ import annotations

import asyncio
import tracemalloc

import msgspec
import pytest

from hybridtei.config import ModelConfig, ServerConfig
from hybridtei.server.api.tei import TokenizeRequest
from hybridtei.server.api.tokens import tokenize
from hybridtei.server.app import context_for
from hybridtei.server.context import OFFLOAD_NUMBERS, Reply
from hybridtei.server.http.writers import to_json
from hybridtei.system.metrics import Registry
from tests.inference.engine import small

TEXT = "one two three"


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/tokenize", {"prompt": TEXT}, 422, "field `inputs`"),
        ("/decode", {"ids": [[5], [5] * 70_000]}, 422, "`ids` must have less than 16000 ids. Given: 70000"),
    ],
)
def test_refusals_name_the_field(server, path, body, status, message):
    response = server.post(path, body)
    assert response.status_code == status
    assert message in response.text


def test_many_tokens_are_written_aside_and_take_a_few_times_their_answer():
    """As objects they would take ten times as much, and stand still all that the event loop has to do."""
    context = context_for(small.service(), ServerConfig(), ModelConfig(model_id="small"), Registry())

    async def asked() -> Reply:
        return await tokenize(context, TokenizeRequest(inputs=["a " * 4000] * 32))

    reply = asyncio.run(asked())
    tracemalloc.start()
    try:
        body = to_json(reply.answer)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    texts = msgspec.json.decode(body)
    assert [len(tokens) for tokens in texts] == [4002] * 32
    assert texts[0][1] == {"id": small.IDS["a"], "text": "a", "special": False, "start": 0, "stop": 1}
    assert reply.numbers > OFFLOAD_NUMBERS
    assert peak < 4 * len(body)
