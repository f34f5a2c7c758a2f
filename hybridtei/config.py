"""Settings, one frozen struct for each part of the program. Flags, variables, help and bounds come
from these fields.

`cli` reads values once: a flag overrides a variable, a variable overrides the default. A
checkpoint's own facts are not
settings: `checkpoint.spec.ModelSpec` has them.
"""

from __future__ import annotations

import types
import typing
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

EMBEDDED_MODEL = "minilm-hybrid"

Kind = type[msgspec.Struct]

ModelRole = Literal["embed", "rerank", "classify", "tag"]
Dtype = Literal["float16", "float32", "bfloat16", "int8", "fp8"]
MultivectorDtype = Literal["float", "int8", "binary"]
LongInputs = Literal["cut", "mean"]
PoolingFlag = Literal["cls", "mean", "splade", "last-token"]
BackendName = Literal["auto", "torch", "ort", "openvino"]
Gelu = Literal["checkpoint", "tanh"]
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0, le=86400)]
# In a field's annotation
META = ("ge", "le", "gt", "lt", "description", "extra")


def flag(description: str, group: str | None = None, **details: Any) -> Meta:
    """Return a field's metadata for the help. `group`: its heading, default: the struct's.
    `details`: bounds. `shown`: how much the log may show, "partly" or "never". `alias`: its older
    name. `metavar`: its placeholder."""
    bounds = {name: value for name, value in details.items() if name in META}
    extra = {
        name: value
        for name, value in {**details, "group": group}.items()
        if name not in META and value is not None
    }
    return Meta(description=description, extra=extra or None, **bounds)


class ModelConfig(Struct, frozen=True, kw_only=True):
    """Settings for finding and loading a model."""

    model_id: Annotated[
        str,
        flag("Model to serve: a local folder, a hub id, or the embedded model.", shown="partly"),
    ] = EMBEDDED_MODEL
    revision: Annotated[str | None, flag("Branch, tag, commit or refs/pr/N on the hub.", "hub")] = (
        None
    )
    dtype: Annotated[
        Dtype | None,
        flag("Precision of weights and activations [default: float32 on CPU, half on GPU]."),
    ] = None
    pooling: Annotated[
        PoolingFlag | None, flag("Pooling to use instead of the one the model declares.")
    ] = None
    dense_path: Annotated[
        str | None, flag("Folder of the Dense module to use instead of the one in modules.json.")
    ] = None
    backend: Annotated[
        BackendName,
        flag(
            "Backend that runs the model; auto: the first one that can run it. The log gives the "
            "reason."
        ),
    ] = "auto"
    packed_cache_gb: Annotated[
        float,
        flag(
            "Most gigabytes of packed weights in the cache folder, at "
            "most half of the free space; 0: keep none for the next start.",
            ge=0,
            metavar="GB",
        ),
    ] = 10.0
    quantization_ranges: Annotated[
        str | None,
        flag("File (.npy, .npz) with the range of each dimension, for int8 and uint8 vectors."),
    ] = None
    multivector_tokens: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        flag(
            "Merge the vectors of a document's tokens to at most this number; 0: do not merge "
            "[default: 0]."
        ),
    ] = None
    multivector_dtype: Annotated[
        MultivectorDtype | None,
        flag("Numbers of these vectors; binary: one bit each, the sign [default: float]."),
    ] = None
    gelu: Annotated[
        Gelu,
        flag("GELU as the checkpoint has it, or TEI's tanh form, to match vectors that TEI made."),
    ] = "checkpoint"
    hf_token: Annotated[
        str | None,
        flag(
            "Token for the hub [default: the token file of the hub cache].",
            "hub",
            shown="partly",
            alias="hf_api_token",
        ),
    ] = None
    huggingface_hub_cache: Annotated[
        str | None, flag("Folder of the hub cache [default: the hub's own].", "hub")
    ] = None
    offline: Annotated[bool, flag("Never ask the hub; use only files of the cache.", "hub")] = False
    trust_remote_code: Annotated[
        bool,
        flag(
            "Run Python code that comes with the model; else such models are refused.", "security"
        ),
    ] = False


class NamedModel(ModelConfig, frozen=True, kw_only=True):
    """One of several models in a process. These settings have no flags, and no variables, since
    ROLE and ALIAS usually belong to other programs."""

    alias: Annotated[str, flag("Name of the model in requests, and under /m/ALIAS/.")]
    role: Annotated[ModelRole | None, flag("The model's only task, if it can do several.")] = None


class EngineConfig(Struct, frozen=True, kw_only=True):
    """Limits, batching and inputs of the engine."""

    max_concurrent_requests: Annotated[
        Positive,
        flag(
            "Permits: most inputs inside the server at the same time; further inputs are refused "
            "with 429. On a GPU the default is higher: as many 16-token texts as fill all running "
            "passes.",
            "limits",
        ),
    ] = 512
    max_batch_tokens: Annotated[
        Positive, flag("Most tokens in one forward pass; also caps the input length.", "limits")
    ] = 16384
    max_batch_requests: Annotated[
        Positive | None, flag("Most inputs in one forward pass.", "limits")
    ] = None
    max_answer_bytes: Annotated[
        Positive, flag("Most bytes of an answer with a vector for each token, as JSON.", "limits")
    ] = 256_000_000
    request_timeout: Annotated[
        Seconds,
        flag(
            "Longest time from permit to answer of a request's inputs, then 503; 0: no limit.",
            "limits",
        ),
    ] = 600.0
    pass_timeout: Annotated[
        Seconds,
        flag(
            "Longest time of a forward pass; then its requests fail, and /health is 503; 0: no "
            "limit.",
            "limits",
        ),
    ] = 300.0
    bulk_niceness: Annotated[
        int,
        flag(
            "Niceness of the threads for long inputs and large requests: short ones run first.",
            ge=0,
            le=19,
        ),
    ] = 10
    memory_fraction: Annotated[
        float,
        flag(
            "Share of a GPU's memory that passes may use, of what the loaded model leaves free.",
            "limits",
            gt=0,
            le=1,
        ),
    ] = 0.9
    embedding_cache_mb: Annotated[
        int, flag("Megabytes of memory for results of earlier inputs; 0: none are kept.", ge=0)
    ] = 0
    tokenization_workers: Annotated[
        Annotated[int, Meta(ge=1, le=64)] | None,
        flag("Tokenizer threads [default: processors minus one]."),
    ] = None
    auto_truncate: Annotated[
        bool, flag("Cut inputs that are too long, unless a request says otherwise.", "inputs")
    ] = True
    default_prompt: Annotated[
        str | None, flag("Text put before every input; excludes --default-prompt-name.", "inputs")
    ] = None
    default_prompt_name: Annotated[
        str | None,
        flag(
            "Name of the model's prompt put before every input, and of its adapter; excludes "
            "--default-prompt.",
            "inputs",
        ),
    ] = None
    use_default_prompt: Annotated[
        bool,
        flag(
            "Put the checkpoint's own default prompt before inputs of TEI's routes too; TEI "
            "leaves it out.",
            "inputs",
        ),
    ] = False


class ServerConfig(Struct, frozen=True, kw_only=True):
    """The HTTP and gRPC servers: addresses, limits, keys, answers and logs."""

    hostname: Annotated[
        str,
        flag(
            "IP address of all ports. With an API key, and for text-embeddings-router, the "
            "default is 0.0.0.0. A host name is ignored: containers export theirs as HOSTNAME."
        ),
    ] = "127.0.0.1"
    port: Annotated[int, flag("Port to listen on.", ge=0, le=65535)] = 3000
    grpc_port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None,
        flag("Port for gRPC, TEI's tei.v1, beside HTTP."),
    ] = None
    reuse_port: Annotated[
        bool,
        flag(
            "Let several servers share --port and --grpc-port; the kernel spreads connections over "
            "them."
        ),
    ] = False
    engine_process: Annotated[
        bool | None,
        flag(
            "Run the models in a separate process, which the server restarts "
            "when it ends [default: on if torch finds an NVIDIA device]."
        ),
    ] = None
    idle_unload: Annotated[
        Seconds,
        flag(
            "Seconds without a request after which the engine's process ends, and frees the memory "
            "of its models; the next request waits until it has started again. 0: it stays."
        ),
    ] = 0
    drain_delay: Annotated[
        float,
        flag(
            "How long a stopping server still takes requests, while /health answers 503, so that "
            "proxies can turn to other servers first.",
            ge=0,
            le=86400,
        ),
    ] = 0.0
    drain_seconds: Annotated[
        float, flag("How long a stopping server waits for open requests.", ge=0, le=86400)
    ] = 30.0
    uds_path: Annotated[
        str, flag("Accepted and ignored: TEI's socket between router and Python backend.")
    ] = "/tmp/text-embeddings-inference-server"
    served_model_name: Annotated[
        str | None, flag("Name in answers and /info [default: the model id].", "answers")
    ] = None
    rerank_documents_as: Annotated[
        Literal["object", "string"],
        flag(
            "Form of `documents` in answers of /rerank: {text}, for vLLM's clients, or strings, "
            "for infinity's.",
            "answers",
        ),
    ] = "object"
    classify_as: Annotated[
        Literal["infinity", "vllm"],
        flag("Form of answers of /classify; /v1/classify always answers as vLLM.", "answers"),
    ] = "infinity"
    only_tei_routes: Annotated[
        bool, flag("Serve TEI's routes and no others: any other path is a 404.", "answers")
    ] = False
    tei_face: Annotated[
        bool,
        flag(
            "Answer exactly as TEI on the paths that other APIs have too, such as /rerank. With "
            "--only-tei-routes, and for text-embeddings-router, the default is true.",
            "answers",
        ),
    ] = False
    task: Annotated[
        str | None, flag("'sentence-similarity' makes POST / answer as /similarity.", "answers")
    ] = None
    max_client_batch_size: Annotated[Positive, flag("Most inputs in a TEI request.", "limits")] = 32
    split_large_batches: Annotated[
        bool,
        flag(
            "Split TEI's requests above --max-client-batch-size instead of refusing them.",
            "limits",
        ),
    ] = False
    max_split_texts: Annotated[
        Positive,
        flag(
            "Most texts of a request to an API other than TEI's; the server splits requests.",
            "limits",
        ),
    ] = 2048
    max_unsent_bytes: Annotated[
        Positive,
        flag(
            "Most bytes of all answers that clients have not read yet; then large answers wait, "
            "and later get 503.",
            "limits",
        ),
    ] = 256_000_000
    max_rerank_documents: Annotated[
        Positive, flag("Most documents in one request that ranks them.", "limits")
    ] = 10_000
    rerank_windows: Annotated[
        Positive,
        flag(
            "Most windows in which a reranker reads a document that is too long for the model; "
            "the best window gives the score. 1: cut the document.",
            "limits",
        ),
    ] = 1
    long_inputs: Annotated[
        LongInputs,
        flag(
            "How a text that is too long for the model is embedded: cut; or mean: read in windows, "
            "whose vectors are averaged by tokens.",
            "inputs",
        ),
    ] = "cut"
    # Of 32 queries, 100 each
    max_search_points: Annotated[
        int,
        flag(
            "Most candidates of one /search: queries x the largest of `prefetch_limit`, "
            "`rerank_limit`, `offset` + `limit`.",
            "limits",
            ge=1,
            le=100_000,
        ),
    ] = 3_200
    max_search_bytes: Annotated[
        Positive, flag("Most bytes of the payloads that a /search finds, as JSON.", "limits")
    ] = 16_000_000
    payload_limit: Annotated[Positive, flag("Most bytes in a request body.", "limits")] = 2_000_000
    header_limit: Annotated[
        Positive, flag("Most bytes in the head of a request: its URL and headers.", "limits")
    ] = 65_536
    keep_alive_timeout: Annotated[
        int,
        flag(
            "Seconds that an idle connection stays open after an answer.", "limits", ge=1, le=3600
        ),
    ] = 120
    header_timeout: Annotated[
        Seconds,
        flag(
            "Longest time until the head of a request has arrived, then 408; 0: no limit.", "limits"
        ),
    ] = 60.0
    body_timeout: Annotated[
        Seconds,
        flag(
            "Longest time that a body may stand still or be slower than 1000 bytes/s, then 408; "
            "0: no limit.",
            "limits",
        ),
    ] = 60.0
    max_connections: Annotated[
        Positive,
        flag("Most open connections; further connections are answered 503 and closed.", "limits"),
    ] = 8192
    api_key: Annotated[
        str | None,
        flag(
            "Key that requests must carry as 'Authorization: Bearer KEY'.",
            "security",
            shown="never",
        ),
    ] = None
    api_key_file: Annotated[
        str | None,
        flag(
            "File of further keys: a line `NAME:KEY` for each, or `NAME roles=infer,search:KEY` "
            "for a key of these roles; read again on SIGHUP. Log and metrics show the names.",
            "security",
        ),
    ] = None
    certfile: Annotated[
        str | None,
        flag(
            "PEM file of the server's certificate and its chain: HTTP and gRPC over TLS.",
            "security",
        ),
    ] = None
    keyfile: Annotated[
        str | None,
        flag("PEM file of the certificate's private key, without a password.", "security"),
    ] = None
    cors_allow_origin: Annotated[
        tuple[str, ...],
        flag(
            "Origin whose pages may call; repeatable [default: any; without a key no other origin "
            "may use collections].",
            "security",
        ),
    ] = ()
    allowed_host: Annotated[
        tuple[str, ...],
        flag(
            "Public host name under which a server without keys offers its collections; "
            "repeatable [default: addresses and local names].",
            "security",
        ),
    ] = ()
    json_output: Annotated[bool, flag("Log as JSON, one object a line.", "observability")] = False
    log_format: Annotated[
        Literal["text", "json"],
        flag(
            "Lines of the log: text, or JSON objects, which at start have their `facts` for "
            "programs. --json-output is TEI's word for json, with all settings in the first line.",
            "observability",
        ),
    ] = "text"
    disable_spans: Annotated[bool, flag("Leave spans out of JSON logs.", "observability")] = False
    log_level: Annotated[
        str,
        flag(
            "Least severe log lines to print: error, warn, info, debug or off; for a part of the "
            "program 'warn,hybridtei.inference.engine=debug', as in tracing filters. An "
            "unreadable value means info.",
            "observability",
        ),
    ] = "info"
    prometheus_port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None,
        flag(
            "Port for /metrics alone; the main port serves it too [default: none; TEI's 9000 is "
            "not opened].",
            "observability",
        ),
    ] = None
    otlp_endpoint: Annotated[
        str | None,
        flag(
            "OTLP collector that receives traces over gRPC, such as http://localhost:4317.",
            "observability",
            shown="url",
        ),
    ] = None
    otlp_service_name: Annotated[str, flag("`service.name` of traces.", "observability")] = (
        "text-embeddings-inference.server"
    )

    @property
    def as_tei(self) -> bool:
        """True if the server answers exactly as TEI does on the paths that other APIs have too,
        such as `/rerank`."""
        return self.tei_face or self.only_tei_routes


class StoreConfig(Struct, frozen=True, kw_only=True):
    """The vector store: a Qdrant server, a folder of the embedded engine, or none."""

    qdrant_url: Annotated[
        str | None,
        flag("Qdrant server, or a cluster's nodes: http://a:6334,http://b:6334.", shown="url"),
    ] = None
    qdrant_path: Annotated[str | None, flag("Folder of the embedded Qdrant engine.")] = None
    qdrant_api_key: Annotated[str | None, flag("Key for the Qdrant server.", shown="never")] = None
    qdrant_rest_port: Annotated[
        Annotated[int, Meta(ge=1, le=65535)] | None,
        flag(
            "REST port of servers given as grpc://host:port, to ask for the number of nodes "
            "[default: 6333 for port 6334, else none]."
        ),
    ] = None
    qdrant_timeout: Annotated[float, flag("Longest time of one call to Qdrant.", gt=0, le=3600)] = (
        30.0
    )
    qdrant_patience: Annotated[
        Seconds,
        flag(
            "How long `ingest` and other commands repeat a call while Qdrant is unreachable. A "
            "server does not wait so long: then its /search fails within two seconds."
        ),
    ] = 60.0


# Former names of keywords and flags -> what to write instead
@cache
def fields_of(kind: Kind) -> tuple[tuple[msgspec.structs.FieldInfo, Any, Meta], ...]:
    """(field, its type without None, its Meta) of each field of a settings struct."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return tuple((field, *unwrapped(hints[field.name])) for field in msgspec.structs.fields(kind))


def unwrapped(hint: Any) -> tuple[Any, Meta]:
    """A field's annotation -> (type without None, its Meta, bounds of nested annotations merged
    in)."""
    bounds: dict[str, Any] = {}
    while True:
        if get_origin(hint) is typing.Annotated:
            hint, *metas = get_args(hint)
            for meta in metas:
                bounds = {
                    name: value for name in META if (value := getattr(meta, name)) is not None
                } | bounds
        elif get_origin(hint) in (types.UnionType, typing.Union):
            hint = next(part for part in get_args(hint) if part is not type(None))
        else:
            return hint, Meta(**bounds)
