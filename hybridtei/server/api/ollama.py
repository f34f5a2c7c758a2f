"""Ollama's embedding API, and its list of models, which Ollama's clients and Open WebUI read
first."""

from __future__ import annotations

from datetime import UTC, datetime
from hashlib import sha256
from time import perf_counter_ns
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, structs

from hybridtei import __version__
from hybridtei.batch import EMBEDDINGS, Head
from hybridtei.errors import UnsupportedHead
from hybridtei.inference.tasks.embed import Embed
from hybridtei.options import Dimensions, EmbedOptions
from hybridtei.outputs import Embeddings, Usage
from hybridtei.server.api.tei import FullText, ServedModel, texts_of
from hybridtei.server.context import Context, Reply
from hybridtei.server.models import EMBED, Models
from hybridtei.server.routing import get, post
from hybridtei.server.serve import HttpRequest
from hybridtei.server.vectors import SPLADE_NORMALIZE
from hybridtei.server.wires import OllamaErrorResponse, Wire

OLLAMA = Wire(
    tried="ollama, llm-ollama, Open WebUI",
    error=OllamaErrorResponse,
    older={"name": "model", "prompt": "input"},
)


class OllamaEmbedRequest(Struct, frozen=True, kw_only=True):
    """Request of `/api/embed`."""

    input: Annotated[
        str | list[FullText],
        Meta(description="A text, or a list of texts. Without any, the model is loaded."),
    ] = ""
    prompt: Annotated[str, Meta(description="`input` under the older route's name.")] = ""
    model: ServedModel = None
    truncate: Annotated[
        bool | None, Meta(description="Cut texts that are too long [default, as in Ollama: true].")
    ] = None
    dimensions: Dimensions = None


class OllamaEmbedResponse(Struct, frozen=True):
    """Answer of `/api/embed`; durations are in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


@post(
    "/api/embed",
    OllamaEmbedRequest,
    OllamaEmbedResponse,
    capability=EMBED,
    wire=OLLAMA,
)
async def ollama_embed(context: Context, request: OllamaEmbedRequest) -> Reply:
    """Ollama embeddings: a list of unit vectors, even for one text. Long texts are cut unless
    `truncate` is false."""
    text = request.input
    if not text:
        # Clients send an empty text to load a model
        return Reply(OllamaEmbedResponse(context.served_name, [], 0, 0, 0))
    texts, heads = texts_of(text, "input"), frozenset({Head.DENSE})
    options = EmbedOptions(truncate=request.truncate is not False, dimensions=request.dimensions)
    task = Embed(texts, heads, context.settled(options))

    def check() -> None:
        if context.is_splade:
            raise UnsupportedHead(SPLADE_NORMALIZE)
        task.check(context.service.model.spec)

    began_ns = perf_counter_ns()

    def write(answer: Embeddings, usage: Usage) -> dict[str, Any]:
        assert answer.dense is not None
        return {
            "model": context.served_name,
            "embeddings": answer.dense,
            "total_duration": perf_counter_ns() - began_ns,
            "load_duration": 0,
            "prompt_eval_count": usage.tokens,
        }

    is_batch = not isinstance(text, str)
    return await context.embed(task, write, is_batch=is_batch, check=check, field="input")


class OllamaPromptRequest(Struct, frozen=True, kw_only=True):
    """Request of `/api/embeddings`, the older route."""

    prompt: Annotated[
        str, Meta(description="A text. Clients send an empty one to check that the model exists.")
    ] = ""
    input: Annotated[str, Meta(description="`prompt` under the newer route's name.")] = ""
    model: ServedModel = None


@post(
    "/api/embeddings",
    OllamaPromptRequest,
    dict[Literal["embedding"], list[float]],
    capability=EMBED,
    wire=OLLAMA,
)
async def ollama_embeddings(context: Context, request: OllamaPromptRequest) -> Reply:
    """Ollama embeddings of one text: its vector is not scaled to length 1. A long text is cut."""
    text = request.prompt or request.input
    if not text:
        return Reply({"embedding": []})
    options = context.settled(EmbedOptions(truncate=True, normalize=False))
    task = Embed([text], frozenset({Head.DENSE}), options)

    def write(answer: Embeddings, _: Usage) -> dict[str, Any]:
        assert answer.dense is not None
        return {"embedding": answer.dense[0]}

    return await context.embed(task, write, is_batch=False, field="prompt")


class OllamaDetails(Struct, frozen=True):
    """Ollama's description of a model's file."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(Struct, frozen=True):
    """A served model. `digest`: a hash of its name and fingerprint; until the weights have been
    read, of its name, id and revision. Ollama's clients take two names of one digest for one
    model."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaRunning(OllamaModel, frozen=True):
    """A model in memory, where it stays."""

    expires_at: str
    context_length: int


class OllamaShowRequest(Struct, frozen=True):
    """Request of `/api/show` and `/api/pull`."""

    model: ServedModel = None
    name: Annotated[str | None, Meta(description="`model` under its older name.")] = None


class OllamaShowResponse(Struct, frozen=True):
    """Facts of a model, under GGUF's keys."""

    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]


STARTED_AT = datetime.now(UTC).isoformat()
# Ollama writes the time at which it unloads a model
NEVER = datetime(9999, 1, 1, tzinfo=UTC).isoformat()


@post(
    "/api/show",
    OllamaShowRequest,
    OllamaShowResponse,
    role="any",
    wire=OLLAMA,
    any_type=True,
    takes_permits=False,
)
async def show(context: Context, request: OllamaShowRequest) -> Reply:
    """Facts of a model: Open WebUI reads `capabilities`, other clients read the context length."""
    spec, length = context.service.model.spec, context.service.reader.max_input_length
    family = spec.model_type
    sizes = {f"{family}.context_length": length, f"{family}.embedding_length": spec.dense_width}
    capabilities = ["embedding"] if spec.heads & EMBEDDINGS else []
    return Reply(
        OllamaShowResponse(
            _details(context), {"general.architecture": family, **sizes}, capabilities
        )
    )


@get("/api/tags", dict[Literal["models"], list[OllamaModel]], source="models", wire=OLLAMA)
async def list_models(models: Models, request: HttpRequest) -> Reply:
    """The models, in Ollama's format."""
    return Reply({"models": [_listed(context) for context in models.listed()]})


@get("/api/ps", dict[Literal["models"], list[OllamaRunning]], source="models", wire=OLLAMA)
async def list_running(models: Models, request: HttpRequest) -> Reply:
    """The models in memory: all, for ever."""
    running = []
    for context in models.listed():
        facts: dict[str, Any] = structs.asdict(_listed(context))
        length = context.service.reader.max_input_length
        running.append(OllamaRunning(**facts, expires_at=NEVER, context_length=length))
    return Reply({"models": running})


@post(
    "/api/pull",
    OllamaShowRequest,
    dict[Literal["status"], str],
    role="any",
    wire=OLLAMA,
    any_type=True,
    takes_permits=False,
)
async def pull(context: Context, request: OllamaShowRequest) -> Reply:
    """Success for a served model: nothing is downloaded. Another model is an error."""
    return Reply({"status": "success"})


@get("/api/version", dict[Literal["version"], str], source="models", wire=OLLAMA)
async def version(models: Models, request: HttpRequest) -> Reply:
    """The version in whole numbers: Open WebUI reads it to check that the server is up."""
    return Reply({"version": __version__.partition(".dev")[0]})


def _listed(context: Context) -> OllamaModel:
    name = context.served_name
    folder = context.service.model.spec.folder
    # Empty if the files lie elsewhere
    weights = (*folder.glob("*.safetensors"), *folder.glob("*.bin"))
    header = context.fingerprint_header
    model = f"{context.model.model_id}@{context.model.revision}".encode()
    if header is not None:
        model = header[1]
    digest = sha256(b"%b\n%b" % (name.encode(), model)).hexdigest()
    return OllamaModel(
        name,
        name,
        STARTED_AT,
        sum(file.stat().st_size for file in weights),
        digest,
        _details(context),
    )


def _details(context: Context) -> OllamaDetails:
    family = context.service.model.spec.model_type
    return OllamaDetails("", "safetensors", family, [family], "", context.service.backend.dtype)
