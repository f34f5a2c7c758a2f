"""A Ray cluster that embeds: actors that hold an `Encoder` each. Extra `ray`.

The ingest reads, cuts and stores in its own process; batches go to whichever actor is idle, and their vectors come back. Ray
starts an actor again whose process has ended, and gives it the same batch. A text that ends each process is found as one that
fails in a process is: by halves (`pipeline.embed_each`).
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
from hybridtei.outputs import Embeddings
from hybridtei.system.machine import GRANTED, available_cores, require_extra

MAX_WORKERS = 10_000
LOCAL = "local"
REACH_S = 10.0
TRIES = 3  # of a batch: a process may end for another reason than its texts


def check(workers: int | None) -> None:
    """Raise InvalidInput for a number of workers out of bounds, LoadError without Ray."""
    if workers is not None and not 1 <= workers <= MAX_WORKERS:
        raise InvalidInput(f"--ray-workers is {workers}, should be between 1 and {MAX_WORKERS}")
    require_extra("ray", "ray")


class RayEmbedder:
    """`workers` actors of one processor each; by default as many as the cluster has processors.

    Make it in the main thread; `encode` may run in `parallel` threads at once. Raises InvalidInput, LoadError without Ray,
    ConnectionError where no cluster answers.
    """

    def __init__(
        self, model: ModelConfig, engine: EngineConfig, *, workers: int | None = None, address: str | None = None
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
        """As `Encoder.encode`. Raises what it raises, and BackendError if the worker's process ended `TRIES` times."""
        import ray

        actor = self._idle.get()
        try:
            embedded: Embeddings = ray.get(actor.encode.remote(list(texts), sorted(outputs), settings))
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except ray.exceptions.RayError as error:
            raise BackendError(f"Ray: {error}".splitlines()[0]) from error
        finally:
            self._idle.put(actor)
        return embedded

    def close(self) -> None:
        """Leave the cluster; one that this started ends."""
        self._leave()


class Worker:
    """An actor: an encoder on one processor."""

    def __init__(self, model: ModelConfig, engine: EngineConfig) -> None:
        limit_threads(1)  # before a library counts the processors
        from hybridtei.encoder import Encoder

        self._encoder = Encoder.load(config=model, engine=engine)

    def encode(self, texts: list[str], outputs: list[str], settings: dict[str, Any]) -> Embeddings:
        """As `Encoder.encode`."""
        return self._encoder.encode(texts, outputs, **settings)


def join(address: str | None, processors: int) -> Callable[[], None]:
    """Join a cluster, or start one of so many processors here; the result leaves it again. Call it from the main thread.

    `address`: by default RAY_ADDRESS; without that a cluster starts here, whatever cluster the machine runs already. One that
    this process has joined before is left as it is. Raises LoadError without Ray, ConnectionError where nothing answers.
    """
    require_extra("ray", "ray")
    import ray
    from ray.job_config import JobConfig

    if ray.is_initialized():
        return lambda: None
    address = address or os.environ.get("RAY_ADDRESS") or LOCAL
    _reach(address)
    own: dict[str, Any] = {"num_cpus": processors, "include_dashboard": False} if address == LOCAL else {}
    # As a job of Ray's client, whose processes do not look for modules in this one's working folder first.
    isolated = JobConfig(_client_job=True)
    try:
        ray.init(address=address, job_config=isolated, log_to_driver=False, logging_level=logging.ERROR, **own)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConnectionError(f"Ray at {address}: {error}") from error
    leave: Callable[[], None] = ray.shutdown
    return leave


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
