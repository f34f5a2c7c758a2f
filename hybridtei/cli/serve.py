"""`serve`: one model or several over HTTP. `text-embeddings-router` is the same command under TEI's
name."""

from __future__ import annotations

import argparse
import ipaddress
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from hybridtei.cli.flags import (
    Commands,
    add_flags,
    is_set,
    new_parser,
    outdated,
    read_engine,
    read_settings,
)
from hybridtei.config import EngineConfig, ModelConfig, ServerConfig, StoreConfig
from hybridtei.errors import LoadError, UsageError
from hybridtei.system import memory
from hybridtei.system.logs import described
from hybridtei.system.machine import require_unix

EVERYWHERE, THIS_MACHINE = "0.0.0.0", "127.0.0.1"

log = logging.getLogger("hybridtei")


def add(commands: Commands) -> None:
    add_serve_flags(new_parser(commands, "serve", run))


def add_serve_flags(parser: argparse.ArgumentParser, *, as_tei: bool = False) -> None:
    """Add the flags of `serve` to a parser. `as_tei`: begin the log with all settings, as TEI
    does."""
    parser.usage = "%(prog)s [--model-id MODEL]... [flags]"
    parser.add_argument(
        "--models",
        metavar="FILE",
        help="TOML file of [[model]] tables: several models in one process",
    )
    parser.epilog = (
        "--model-id may be repeated. Every flag may also be given as the variable shown after it; "
        "the flag wins."
    )
    add_flags(
        parser, (ModelConfig, EngineConfig, ServerConfig, StoreConfig), repeatable=("model_id",)
    )
    parser.set_defaults(run=run, as_tei=as_tei)


def run(arguments: argparse.Namespace) -> None:
    """Serve a model over HTTP: dense, sparse and multi-vectors, ranking, classification; TEI's
    flags, variables and routes."""
    require_unix("`hybridtei serve`")
    model_ids: list[str] = arguments.model_id or []
    arguments.model_id = model_ids[0] if model_ids else None
    model, engine = read_settings(arguments, ModelConfig), read_engine(arguments)
    server, store = read_settings(arguments, ServerConfig), read_settings(arguments, StoreConfig)
    server, warnings = with_opentelemetry(server, arguments, os.environ)
    check(server, arguments.models, model_ids)
    # Before any thread starts, including threads that imports start
    memory.limit_heaps()
    from hybridtei.server import start
    from hybridtei.system import logs, tracing

    is_json = server.json_output or server.log_format == "json"
    logs.configure(json_output=is_json, level=server.log_level, spans=not server.disable_spans)
    as_tei = arguments.as_tei or server.only_tei_routes or server.json_output
    settings = described(
        (model, engine, server, store),
        models=arguments.models,
        model_id=model_ids if len(model_ids) > 1 else model.model_id,
    )
    log.log(logging.INFO if as_tei else logging.DEBUG, "%s", settings)
    for line in (*outdated(vars(arguments), os.environ), *warnings):
        log.warning("%s", line)
    hostname, why = address(server, is_given=is_set("hostname", arguments), as_tei=arguments.as_tei)
    log.info("address  %s: %s", hostname, why, extra={"facts": {"address": hostname}})
    tei_face = server.tei_face or (arguments.as_tei and not is_set("tei_face", arguments))
    server = msgspec.structs.replace(server, hostname=hostname, tei_face=tei_face)
    if server.otlp_endpoint is not None:
        # Before the models are loaded, which may take minutes
        tracing.require()
    fixed_permits = is_set("max_concurrent_requests", arguments)
    named: StoreConfig | None = store
    if store.qdrant_url is None and store.qdrant_path is None:
        named = None
    if arguments.models is None and len(model_ids) < 2:
        start.serve([model], engine, server, named, fixed_permits=fixed_permits)
        return
    from hybridtei.inference.load import from_ids, read_models

    models = (
        from_ids(model_ids, model)
        if arguments.models is None
        else read_models(Path(arguments.models), model)
    )
    start.serve(models, engine, server, named, model, fixed_permits=fixed_permits)


# Fields -> OpenTelemetry's variables for them, the first before the others
OTEL = {
    "otlp_endpoint": ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"),
    "otlp_service_name": ("OTEL_SERVICE_NAME",),
}
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def with_opentelemetry(
    server: ServerConfig, arguments: argparse.Namespace, environment: Mapping[str, str]
) -> tuple[ServerConfig, list[str]]:
    """The settings with OpenTelemetry's variables in place of flags that are not given, and what to
    warn of. Clusters set these variables for all programs, so none of them stops the server."""
    values: dict[str, Any] = {}
    for field, names in OTEL.items():
        for name in names:
            if environment.get(name) and not is_set(field, arguments):
                values.setdefault(field, environment[name])
    from hybridtei.system import tracing

    warnings = []
    if "otlp_endpoint" in values:
        protocols = [environment[name] for name in PROTOCOLS if environment.get(name)]
        try:
            tracing.require()
            if protocols[:1] not in ([], ["grpc"]):
                raise LoadError(f"this server sends traces by gRPC, not by {protocols[0]}")
        except LoadError as error:
            warnings.append(f"{OTEL['otlp_endpoint'][1]} is ignored: {error}")
            del values["otlp_endpoint"]
    return msgspec.structs.replace(server, **values), warnings


def check(server: ServerConfig, models_file: str | None, model_ids: Sequence[str]) -> None:
    """Raises UsageError for settings that exclude each other."""
    if models_file is not None and model_ids:
        raise UsageError("--models and --model-id exclude each other: name every model in the file")
    if models_file is not None or len(model_ids) > 1:
        if server.only_tei_routes:
            raise UsageError(
                "--only-tei-routes: TEI's routes serve one model; leave it out, or serve one model"
            )
        if server.served_model_name is not None:
            raise UsageError(
                "--served-model-name names a single model; name several models by the `alias` of "
                "each table"
            )
    ports = {
        "--port": server.port,
        "--grpc-port": server.grpc_port,
        "--prometheus-port": server.prometheus_port,
    }
    taken: dict[int, str] = {}
    for flag, port in ports.items():
        if port and taken.setdefault(port, flag) != flag:
            raise UsageError(f"{flag}: {port} is already the port of {taken[port]}")
    if "@" in (server.otlp_endpoint or ""):
        raise UsageError(
            "--otlp-endpoint holds a user or password, which gRPC does not send: set "
            "OTEL_EXPORTER_OTLP_HEADERS"
        )
    if (server.certfile is None) != (server.keyfile is None):
        raise UsageError(
            "--certfile and --keyfile: one is given without the other; give both, or neither"
        )
    check_key(server.api_key)


def check_key(key: str | None) -> None:
    """Raises UsageError for a key that no client can send."""
    # Imported late, with the framework
    from hybridtei.server.http.security import is_sendable

    if key is not None and not is_sendable(key):
        raise UsageError(
            "--api-key: no header can carry this key; it should be printable ASCII without a space "
            "at either end"
        )


def address(server: ServerConfig, *, is_given: bool, as_tei: bool) -> tuple[str, str]:
    """Return the address of all ports, and the reason for it: the given address; else all
    interfaces, as TEI or with a key; else localhost. A host name is ignored. The container's own
    name, which containers export as HOSTNAME, is ignored without a warning.
    """
    if is_given:
        with suppress(ValueError):
            return str(ipaddress.ip_address(server.hostname)), "as --hostname or HOSTNAME says"
        if server.hostname != socket.gethostname():
            log.warning(
                "--hostname or HOSTNAME: %r is not an IP address, and is ignored", server.hostname
            )
    if as_tei:
        return EVERYWHERE, "as TEI does"
    if server.api_key is not None or server.api_key_file is not None:
        return EVERYWHERE, "requests need an API key"
    return (
        THIS_MACHINE,
        "no API key is set, so other machines cannot connect; --api-key or --hostname "
        f"{EVERYWHERE} lets them",
    )
