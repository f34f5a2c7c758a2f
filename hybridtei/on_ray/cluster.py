"""How to join a Ray cluster, and the Ray Serve application that scales with the tokens that wait.

`ray.init()` without an address joins whatever cluster was last started on the machine; `join` does so only for an address or
RAY_ADDRESS, and otherwise starts a cluster that lasts as long as it is needed.

Each Serve replica is the whole server, so every route and every answer is the same as without Ray; gRPC and the metrics port
are missing, since Serve listens and not the replica. Serve lets five requests into a replica by default and keeps the rest
where nobody counts their tokens; here as many go in as the engine has permits for, and the engine refuses the rest.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Mapping
from math import ceil
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from hybridtei.config import EngineConfig, ModelConfig, Positive, Seconds, ServerConfig
from hybridtei.errors import InvalidInput
from hybridtei.system.machine import GRANTED, require_extra

LOCAL = "local"
REACH_S = 10.0


def join(address: str | None, processors: int) -> Callable[[], None]:
    """Join a cluster, or start one of so many processors; what is returned leaves it again. Call it from the main thread.

    `address`: None takes RAY_ADDRESS, and without that a cluster of our own. One that was joined before is left as it is.
    Raises LoadError without Ray, ConnectionError where nothing answers.
    """
    require_extra("ray", "ray")
    import ray

    if ray.is_initialized():
        return lambda: None
    address = address or os.environ.get("RAY_ADDRESS") or LOCAL
    _reach(address)
    own: dict[str, Any] = {"num_cpus": processors, "include_dashboard": False} if address == LOCAL else {}
    try:
        ray.init(address=address, job_config=_isolated(), log_to_driver=False, logging_level=logging.ERROR, **own)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConnectionError(f"Ray at {address}: {error}") from error
    leave: Callable[[], None] = ray.shutdown
    return leave


def _isolated() -> Any:
    """Settings of a job whose processes do not search the driver's working folder for modules, before all others at that.

    Ray leaves it out for jobs of its client only, and has no public word for that.
    """
    from ray.job_config import JobConfig

    return JobConfig(_client_job=True)


def _reach(address: str) -> None:
    """Raises ConnectionError where nothing listens: Ray would try for minutes, and then end the process."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S).close()
    except (OSError, OverflowError) as error:
        raise ConnectionError(f"Ray at {address}: {error}") from error


def limit_threads(processors: int) -> None:
    """Limits this process to so many threads, which Ray does not."""
    from threadpoolctl import threadpool_limits

    os.environ[GRANTED] = str(processors)
    os.environ["RAYON_NUM_THREADS"] = str(processors)  # the tokenizer's
    threadpool_limits(limits=processors)


WAITING_TOKENS = "hybridtei_queue_tokens"  # as in /metrics


def wanted_replicas(waiting_tokens: float, requests: float, running: int, tokens_per_replica: int) -> int:
    """Replicas for so many tokens that wait in all engines, and so many requests that are inside; at least 1.

    A replica that works on a request is kept, and no request keeps more than one.
    """
    needed = ceil(waiting_tokens / tokens_per_replica)
    return max(1, needed, min(running, ceil(requests)))


class QueuedTokens:
    """A policy for Serve's `AutoscalingConfig`; it keeps to the bounds and delays that are set there."""

    def __init__(self, tokens_per_replica: int) -> None:
        self._tokens_per_replica = tokens_per_replica

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """(replicas, nothing to remember) from Serve's `AutoscalingContext`."""
        waiting = sum((context.aggregated_metrics or {}).get(WAITING_TOKENS, {}).values())
        running = context.current_num_replicas
        return wanted_replicas(waiting, context.total_num_requests, running, self._tokens_per_replica), {}


TOKENS_PER_REPLICA = 16_384  # a few seconds' work of a processor
INTERVAL_S, LOOK_BACK_S = 1.0, 5.0  # between two readings of a queue; of which the mean is taken
SERVES_OWN = frozenset(
    {"hostname", "port", "grpc_port", "reuse_port", "uds_path", "header_limit", "header_timeout", "max_connections"}
    | {"certfile", "engine_process", "keyfile", "prometheus_port"}
)  # whoever listens has these, and that is Serve's proxy


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """How many replicas, and how large. `tokens_per_replica`: that may wait for each before there should be one more."""

    min_replicas: Positive = 1
    max_replicas: Positive = 4
    tokens_per_replica: Positive = TOKENS_PER_REPLICA
    processors: Positive = 1
    gpus: Annotated[float, Meta(ge=0)] = 0.0
    upscale_delay_s: Seconds = 5.0
    downscale_delay_s: Seconds = 120.0


class Replica:
    """One engine, and the application in front of it."""

    def __init__(self, model: ModelConfig, engine: EngineConfig, server: ServerConfig, processors: int) -> None:
        limit_threads(processors)  # before anything counts them
        from hybridtei.engine.service import EngineService
        from hybridtei.load import load_model
        from hybridtei.observability.metrics import Registry
        from hybridtei.server.app import create_app

        loaded = load_model(model, engine)
        self._registry = registry = Registry()
        self._service = EngineService(
            loaded.model, loaded.backend, engine, budget_tokens=loaded.budget_tokens, registry=registry
        )
        self._application = create_app(self._service, server, model, registry=registry)

    def __serve_build_asgi_app__(self) -> Any:
        """The application, which Serve starts and stops."""
        return self._application

    def record_autoscaling_stats(self) -> dict[str, float]:
        """The metrics of Serve's autoscaling policy."""
        return {one.name: one.values[""] for one in self._registry.readings() if one.name == WAITING_TOKENS}

    async def check_health(self) -> None:
        """Raises Unhealthy where Serve should replace this replica."""
        await self._service.check_health()


def application(settings: dict[str, Any]) -> Any:
    """A Serve application of one model, as `hybridtei.on_ray:application` in Serve's files, or `serve.run(application({...}))`.

    `settings`: the fields of `ModelConfig`, `EngineConfig`, `ServerConfig` and `Scale`, by name. Raises LoadError without Ray,
    InvalidInput for a name that nobody knows, that Serve decides, or whose value is out of bounds.
    """
    require_extra("ray", "ray")
    from ray import serve
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

    model, engine, server, scale = configs_from(settings)
    deployment = serve.deployment(
        name="hybridtei",
        max_ongoing_requests=engine.max_concurrent_requests,
        ray_actor_options={"num_cpus": scale.processors, "num_gpus": scale.gpus},
        graceful_shutdown_timeout_s=server.drain_seconds,
        autoscaling_config=AutoscalingConfig(
            min_replicas=scale.min_replicas,
            max_replicas=scale.max_replicas,
            upscale_delay_s=scale.upscale_delay_s,
            downscale_delay_s=scale.downscale_delay_s,
            metrics_interval_s=INTERVAL_S,
            look_back_period_s=LOOK_BACK_S,
            policy=AutoscalingPolicy(
                policy_function=QueuedTokens, policy_kwargs={"tokens_per_replica": scale.tokens_per_replica}
            ),
        ),
    )
    return deployment(serve.ingress()(Replica)).bind(model, engine, server, scale.processors)


def configs_from(settings: Mapping[str, Any]) -> tuple[ModelConfig, EngineConfig, ServerConfig, Scale]:
    """Settings by name, to whom they belong. Raises InvalidInput."""
    kinds = (ModelConfig, EngineConfig, ServerConfig, Scale)
    known = {name for kind in kinds for name in kind.__struct_fields__} - SERVES_OWN
    for name in settings:
        if name not in known:
            why = "is for Ray Serve to decide" if name in SERVES_OWN else "is no setting of hybridtei's"
            raise InvalidInput(f"`{name}` {why}")
    model, engine, server, scale = (_part(settings, kind) for kind in kinds)
    if scale.min_replicas > scale.max_replicas:
        raise InvalidInput(f"`min_replicas` is {scale.min_replicas}, should be at most `max_replicas`, {scale.max_replicas}")
    return model, engine, server, scale


def _part(settings: Mapping[str, Any], kind: type[Any]) -> Any:
    try:
        return msgspec.convert({name: settings[name] for name in kind.__struct_fields__ if name in settings}, kind)
    except msgspec.ValidationError as error:
        raise InvalidInput(str(error)) from None
