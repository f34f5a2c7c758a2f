"""Which model answers, and how models come and go while others serve."""

import asyncio

import pytest

from hybridtei.config import ModelConfig, NamedModel, ServerConfig
from hybridtei.errors import InvalidInput, LoadError, UnknownModel
from hybridtei.outputs import Load
from hybridtei.server.api import ops
from hybridtei.server.context import Context, RequestMetrics
from hybridtei.server.models import Models
from hybridtei.system.metrics import Registry
from tests.inference.engine import small


def context(model_id, spec=None, **settings):
    registry = Registry()
    service = small.service(spec, registry=registry)
    return Context(
        service,
        ServerConfig(),
        ModelConfig(model_id=model_id, **settings),
        registry,
        RequestMetrics(registry, 64),
    )


def is_splade(candidate):
    return candidate.is_splade


@pytest.fixture
def two():
    return Models(
        {"plain": context("org/plain"), "lexical": context("org/lexical", small.splade())}
    )


def test_without_a_name_the_first_that_can(two):
    assert two.choose(None, None, (is_splade,)).model.model_id == "org/lexical"
    assert two.choose(None, None, (lambda _: True,)).model.model_id == "org/plain"
    assert two.choose(None, "default/not-specified", (is_splade,)).model.model_id == "org/lexical"
    # Which says why it cannot
    assert two.choose(None, None, (lambda _: False,)) is two.default


@pytest.mark.parametrize("name", ["plain", "org/plain"])
def test_a_name_decides_whatever_the_model_can(two, name):
    assert two.choose(None, name, (is_splade,)).model.model_id == "org/plain"
    # The path stands above the body
    assert two.choose("lexical", name, (is_splade,)).model.model_id == "org/lexical"


def test_an_unknown_name_tells_what_there_is(two):
    with pytest.raises(
        UnknownModel, match=r"`x{200}…` is not served here; served are `plain`, `lexical`"
    ):
        two.choose(None, "x" * 300, (is_splade,))
    with pytest.raises(UnknownModel, match="`nobody`"):
        two.choose("nobody", None, (is_splade,))


def test_one_model_takes_every_name_but_not_every_path():
    one = Models({"only": context("org/only")})
    assert one.choose(None, "text-embedding-3-small", (is_splade,)) is one.default
    with pytest.raises(UnknownModel):
        one.choose("text-embedding-3-small", None, (is_splade,))


async def test_a_model_that_loads_or_failed_to_changes_no_others_names():
    go = asyncio.Event()

    async def opener(config):
        await go.wait()
        raise LoadError("no weights")

    models = Models({"first": context("first")}, opener)
    loading = asyncio.create_task(models.load(NamedModel(model_id="late", alias="late")))
    await asyncio.sleep(0)
    for state in ("loading", "failed"):
        assert models.choose(None, "text-embedding-3-small", (is_splade,)) is models.default
        with pytest.raises(UnknownModel, match=f"`late` is {state}"):
            models.choose(None, "late", (is_splade,))
        with pytest.raises(UnknownModel, match=r"served are `first`$"):
            models.named("nobody")
        go.set()
        await asyncio.wait([loading])
    assert loading.exception() is not None


async def test_models_come_and_go_while_others_stay():

    go = asyncio.Event()

    async def opener(config):
        await go.wait()
        if config.model_id == "broken":
            raise LoadError("broken: no weights")
        made = context(config.model_id)
        await made.service.start()
        return made

    models = Models({"first": context("first")}, opener)
    await models.start()
    loading = asyncio.create_task(models.load(NamedModel(model_id="late", alias="late")))
    await asyncio.sleep(0)
    with pytest.raises(UnknownModel, match="`late` is loading"):
        models.choose(None, "late", (is_splade,))
    with pytest.raises(InvalidInput, match="`late` is loading already"):
        await models.load(NamedModel(model_id="other", alias="late"))
    assert models.choose(None, None, (is_splade,)) is models.default
    go.set()
    assert (await loading).state == "ready"
    assert models.named("late").model.model_id == "late"
    with pytest.raises(LoadError):
        await models.load(NamedModel(model_id="broken", alias="broken"))
    with pytest.raises(UnknownModel, match=r"`broken` is failed \(broken: no weights\)"):
        models.named("broken")
    await models.unload("broken")
    await models.unload("first")
    assert [found.model.model_id for found in models.ready] == ["late"]
    with pytest.raises(InvalidInput, match="only model"):
        await models.unload("late")
    with pytest.raises(UnknownModel):
        await models.unload("first")
    await models.stop()


async def test_a_server_may_load_nothing():
    with pytest.raises(InvalidInput, match="loads no models"):
        await Models({"only": context("only")}).load(NamedModel(model_id="a", alias="a"))


async def test_what_one_model_may_do_is_not_handed_on_to_those_loaded_later():
    loaded = []

    async def opener(config):
        loaded.append(config)
        return context(config.model_id)

    models = Models(
        {"trusted": context("trusted", trust_remote_code=True, hf_token="secret")}, opener
    )
    await ops.load(models, {"model_id": "later"})
    assert (loaded[0].trust_remote_code, loaded[0].hf_token) == (False, None)
    await models.stop()


async def test_what_a_model_counted_stays_counted_when_it_goes():
    async def opener(config):
        return context(config.model_id)

    models = Models({"first": context("first")}, opener)
    for number in range(2):
        entry = await models.load(NamedModel(model_id="guest", alias=f"guest-{number}"))
        entry.context.metrics.began(Load(3, 0, is_batch=True), "embed")
        entry.context.service.engine.metrics.queued.value = lambda: 7
        entry.context.service.engine.metrics.size.observe(3)
        assert "te_queue_size 7" in models.metrics()
        await models.unload(entry.alias)
        told = models.metrics()
        assert f'te_request_count{{method="batch"}} {number + 1}' in told
        assert f"te_embed_count {3 * (number + 1)}" in told
        assert f"te_batch_next_size_count {number + 1}" in told
        # A level is no sum
        assert "te_queue_size 0" in told
    await models.stop()


async def test_so_many_models_load_at_once_and_no_more():

    go_on = asyncio.Event()

    async def opener(config):
        await go_on.wait()
        return context(config.model_id)

    models = Models({"only": context("org/only")}, opener)
    loads = [
        asyncio.ensure_future(models.load(NamedModel(model_id="org/x", alias=f"x{n}")))
        for n in range(8)
    ]
    # Each has begun
    await asyncio.sleep(0)
    with pytest.raises(InvalidInput, match="8 models are loading already"):
        await models.load(NamedModel(model_id="org/x", alias="ninth"))
    go_on.set()
    await asyncio.gather(*loads)
    assert len(models.ready) == 9
    await models.load(NamedModel(model_id="org/x", alias="ninth"))
