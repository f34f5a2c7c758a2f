"""What a worker process and the process with the engine say to each other, besides requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridtei.config import EngineConfig, ModelConfig, ServerConfig
from hybridtei.engine.remote import RemoteBackend
from hybridtei.observability.metrics import Reading


@dataclass(frozen=True, slots=True)
class Setup:
    """To a worker, first: all that it has to know. The specification comes along, since to read it takes the model's files,
    and some of those take torch."""

    backend: RemoteBackend
    budget_tokens: int
    model: ModelConfig
    engine: EngineConfig
    server: ServerConfig


@dataclass(frozen=True, slots=True)
class Ready:
    """From a worker: it could serve."""


@dataclass(frozen=True, slots=True)
class Serve:
    """To a worker: accept connections."""


@dataclass(frozen=True, slots=True)
class Drain:
    """To a worker: finish open requests, and end."""


@dataclass(frozen=True, slots=True)
class Count:
    """To a worker: what have you counted?"""


@dataclass(frozen=True, slots=True)
class Counted:
    """From a worker, when asked and once in a while, so that little is forgotten if it dies."""

    readings: Sequence[Reading]


@dataclass(frozen=True, slots=True)
class Scrape:
    """From a worker: somebody asks for the metrics of all."""

    number: int
    readings: Sequence[Reading]


@dataclass(frozen=True, slots=True)
class Exposition:
    """To a worker: the metrics of all, as text."""

    number: int
    text: str
