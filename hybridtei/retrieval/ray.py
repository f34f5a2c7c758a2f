"""A Ray cluster that embeds by actors with an `Encoder` each. Needs the extra `ray`.

The ingest reads, cuts and stores in its own process. It sends batches to idle actors, which return
vectors. If an actor's process ends, Ray starts it again with the same batch. A text that ends its
process is found by halving the batch, like a text that fails (`pipeline.embed_each`).
"""

from __future__ import annotations

import logging
import os
import queue
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hybridtei.config import EngineConfig, ModelConfig
from hybridtei.errors import BackendError, InvalidInput
from hybridtei.options import Output
from hybridtei.outputs import Embeddings
from hybridtei.system.machine import GRANTED, available_cores, require_extra

MAX_WORKERS = 10_000
LOCAL = "local"
REACH_S = 10.0
# Tries of a batch, since a process can end without a text's fault
TRIES = 3


def check(workers: int | None) -> None:
    """Raises InvalidInput if the number of workers is out of bounds, LoadError without Ray."""
    if workers is not None and not 1 <= workers <= MAX_WORKERS:
        raise InvalidInput(f"--ray-workers is {workers}, should be between 1 and {MAX_WORKERS}")
    require_extra("ray", "ray")


class RayEmbedder:
    """`workers` actors with one processor each. Default: one for each processor of the cluster.

    Create it in the main thread. `parallel` threads may call `encode` at once. Raises InvalidInput,
    LoadError without Ray, ConnectionError if no cluster answers.
    """

    def __init__(
        self,
        model: ModelConfig,
        engine: EngineConfig,
        *,
        workers: int | None = None,
        address: str | None = None,
    ) -> None:
        check(workers)
        import ray

        self._leave = join(address, workers or available_cores())
        self.parallel = workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        self.name = f"Ray, {self.parallel} workers of one processor"
        worker = ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=TRIES - 1)(Worker)
        self._idle: queue.Queue[Any] = queue.Queue()
        for _ in range(self.parallel):
            self._idle.put(worker.remote(model, engine))

    def encode(self, texts: Sequence[str], outputs: Iterable[str], **settings: Any) -> Embeddings:
        """Like `Encoder.encode`. Raises its errors, and BackendError if the worker's process ended
        `TRIES` times."""
        import ray

        actor = self._idle.get()
        try:
            embedded: Embeddings = ray.get(
                actor.encode.remote(list(texts), sorted(outputs), settings)
            )
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except ray.exceptions.RayError as error:
            raise BackendError(f"Ray: {error}".splitlines()[0]) from error
        finally:
            self._idle.put(actor)
        return embedded

    def close(self) -> None:
        """Leave the cluster. A cluster that this object started ends."""
        self._leave()


class Worker:
    """An actor with an encoder on one processor."""

    def __init__(self, model: ModelConfig, engine: EngineConfig) -> None:
        # Before libraries count the processors
        limit_threads(1)
        from hybridtei.encoder import Encoder

        self._encoder = Encoder.load(config=model, engine=engine)

    def encode(
        self, texts: list[str], outputs: list[Output], settings: dict[str, Any]
    ) -> Embeddings:
        return self._encoder.encode(texts, outputs, **settings)


def join(address: str | None, processors: int) -> Callable[[], None]:
    """Join a cluster, or start one here with this number of processors. Return a function that
    leaves it. Main thread only.

    `address`: default RAY_ADDRESS; without it a new cluster starts here, even if the machine runs
    one. A cluster that this process has joined before is not changed. Raises LoadError without Ray,
    ConnectionError if nothing answers.
    """
    require_extra("ray", "ray")
    import ray
    from ray.job_config import JobConfig

    if ray.is_initialized():
        return lambda: None
    address = address or os.environ.get("RAY_ADDRESS") or LOCAL
    _reach(address)
    own: dict[str, Any] = {}
    if address == LOCAL:
        own = {"num_cpus": processors, "include_dashboard": False}
    # Processes of a job of Ray's client do not import modules from this process's working folder.
    isolated = JobConfig(_client_job=True)
    try:
        ray.init(
            address=address,
            job_config=isolated,
            log_to_driver=False,
            logging_level=logging.ERROR,
            **own,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConnectionError(f"Ray at {address}: {error}") from error
    leave: Callable[[], None] = ray.shutdown
    return leave


def _reach(address: str) -> None:
    """Raises ConnectionError if nothing listens. Ray would try for minutes, and then end the
    process."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S).close()
    except (OSError, OverflowError) as error:
        raise ConnectionError(f"Ray at {address}: {error}") from error


def limit_threads(processors: int) -> None:
    """Limit the threads of this process, which Ray does not do."""
    from threadpoolctl import threadpool_limits

    os.environ[GRANTED] = str(processors)
    # The tokenizer's variable
    os.environ["RAYON_NUM_THREADS"] = str(processors)
    threadpool_limits(limits=processors)
