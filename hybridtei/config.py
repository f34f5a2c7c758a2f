"""Settings, one frozen struct per reader. Flags, environment names, help and bounds are read from these fields.

`cli` reads values once: a flag wins over a variable, a variable over the default. A field's `extra` has its heading in the help
(else the struct's own), how much of it the log may show, and its older name. What a checkpoint says about itself is read, never
configured: `checkpoint.spec.ModelSpec` has it.
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
        Meta(description="Backend that runs the model; auto: the first that can run it, and the log says why."),
    ] = "auto"
    packed_cache_gb: Annotated[
        float,
        Meta(
            ge=0,
            description="Most gigabytes of packed weights in the cache folder, at most half of the free space; 0: none are "
            "kept for the next start.",
            extra={"metavar": "GB"},
        ),
    ] = 10.0
    cuda_devices: Annotated[
        str | None,
        Meta(
            description="GPUs to run on: 0,1: a replica on each; 0,0: two on one; all: one on every GPU [default: the first]."
        ),
    ] = None
    torch_compile: Annotated[
        bool,
        Meta(description="Compile the torch backend's passes at start; on a GPU also record small passes as CUDA graphs."),
    ] = False
    quantization_ranges: Annotated[
        str | None, Meta(description="File (.npy, .npz) with the range of each dimension, for int8 and uint8 vectors.")
    ] = None
    multivector_tokens: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="Merge the vectors of a document's tokens to at most this number; 0: do not merge [default: 0]."),
    ] = None
    multivector_dtype: Annotated[
        MultivectorDtype | None, Meta(description="Numbers of these vectors; binary: one bit each, the sign [default: float].")
    ] = None
    gelu: Annotated[
        Literal["checkpoint", "tanh"],
        Meta(description="GELU as the checkpoint has it, or TEI's tanh form, to match vectors that TEI made."),
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
    offline: Annotated[bool, Meta(description="Never ask the hub; use only files of the cache.", extra=HUB)] = False
    trust_remote_code: Annotated[
        bool, Meta(description="Run Python code that comes with the model; else such models are refused.", extra=SECURITY)
    ] = False


class NamedModel(ModelConfig, frozen=True, kw_only=True):
    """One of several models in a process. No flags: a variable called ROLE or ALIAS would be set for something else."""

    alias: Annotated[str, Meta(description="Name of the model in requests, and under /m/ALIAS/.")]
    role: Annotated[Role | None, Meta(description="Its one task, if it can do several.")] = None


class EngineConfig(Struct, frozen=True, kw_only=True):
    """Limits, batching and inputs of the engine."""

    max_concurrent_requests: Annotated[
        Positive,
        Meta(
            description="Permits: inputs inside the server at once; further ones are refused with 429. On a GPU the default "
            "is higher: texts of 16 tokens for all passes under way.",
            extra=LIMITS,
        ),
    ] = 512
    max_batch_tokens: Annotated[
        Positive, Meta(description="Most tokens in one forward pass; also caps the input length.", extra=LIMITS)
    ] = 16384
    max_batch_requests: Annotated[Positive | None, Meta(description="Most inputs in one forward pass.", extra=LIMITS)] = None
    max_answer_bytes: Annotated[
        Positive, Meta(description="Most bytes of an answer with a vector for each token, as JSON.", extra=LIMITS)
    ] = 256_000_000
    request_timeout: Annotated[
        Seconds,
        Meta(description="Longest time from permit to answer of a request's inputs, then 503; 0: no limit.", extra=LIMITS),
    ] = 600.0
    pass_timeout: Annotated[
        Seconds,
        Meta(
            description="Longest time of a forward pass; then its requests fail, and /health is 503; 0: no limit.",
            extra=LIMITS,
        ),
    ] = 300.0
    bulk_niceness: Annotated[
        int,
        Meta(
            ge=0,
            le=19,
            description="How much long inputs and large requests give way to short ones, and to other programs.",
        ),
    ] = 10
    memory_fraction: Annotated[
        float,
        Meta(
            gt=0, le=1, description="Share of a GPU's memory, of that left free by the loaded model, for passes.", extra=LIMITS
        ),
    ] = 0.9
    embedding_cache_mb: Annotated[
        int, Meta(ge=0, description="Megabytes of memory for results of earlier inputs; 0: none are kept.")
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
            description="Put the checkpoint's own default prompt before inputs of TEI's routes too; TEI leaves it out.",
            extra=INPUTS,
        ),
    ] = False


class ServerConfig(Struct, frozen=True, kw_only=True):
    """The HTTP and gRPC servers: addresses, limits, keys, answers and logs."""

    hostname: Annotated[
        str,
        Meta(
            description="IP address of all ports. With an API key, and for text-embeddings-router, the default is 0.0.0.0. A "
            "host name is ignored: containers export theirs as HOSTNAME."
        ),
    ] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port to listen on.")] = 3000
    grpc_port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None, Meta(description="Port for gRPC, TEI's tei.v1, beside HTTP.")
    ] = None
    reuse_port: Annotated[
        bool, Meta(description="Let several servers share --port and --grpc-port; the kernel spreads connections over them.")
    ] = False
    engine_process: Annotated[
        bool | None,
        Meta(
            description="Run the models in a process of their own, which the server restarts when it ends [default: if torch "
            "finds an NVIDIA device]."
        ),
    ] = None
    drain_seconds: Annotated[float, Meta(ge=0, le=86400, description="How long a stopping server waits for open requests.")] = (
        30.0
    )
    uds_path: Annotated[str, Meta(description="Accepted and unused: TEI's socket between router and Python backend.")] = (
        "/tmp/text-embeddings-inference-server"
    )
    served_model_name: Annotated[
        str | None, Meta(description="Name in answers and /info [default: the model id].", extra=ANSWERS)
    ] = None
    rerank_documents_as: Annotated[
        Literal["object", "string"],
        Meta(
            description="Form of `documents` in answers of /rerank: {text}, for vLLM's clients, or a string, for infinity's.",
            extra=ANSWERS,
        ),
    ] = "object"
    classify_as: Annotated[
        Literal["infinity", "vllm"],
        Meta(description="Form of answers of /classify; /v1/classify always answers as vLLM.", extra=ANSWERS),
    ] = "infinity"
    table_under_load: Annotated[
        bool,
        Meta(
            description="While the model is at capacity, answer /search by sparse vectors that are looked up by token; the "
            "answer says so in `query_encoder`.",
            extra=ANSWERS,
        ),
    ] = False
    only_tei_routes: Annotated[
        bool, Meta(description="Serve TEI's routes and no others: any other is a 404.", extra=ANSWERS)
    ] = False
    task: Annotated[
        str | None, Meta(description="'sentence-similarity' makes POST / answer as /similarity.", extra=ANSWERS)
    ] = None
    max_client_batch_size: Annotated[Positive, Meta(description="Most inputs in one request.", extra=LIMITS)] = 32
    split_large_batches: Annotated[
        bool,
        Meta(
            description="Answer a request of more inputs than --max-client-batch-size in parts; else refuse it.", extra=LIMITS
        ),
    ] = False
    max_unsent_bytes: Annotated[
        Positive,
        Meta(
            description="Most bytes of all answers that clients have not read yet; beyond, large answers wait, then are a 503.",
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
        Positive, Meta(description="Most bytes of the payloads that a /search finds, as JSON.", extra=LIMITS)
    ] = 16_000_000
    payload_limit: Annotated[Positive, Meta(description="Most bytes in a request body.", extra=LIMITS)] = 2_000_000
    header_limit: Annotated[
        Positive, Meta(description="Most bytes in the head of a request: its URL and headers.", extra=LIMITS)
    ] = 65_536
    header_timeout: Annotated[
        Seconds,
        Meta(description="Longest time until the head of a request has arrived, then 408; 0: no limit.", extra=LIMITS),
    ] = 60.0
    body_timeout: Annotated[
        Seconds,
        Meta(
            description="Longest time that a body may stand still or be slower than 1000 bytes/s, then 408; 0: no limit.",
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
            description="File of further keys: a line `NAME:KEY` for each, or `NAME roles=infer,search:KEY` for a key that "
            "may do only that; read again on SIGHUP. Names are counted and logged.",
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
            description="Origin whose pages may call; repeatable [default: any; without a key no other origin may write].",
            extra=SECURITY,
        ),
    ] = ()
    json_output: Annotated[bool, Meta(description="Log as JSON, one object a line.", extra=OBSERVABILITY)] = False
    log_format: Annotated[
        Literal["text", "json"],
        Meta(
            description="Lines of the log: text, or JSON objects, which at start have their `facts` for programs. "
            "--json-output is TEI's word for json, with all settings in the first line.",
            extra=OBSERVABILITY,
        ),
    ] = "text"
    disable_spans: Annotated[bool, Meta(description="Leave spans out of JSON logs.", extra=OBSERVABILITY)] = False
    log_level: Annotated[
        str,
        Meta(
            description="Least severe log lines to print: error, warn, info, debug or off; for a part of the program "
            "'warn,hybridtei.inference.engine=debug', as in tracing filters. An unreadable value means info.",
            extra=OBSERVABILITY,
        ),
    ] = "info"
    prometheus_port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None,
        Meta(
            description="Port for /metrics alone; the main port serves it too [default: none; TEI's 9000 is not opened].",
            extra=OBSERVABILITY,
        ),
    ] = None
    otlp_endpoint: Annotated[
        str | None,
        Meta(description="OTLP collector that receives traces over gRPC, such as http://localhost:4317.", extra=OBSERVABILITY),
    ] = None
    otlp_service_name: Annotated[str, Meta(description="`service.name` of traces.", extra=OBSERVABILITY)] = (
        "text-embeddings-inference.server"
    )


class StoreConfig(Struct, frozen=True, kw_only=True):
    """The vector store: a Qdrant server, a folder of the embedded engine, or none."""

    qdrant_url: Annotated[str | None, Meta(description="Qdrant server, or a cluster's nodes: http://a:6334,http://b:6334.")] = (
        None
    )
    qdrant_path: Annotated[str | None, Meta(description="Folder of the embedded Qdrant engine.")] = None
    qdrant_api_key: Annotated[str | None, Meta(description="Key for the Qdrant server.", extra=NEVER_SHOWN)] = None
    qdrant_rest_port: Annotated[
        Annotated[int, Meta(ge=1, le=65535)] | None,
        Meta(
            description="REST port of servers given as grpc://host:port, to ask for the number of nodes [default: 6333 for "
            "port 6334, else none]."
        ),
    ] = None
    qdrant_timeout: Annotated[float, Meta(gt=0, le=3600, description="Longest time of one call to Qdrant.")] = 30.0
    qdrant_patience: Annotated[
        Seconds,
        Meta(description="How long `ingest` and other commands repeat a call while Qdrant is away; /search does not."),
    ] = 60.0


def check_value(name: str, value: Any, hint: Any, error: type[HybridTeiError] = InvalidInput) -> None:
    """Raise `error` if a value that a caller in Python gave is not of the annotated type; the message names the field, the
    value and the type. NumPy's numbers count as Python's."""
    try:
        msgspec.convert(value.item() if hasattr(value, "item") else value, hint)
    except msgspec.ValidationError as wrong:
        choices = [part for part in (unwrapped(hint)[0], *get_args(hint)) if get_origin(part) is Literal]
        known = f"; known: {', '.join(map(str, get_args(choices[0])))}" if choices else ""
        raise error(f"`{name}` is {reprlib.repr(value)}: {str(wrong)[:1].lower()}{str(wrong)[1:]}{known}") from None


def fields_of(kind: Kind) -> Iterator[tuple[msgspec.structs.FieldInfo, Any, Meta]]:
    """(field, its type without None, its Meta) of a settings struct."""
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
