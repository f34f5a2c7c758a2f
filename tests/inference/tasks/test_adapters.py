"""A prompt's name chooses the adapter of its inputs: from the checkpoint to the vectors, cached or
not."""

import asyncio

import numpy as np
import pytest

from conformance.families.oracle import open_engine
from conformance.small import tiny
from hybridtei import Encoder
from hybridtei.batch import Head
from hybridtei.config import EngineConfig
from hybridtei.inference.engine.service import EngineService
from hybridtei.inference.load import text_model
from hybridtei.inference.tasks.embed import Embed
from hybridtei.models.checkpoint.spec import read_spec
from hybridtei.options import EmbedOptions
from tests import jina
from tests.inference.engine.test_service import running
from tests.near import near, same

TEXT = "baka bulo"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return jina.write(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def encoder(checkpoint):
    return Encoder.load(checkpoint, backend="ort", dtype="float32")


def dense(encoder, prompt_name=None, **options):
    found = encoder.encode([TEXT], prompt_name=prompt_name, **options).dense
    return found[0]


def test_a_name_chooses_prompt_and_adapter(encoder, checkpoint, tmp_path):
    for number, name in enumerate((None, *jina.ADAPTERS)):
        native = Encoder.load(
            tiny.write_modules(jina.merged(checkpoint, tmp_path / str(number), number)),
            backend="ort",
        )
        text = jina.QUERY + TEXT if name == "retrieval.query" else TEXT
        expected = native.encode([text]).dense
        near(dense(encoder, name), expected[0], 3e-6)
        native.close()


def test_the_type_of_inputs_chooses_too(encoder):
    same(dense(encoder, input_type="query"), dense(encoder, "retrieval.query"))
    same(dense(encoder, input_type="document"), dense(encoder, "retrieval.passage"))
    same(dense(encoder, "separation", input_type="document"), dense(encoder, "separation"))


def test_a_default_prompt_chooses_too(encoder, checkpoint):
    started = Encoder.load(
        checkpoint, backend="ort", dtype="float32", default_prompt_name="classification"
    )
    same(dense(started), dense(encoder, "classification"))
    same(dense(started, "separation"), dense(encoder, "separation"))


async def test_results_of_several_adapters_are_not_mixed(checkpoint):
    """One text under each adapter at once, then again from the cache."""
    spec = read_spec(checkpoint)
    backend = open_engine("ort", spec)
    config = EngineConfig(embedding_cache_mb=1)
    service = EngineService(text_model(spec, config), backend, config, budget_tokens=64)
    names = [None, *jina.ADAPTERS]

    async def ask():
        heads = frozenset({Head.DENSE})
        tasks = [Embed([TEXT], heads, EmbedOptions(prompt_name=name)) for name in names]
        answers = await asyncio.gather(*(service.run(task) for task in tasks))
        return [answered.answer.dense[0] for answered in answers]

    async with running(service):
        first, passes = await ask(), backend.forwards
        second = await ask()
    assert backend.forwards == passes
    for place, vector in enumerate(first):
        same(second[place], vector)
        assert all(np.abs(vector - other).max() > 1e-3 for other in first[:place])
