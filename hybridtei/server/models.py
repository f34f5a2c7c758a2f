"""The models of a server, the choice of the model that answers a request, and the permits of
requests to the vector store.

A request that names a model gets that model, even if it lacks the capability. A request without a
name gets the first model with the capability. A server of one model accepts every name, as TEI
does, since clients send the name in their configuration.

Requests to the store have their own permits and the request timeout, so a slow store delays no
model and a bounded number of requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from hybridtei.batch import Head
from hybridtei.config import ModelConfig, ModelRole, NamedModel, ServerConfig
from hybridtei.errors import (
    BackendError,
    CollectionMismatch,
    HybridTeiError,
    InvalidInput,
    InvalidPoint,
    StoreAtCapacity,
    StoreAway,
    StoreError,
    StoreUnavailable,
    UnknownModel,
    UnsupportedHead,
)
from hybridtei.inference.engine.device import STOP_SECONDS
from hybridtei.inference.tasks.embed import Embed
from hybridtei.inference.tasks.rerank import Scored
from hybridtei.limits import Bound
from hybridtei.models.fingerprint import model_hash
from hybridtei.options import SIDES, EmbedOptions, InputType, RankOptions
from hybridtei.outputs import Embeddings, Load, Usage
from hybridtei.server.context import Context
from hybridtei.server.ranking import rank
from hybridtei.system import memory
from hybridtei.system.metrics import Counter, Registry, text_of
from hybridtei.system.own_thread import OwnThreads

if TYPE_CHECKING:
    from hybridtei.models.text.tokenizer import Token
    from hybridtei.retrieval.store.base import CollectionSchema
    from hybridtei.retrieval.store.collection import CollectionSchemas

log = logging.getLogger(__name__)

# Models loading at once; each takes a thread and memory
MAX_LOADING = 8
# Clients without a model name send these
NO_NAMES = frozenset({"", "default", "default/not-specified"})

Opener = Callable[[NamedModel], Awaitable[Context]]
State = Literal["loading", "ready", "failed", "unloading"]


@dataclass(slots=True)
class Entry:
    """One model by its alias, from the start of its loading."""

    alias: str
    state: State
    context: Context | None = None
    error: str | None = None
    seconds: float | None = None


def too_many_loading(bound: Bound) -> InvalidInput:
    """The refusal of a bound of models that load."""
    return InvalidInput(
        f"{bound.limit} models are loading already: wait until one is ready or has failed"
    )


class Models:
    """The models. Only the event loop's thread may use it. `opener`: makes a started context from a
    configuration; None: models cannot be loaded at run time. `flags`: the process's; a model loaded
    later cannot exceed them."""

    def __init__(
        self,
        contexts: Mapping[str, Context],
        opener: Opener | None = None,
        flags: ModelConfig | None = None,
    ) -> None:
        self.flags = flags or ModelConfig()
        self.entries = {
            alias: Entry(alias, "ready", context) for alias, context in contexts.items()
        }
        # The contexts of ready models: first the configured ones, then the loaded ones
        self.ready: list[Context] = []
        self.list_ready()
        # Of the whole process
        self.registry = Registry()
        self._opener, self._loading = opener, Bound(MAX_LOADING, too_many_loading)
        self.alias: str | None = None
        # True: the server will end, and its health is bad
        self.leaving = False

    def below(self, alias: str) -> Models:
        """These models, as a request below `/m/ALIAS` sees them."""
        view = copy(self)
        view.alias = alias
        return view

    def list_ready(self) -> None:
        """List the ready contexts. Called when an entry changes."""
        self.ready = [
            entry.context
            for entry in self.entries.values()
            if entry.state == "ready" and entry.context is not None
        ]

    @property
    def default(self) -> Context:
        """The first ready context."""
        return self.ready[0]

    def choose(
        self, alias: str | None, name: str | None, capability: Sequence[Callable[[Context], bool]]
    ) -> Context:
        """Choose the model of a request. `alias`: from the path; `name`: from the body. Raises
        UnknownModel."""
        if alias is not None:
            return self.named(alias)
        ready = self.ready
        # The name of a loading or failed model reaches no other
        if len(ready) == 1 and name not in self.entries:
            if name is None or name == ready[0].served_name:
                return ready[0]
            return ready[0].on_side(split_side(name)[1])
        if name is not None and name not in NO_NAMES:
            return self.named(name)
        # The best capability first
        fitting = (context for able in capability for context in ready if able(context))
        # Its error names the missing capability
        return next(fitting, ready[0])

    def named(self, name: str) -> Context:
        """Find a model by alias, served name or model id; else by what stands before `:query` or
        `:document`, on that side. Raises UnknownModel, naming its state or the served models."""
        for front, side in ((name, None), split_side(name)):
            entry = self.entries.get(front)
            if entry is not None and entry.context is not None and entry.state == "ready":
                return entry.context.on_side(side)
            if entry is not None:
                reason = f" ({entry.error})" if entry.error else ""
                raise UnknownModel(f"the model `{front}` is {entry.state}{reason}")
            for context in self.ready:
                if front in (context.served_name, context.model.model_id):
                    return context.on_side(side)
        shown = name if len(name) <= 200 else f"{name[:200]}…"
        served = ", ".join(
            f"`{alias}`" for alias, entry in self.entries.items() if entry.state == "ready"
        )
        raise UnknownModel(f"the model `{shown}` is not served here; served are {served}")

    def advised(self, error: UnsupportedHead, capability: Sequence[Able]) -> UnsupportedHead:
        """The error, with the names of the models that have the best capability of a route."""
        able = [
            f"`{context.served_name}`"
            for context in self.ready
            if capability and capability[0](context)
        ]
        if len(self.ready) == 1 or not able:
            return error
        return type(error)(f"{error}; here {', '.join(able)} can")

    def listed(self) -> list[Context]:
        """The ready models, each followed by its sides if it reads queries and documents
        differently. Below an alias that one alone."""
        if self.alias is not None:
            return [self.named(self.alias)]
        listed: list[Context] = []
        for context in self.ready:
            listed.append(context)
            if context.has_sides:
                listed += [context.on_side(side) for side in SIDES]
        return listed

    def metrics(self) -> str:
        """The Prometheus text of all models together and of the process. Below `/m/ALIAS` each
        model has its own."""
        of_models = (entry.context.registry for entry in self.entries.values() if entry.context)
        return text_of(
            reading for registry in (*of_models, self.registry) for reading in registry.readings()
        )

    async def load(self, config: NamedModel) -> Entry:
        """Load a model while the others serve. Raises InvalidInput if the name is taken; LoadError,
        which `entries` keeps."""
        if self._opener is None:
            raise InvalidInput("this server loads no models at run time")
        loaded = self.entries.get(config.alias)
        if loaded is not None and loaded.state != "failed":
            raise InvalidInput(f"`alias`: the model `{config.alias}` is {loaded.state} already")
        self._loading.take(1)
        # A failed entry is removed first, so that the new one comes last
        self.entries.pop(config.alias, None)
        entry = self.entries[config.alias] = Entry(config.alias, "loading")
        began = perf_counter()
        try:
            entry.context = await self._opener(config)
        except BaseException as error:
            entry.state, entry.error = "failed", str(error)
            if not isinstance(error, HybridTeiError):
                log.error("loading %s failed", config.model_id, exc_info=True)
            raise
        finally:
            self._loading.give_back(1)
        entry.state, entry.seconds = "ready", perf_counter() - began
        self.list_ready()
        log.info("loaded %s as %s in %.1f s", config.model_id, config.alias, entry.seconds)
        return entry

    async def unload(self, alias: str) -> None:
        """Finish running passes, fail waiting requests, free memory. Raises UnknownModel;
        InvalidInput for the last model."""
        entry = self.entries.get(alias)
        if entry is None or entry.state in ("loading", "unloading"):
            raise UnknownModel(
                f"the model `{alias}` is {entry.state if entry else 'not served here'}"
            )
        if entry.context is not None:
            if len(self.ready) == 1:
                raise InvalidInput(f"`model`: `{alias}` is the only model here")
            entry.state = "unloading"
            self.list_ready()
            await entry.context.service.stop()
            self.registry.keep(entry.context.registry.readings())
        del self.entries[alias], entry
        await asyncio.to_thread(memory.trim)
        log.info("unloaded %s", alias)

    async def start(self) -> None:
        await asyncio.gather(*(context.service.start() for context in self.ready))

    async def stop(self) -> None:
        """Stop all services, at the end of the process."""
        await asyncio.gather(*(context.service.stop(STOP_SECONDS) for context in self.ready))

    @property
    def dead(self) -> BackendError | None:
        """The error of the first model that works again only after a restart of the process; None
        without such a model."""
        return next(filter(None, (context.service.dead for context in self.ready)), None)


def split_side(name: str) -> tuple[str, InputType | None]:
    """`ALIAS:query` -> ("ALIAS", "query"). Any other ending belongs to the name, except `:latest`:
    Ollama's clients add this tag, and a model has one version here."""
    name = name.removesuffix(":latest")
    for side in SIDES:
        if name.endswith(f":{side}"):
            return name.removesuffix(f":{side}"), side
    return name, None


@dataclass(frozen=True, slots=True)
class Able:
    """The required kind and outputs of a model, which with a configured role gets only requests for
    it or by name."""

    role: ModelRole
    kind: str | None = "embedding"
    heads: frozenset[Head] = frozenset()

    def __call__(self, context: Context) -> bool:
        assigned = context.model.role if isinstance(context.model, NamedModel) else None
        is_kind = self.kind in (None, context.service.model.spec.role)
        return assigned in (None, self.role) and is_kind and context.heads >= self.heads


DENSE, SPARSE, MULTIVECTOR = (
    frozenset({Head.DENSE}),
    frozenset({Head.SPARSE}),
    frozenset({Head.MULTIVECTOR}),
)
EMBEDS = Able("embed")
EMBED, EMBED_SPARSE = (Able("embed", heads=DENSE), EMBEDS), (Able("embed", heads=SPARSE), EMBEDS)
EMBED_MULTIVECTOR = (Able("embed", heads=MULTIVECTOR), EMBEDS)
EMBED_HYBRID = (
    Able("embed", heads=DENSE | SPARSE | MULTIVECTOR),
    Able("embed", heads=DENSE | SPARSE),
    EMBEDS,
)
RANK = (Able("rerank", "reranker"), Able("rerank", None, MULTIVECTOR), Able("rerank"))
CLASSIFY, TAG = (
    (Able("classify", "classifier"), Able("classify", "reranker")),
    (Able("tag", "tagger"),),
)


# Exports and imports at once. Each keeps a page of points in memory
MAX_TRANSFERS = 8


@dataclass(frozen=True, slots=True)
class StoreBounds:
    """Bounds that all requests to the store share: one permit an input; one a transfer, which
    lasts as long as its client likes; one thread for work that would block the event loop, also
    for clients that leave."""

    admission: Bound
    transfers: Bound = field(default_factory=lambda: Bound(MAX_TRANSFERS))
    aside: OwnThreads = field(default_factory=lambda: OwnThreads("store"))


# Error class -> the label `kind`. Subclasses come before their bases.
STORE_ERRORS = {
    StoreAway: "away",
    StoreAtCapacity: "capacity",
    StoreUnavailable: "unavailable",
    CollectionMismatch: "mismatch",
    InvalidPoint: "point",
    StoreError: "refused",
}


def store_errors(registry: Registry) -> Counter:
    """The counter of `STORE_ERRORS`, 0 for each kind. The models' metrics do not show failing
    searches."""
    counter = registry.counter("hybridtei_store_errors_total")
    for kind in STORE_ERRORS.values():
        counter.add(0, kind=kind)
    return counter


class Asked:
    """A served model as one search asks it. `usage`: what embedding its queries cost."""

    usage: Usage

    def __init__(self, context: Context, *, is_batch: bool = False) -> None:
        self.model_id = context.model.model_id
        self.spec = context.service.model.spec
        self._context, self._is_batch = context, is_batch

    async def embed(
        self, texts: Sequence[str], heads: frozenset[Head], options: EmbedOptions
    ) -> Embeddings:
        """Embed queries; a table is read without a permit. Raises Overloaded if too many
        read it."""
        task = Embed(texts, heads, options)
        load = Load(
            len(texts),
            sum(map(len, texts)),
            is_batch=self._is_batch,
        )
        if options.query_encoder == "model":
            answer, self.usage = await self._context.run(task, load)
            return answer
        service = self._context.service
        with service.beside.inside(1), service.admission.carrying(load.inputs):
            answer, self.usage = await self._context.run(task, load)
        return answer

    async def rank(self, query: str, documents: Sequence[str], options: RankOptions) -> Scored:
        """Score hits."""
        scored, _ = await rank(
            self._context,
            self._context.ranking(
                query,
                documents,
                options,
            ),
        )
        return scored

    def tokens_of(self, text: str) -> Iterable[Token]:
        """The tokens of a text without special ones, with their places."""
        return self._context.service.tokenizer.tokens(text, add_special_tokens=False)

    async def fingerprint(self) -> str | None:
        """The hash of the model's files."""
        return await model_hash(self._context.fingerprint)


@dataclass(frozen=True, slots=True)
class StoreContext:
    """The context of functions that use the store. `named`: the model that the path or the body
    names, if any. `collection`: of the path, if any."""

    models: Models
    schemas: CollectionSchemas
    server: ServerConfig
    bounds: StoreBounds
    named: str | None = None
    collection: str = ""

    async def run(self, inputs: int, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a request's work with permits and within the request timeout. Raises Overloaded,
        TimedOut."""
        admission = self.bounds.admission
        permits = min(inputs, self.server.max_client_batch_size, admission.limit)
        with admission.inside(permits), self.models.default.service.deadlines.within():
            return await work()

    def embedder(self, schema: CollectionSchema | None) -> Context:
        """The named model, else the one that made the collection's vectors, else the first that
        embeds. Raises UnknownModel."""
        from hybridtei.retrieval.store.plan import MODEL_ID

        if self.named is None and schema is not None:
            model_id = schema.metadata.get(MODEL_ID)
            for context in self.models.ready:
                if context.model.model_id == model_id:
                    return context
        return self.models.choose(None, self.named, EMBED_HYBRID)


T = TypeVar("T")
