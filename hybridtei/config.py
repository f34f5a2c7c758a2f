"""Settings, one frozen struct per reader. Flags, environment names, help and bounds are read from these fields.

Values enter once, in `cli`: flag over environment over default. A field's `extra` says under which heading of the help
it stands (else the struct's own), how much of it the log may show, and under which older name it is still taken. What a
checkpoint says about itself is not here but in `checkpoint.spec.ModelSpec`: it is read, never configured.
"""

from __future__ import annotations

import reprlib
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from hybridtei.errors import HybridTeiError, InvalidInput

EMBEDDED_MODEL = "minilm-hybrid"

Kind = type[msgspec.Struct]

Role = Literal["embed", "rerank", "classify", "tag"]
Dtype = Literal["float16", "float32", "bfloat16", "int8", "fp8"]
MultivectorDtype = Literal["float", "int8", "binary"]
PoolingFlag = Literal["cls", "mean", "splade", "last-token"]
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0, le=86400)]
META = ("ge", "le", "gt", "lt", "description", "extra")  # what a field's annotation may say

HUB, INPUTS, LIMITS = {"group": "hub"}, {"group": "inputs"}, {"group": "limits"}
ANSWERS, SECURITY, OBSERVABILITY = {"group": "answers"}, {"group": "security"}, {"group": "observability"}
PARTLY_SHOWN, NEVER_SHOWN = {"shown": "partly"}, {"shown": "never"}


class ModelConfig(Struct, frozen=True, kw_only=True):
    """Which model, and how to load it."""

    model_id: Annotated[
        str, Meta(description="Model to serve: a local folder, a hub id, or the embedded model.", extra=PARTLY_SHOWN)
    ] = EMBEDDED_MODEL
    revision: Annotated[str | None, Meta(description="Branch, tag, commit or refs/pr/N on the hub.", extra=HUB)] = None
    dtype: Annotated[Dtype | None, Meta(description="Precision of weights and activations [default: float32 on CPU].")] = None
    pooling: Annotated[PoolingFlag | None, Meta(description="Pooling to use instead of the one the model declares.")] = None
    dense_path: Annotated[
        str | None, Meta(description="Folder of the Dense module to use instead of the one in modules.json.")
    ] = None
    backend: Annotated[
        Literal["auto", "torch", "ort", "openvino"],
        Meta(
            description="Engine that runs the model; auto: what was measured to do best on this hardware, and the log says why."
        ),
    ] = "auto"
    packed_cache_gb: Annotated[
        float,
        Meta(
            ge=0,
            description="Most gigabytes of packed weights in the cache folder, and at most half of what is free; 0: none "
            "are kept for the next start.",
            extra={"metavar": "GB"},
        ),
    ] = 10.0
    cuda_devices: Annotated[
        str | None,
        Meta(
            description="GPUs to run on, such as 0,1: a replica on each; 0,0: two on one; all: on every [default: the first]."
        ),
    ] = None
    torch_compile: Annotated[
        bool,
        Meta(description="Compile the torch backend's passes at start, and on a GPU record small ones as CUDA graphs."),
    ] = False
    quantization_ranges: Annotated[
        str | None, Meta(description="File (.npy, .npz) with the range of each dimension, for int8 and uint8 vectors.")
    ] = None
    multivector_tokens: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="Merge the vectors of a document's tokens to so many at most; 0: none is merged [default: 0]."),
    ] = None
    multivector_dtype: Annotated[
        MultivectorDtype | None, Meta(description="Numbers of those vectors; binary: the sign, a bit each [default: float].")
    ] = None
    gelu: Annotated[
        Literal["checkpoint", "tanh"],
        Meta(description="GELU as the checkpoint has it, or always TEI's tanh form, to match vectors that TEI made."),
    ] = "checkpoint"
    hf_token: Annotated[
        str | None,
        Meta(
            description="Token for the hub [default: the token file of the hub cache].",
            extra={**HUB, **PARTLY_SHOWN, "alias": "hf_api_token"},
        ),
    ] = None
    huggingface_hub_cache: Annotated[
        str | None, Meta(description="Folder of the hub cache [default: the hub's own].", extra=HUB)
    ] = None
    offline: Annotated[bool, Meta(description="Never ask the hub; use what the cache holds.", extra=HUB)] = False
    trust_remote_code: Annotated[
        bool, Meta(description="Run Python code that comes with the model. Off: such models are refused.", extra=SECURITY)
    ] = False


class NamedModel(ModelConfig, frozen=True, kw_only=True):
    """One of several models in a process. No flags: a variable called ROLE or ALIAS would be set for something else."""

    alias: Annotated[str, Meta(description="Name of the model in requests, and under /m/ALIAS/.")]
    role: Annotated[Role | None, Meta(description="The one job it is for, where it could do several.")] = None


class EngineConfig(Struct, frozen=True, kw_only=True):
    """Limits, batching and inputs of the engine."""

    max_concurrent_requests: Annotated[
        Positive,
        Meta(
            description="Permits: inputs inside the server at once; more are refused with 429. On a GPU more by default: "
            "texts of 16 tokens for all passes under way.",
            extra=LIMITS,
        ),
    ] = 512
    max_batch_tokens: Annotated[
        Positive, Meta(description="Most tokens in one forward pass; also caps the input length.", extra=LIMITS)
    ] = 16384
    max_batch_requests: Annotated[Positive | None, Meta(description="Most inputs in one forward pass.", extra=LIMITS)] = None
    max_answer_bytes: Annotated[
        Positive, Meta(description="Most bytes, as JSON, of an answer with a vector for each token.", extra=LIMITS)
    ] = 256_000_000
    request_timeout: Annotated[
        Seconds,
        Meta(
            description="How long a request's inputs may take from permit to answer, 503 then; 0: without limit.", extra=LIMITS
        ),
    ] = 600.0
    pass_timeout: Annotated[
        Seconds,
        Meta(
            description="How long one forward pass may take; then its requests fail, and /health with them; 0: without limit.",
            extra=LIMITS,
        ),
    ] = 300.0
    bulk_niceness: Annotated[
        int,
        Meta(ge=0, le=19, description="How far long inputs and large requests give way to short ones, and to other programs."),
    ] = 10
    memory_fraction: Annotated[
        float,
        Meta(
            gt=0, le=1, description="Share of a GPU's memory that is free once a model is loaded, for its passes.", extra=LIMITS
        ),
    ] = 0.9
    embedding_cache_mb: Annotated[
        int, Meta(ge=0, description="Memory for results of inputs seen before, in megabytes; 0: none is kept.")
    ] = 0
    tokenization_workers: Annotated[
        Annotated[int, Meta(ge=1, le=64)] | None, Meta(description="Tokenizer threads [default: processors minus one].")
    ] = None
    auto_truncate: Annotated[
        bool, Meta(description="Cut inputs that are too long, unless a request says otherwise.", extra=INPUTS)
    ] = True
    default_prompt: Annotated[
        str | None, Meta(description="Text put before every input; excludes --default-prompt-name.", extra=INPUTS)
    ] = None
    default_prompt_name: Annotated[
        str | None,
        Meta(
            description="Name of the model's prompt put before every input, and of its adapter; excludes --default-prompt.",
            extra=INPUTS,
        ),
    ] = None
    use_default_prompt: Annotated[
        bool,
        Meta(
            description="Put the checkpoint's own default prompt before inputs of TEI's routes too, which TEI leaves out.",
            extra=INPUTS,
        ),
    ] = False


class ServerConfig(Struct, frozen=True, kw_only=True):
    """The HTTP and gRPC servers: addresses, limits, keys, answers and logs."""

    hostname: Annotated[
        str,
        Meta(
            description="IP address to listen on, of all ports. With an API key, and of text-embeddings-router, the default is "
            "0.0.0.0. A name is no address, and is ignored: containers export theirs as HOSTNAME."
        ),
    ] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port to listen on.")] = 3000
    grpc_port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None, Meta(description="Port for gRPC, TEI's tei.v1, beside HTTP.")
    ] = None
    reuse_port: Annotated[
        bool, Meta(description="Let several servers share --port and --grpc-port: the kernel spreads connections over them.")
    ] = False
    engine_process: Annotated[
        bool | None,
        Meta(
            description="Run the models in a process of their own, which is started again when it ends "
            "[default: where torch finds an NVIDIA device]."
        ),
    ] = None
    drain_seconds: Annotated[float, Meta(ge=0, le=86400, description="How long a stopping server waits for open requests.")] = (
        30.0
    )
    uds_path: Annotated[
        str, Meta(description="Taken for TEI's sake and unused: its socket between router and Python backend.")
    ] = "/tmp/text-embeddings-inference-server"
    served_model_name: Annotated[
        str | None, Meta(description="Name in answers and /info [default: the model id].", extra=ANSWERS)
    ] = None
    rerank_documents_as: Annotated[
        Literal["object", "string"],
        Meta(
            description="How /rerank gives `documents` back: {text}, as vLLM's clients read them, or as infinity's.",
            extra=ANSWERS,
        ),
    ] = "object"
    classify_as: Annotated[
        Literal["infinity", "vllm"],
        Meta(description="Whose answer /classify gives; /v1/classify always gives vLLM's.", extra=ANSWERS),
    ] = "infinity"
    table_under_load: Annotated[
        bool,
        Meta(
            description="While the model is at capacity, answer /search by sparse vectors of queries that are looked up; "
            "answers say so: `query_encoder`.",
            extra=ANSWERS,
        ),
    ] = False
    only_tei_routes: Annotated[
        bool, Meta(description="Serve TEI's routes and no others: anything else is a 404.", extra=ANSWERS)
    ] = False
    task: Annotated[
        str | None, Meta(description="'sentence-similarity' makes POST / answer as /similarity.", extra=ANSWERS)
    ] = None
    max_client_batch_size: Annotated[Positive, Meta(description="Most inputs in one request.", extra=LIMITS)] = 32
    split_large_batches: Annotated[
        bool,
        Meta(
            description="Answer requests of more inputs than --max-client-batch-size part by part; else refuse.", extra=LIMITS
        ),
    ] = False
    max_unsent_bytes: Annotated[
        Positive,
        Meta(
            description="Most bytes of answers that clients have yet to read, of all together; beyond, large answers wait, 503 "
            "then.",
            extra=LIMITS,
        ),
    ] = 256_000_000
    max_rerank_documents: Annotated[
        Positive, Meta(description="Most `documents` in one request to rank them.", extra=LIMITS)
    ] = 10_000
    max_search_points: Annotated[
        int,
        Meta(
            ge=1,
            le=100_000,
            description="Most candidates of one /search: queries x the largest of `prefetch_limit`, `rerank_limit`, "
            "`offset` + `limit`.",
            extra=LIMITS,
        ),
    ] = 3_200  # of 32 queries, 100 each
    max_search_bytes: Annotated[
        Positive, Meta(description="Most bytes, as JSON, of the payloads that one /search finds.", extra=LIMITS)
    ] = 16_000_000
    payload_limit: Annotated[Positive, Meta(description="Most bytes in a request body.", extra=LIMITS)] = 2_000_000
    header_limit: Annotated[
        Positive, Meta(description="Most bytes in the head of a request: its URL and headers.", extra=LIMITS)
    ] = 65_536
    header_timeout: Annotated[
        Seconds,
        Meta(description="How long the head of a request may take to arrive, 408 then; 0: without limit.", extra=LIMITS),
    ] = 60.0
    body_timeout: Annotated[
        Seconds,
        Meta(
            description="How long a body may stand still, or fall behind 1000 bytes a second, 408 then; 0: without limit.",
            extra=LIMITS,
        ),
    ] = 60.0
    max_connections: Annotated[
        Positive, Meta(description="Connections open at once; further ones are answered 503 and closed.", extra=LIMITS)
    ] = 8192
    api_key: Annotated[
        str | None,
        Meta(description="Key that requests must carry as 'Authorization: Bearer KEY'.", extra={**SECURITY, **NEVER_SHOWN}),
    ] = None
    api_key_file: Annotated[
        str | None,
        Meta(
            description="File of further keys, a line `NAME:KEY` each, or `NAME roles=infer,search:KEY` for one that may do no "
            "more; read again on SIGHUP. Names are counted and logged.",
            extra=SECURITY,
        ),
    ] = None
    certfile: Annotated[
        str | None,
        Meta(description="PEM file of the server's certificate and its chain: HTTP and gRPC over TLS.", extra=SECURITY),
    ] = None
    keyfile: Annotated[
        str | None, Meta(description="PEM file of the certificate's private key, without a password.", extra=SECURITY)
    ] = None
    cors_allow_origin: Annotated[
        tuple[str, ...],
        Meta(
            description="Origin that browsers may call from; repeatable [default: any; but without a key none may write].",
            extra=SECURITY,
        ),
    ] = ()
    json_output: Annotated[bool, Meta(description="Log as JSON, one object a line.", extra=OBSERVABILITY)] = False
    log_format: Annotated[
        Literal["text", "json"],
        Meta(
            description="Lines of the log: text, or one JSON object each, whose `facts` at start are for machines. "
            "--json-output is TEI's word for json, with all settings in the first line.",
            extra=OBSERVABILITY,
        ),
    ] = "text"
    disable_spans: Annotated[bool, Meta(description="Leave spans out of JSON logs.", extra=OBSERVABILITY)] = False
    log_level: Annotated[
        str,
        Meta(
            description="Least severe log lines to print: error, warn, info, debug, off, and for parts of the program "
            "'warn,hybridtei.engine=debug', as in tracing filters; what cannot be read means info.",
            extra=OBSERVABILITY,
        ),
    ] = "info"
    prometheus_port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None,
        Meta(
            description="Port that serves /metrics and nothing else, beside the main one, which serves it too "
            "[default: none; TEI's 9000 is not opened].",
            extra=OBSERVABILITY,
        ),
    ] = None
    otlp_endpoint: Annotated[
        str | None,
        Meta(
            description="OTLP collector that traces are sent to over gRPC, such as http://localhost:4317.", extra=OBSERVABILITY
        ),
    ] = None
    otlp_service_name: Annotated[str, Meta(description="`service.name` of traces.", extra=OBSERVABILITY)] = (
        "text-embeddings-inference.server"
    )


class StoreConfig(Struct, frozen=True, kw_only=True):
    """The vector store: a Qdrant server, a folder of the embedded engine, or none."""

    qdrant_url: Annotated[str | None, Meta(description="Qdrant server, or a cluster's: http://a:6334,http://b:6334.")] = None
    qdrant_path: Annotated[str | None, Meta(description="Folder of the embedded Qdrant engine.")] = None
    qdrant_api_key: Annotated[str | None, Meta(description="Key for the Qdrant server.", extra=NEVER_SHOWN)] = None
    qdrant_rest_port: Annotated[
        Annotated[int, Meta(ge=1, le=65535)] | None,
        Meta(
            description="REST port of servers named as grpc://host:port, asked for the number of nodes [default: 6333 beside "
            "6334, else none]."
        ),
    ] = None
    qdrant_timeout: Annotated[float, Meta(gt=0, le=3600, description="How long one call to Qdrant may take.")] = 30.0
    qdrant_patience: Annotated[
        Seconds, Meta(description="How long `ingest` and its like try a call again while Qdrant is away; /search does not.")
    ] = 60.0


def check_value(name: str, value: Any, hint: Any, error: type[HybridTeiError] = InvalidInput) -> None:
    """Raise an error that names the field, its value and what it should be, for a value that a caller in Python gave and that
    is not of the annotated type. NumPy's numbers count as Python's."""
    try:
        msgspec.convert(value.item() if hasattr(value, "item") else value, hint)
    except msgspec.ValidationError as wrong:
        choices = [part for part in (unwrapped(hint)[0], *get_args(hint)) if get_origin(part) is Literal]
        known = f"; known: {', '.join(map(str, get_args(choices[0])))}" if choices else ""
        raise error(f"`{name}` is {reprlib.repr(value)}: {str(wrong)[:1].lower()}{str(wrong)[1:]}{known}") from None


def fields_of(kind: Kind) -> Iterator[tuple[msgspec.structs.FieldInfo, Any, Meta]]:
    """(field, its type without None, what is said of it) of a settings struct."""
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in msgspec.structs.fields(kind):
        yield field, *unwrapped(hints[field.name])


def unwrapped(hint: Any) -> tuple[Any, Meta]:
    """A field's annotation -> (type without None, its Meta, bounds of nested annotations merged in)."""
    known: dict[str, Any] = {}
    while True:
        if get_origin(hint) is typing.Annotated:
            hint, *metas = get_args(hint)
            for meta in metas:
                known = {name: value for name in META if (value := getattr(meta, name)) is not None} | known
        elif get_origin(hint) in (types.UnionType, typing.Union):
            hint = next(part for part in get_args(hint) if part is not type(None))
        else:
            return hint, Meta(**known)
