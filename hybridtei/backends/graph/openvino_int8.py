"""int8 on OpenVINO: how many numbers share a scale, chosen by what sample texts keep and how fast it is, and remembered.

Small groups are closer to float32 and large ones mostly faster; which are how fast depends on the processor. Vectors of sample
texts are held against those in float32, of the same engine and the same weights.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from time import perf_counter

import msgspec

from hybridtei.backends import tuning
from hybridtei.backends.fidelity import Fidelity, Guard, fidelity, sample_vectors
from hybridtei.backends.graph.openvino_backend import BUSY_TOKENS, OpenVinoBackend
from hybridtei.backends.graph.ops import family_graph
from hybridtei.backends.graph.writer import Graph, digest, graphs_folder
from hybridtei.checkpoint.spec import ModelSpec
from hybridtei.checkpoint.weights import Weights
from hybridtei.errors import LoadError
from hybridtei.outputs import Floats
from hybridtei.system.machine import available_cores, whole

log = logging.getLogger(__name__)

GUARD = Guard(worst=0.997, mean=0.997, overlap=0.97)
GROUPS = (128, 64, 32)  # a larger one than a matrix has columns is none to OpenVINO, which then computes in float32


class Trial(msgspec.Struct, frozen=True):
    """A size of group, and what was found of it. `speed`: tokens a second, of those in float32."""

    group: int
    speed: float
    fidelity: Fidelity

    def __str__(self) -> str:
        return f"groups of {self.group}, {self.speed:.2f} x the speed of float32, {self.fidelity}"


def open_int8(spec: ModelSpec, weights: Weights, *, bulk_niceness: int) -> OpenVinoBackend:
    """A model in int8 that passed the guard. Raises LoadError."""
    group = int8_group(spec, weights)
    return OpenVinoBackend(spec, family_graph(spec), weights, dtype="int8", group=group, bulk_niceness=bulk_niceness)


def int8_group(spec: ModelSpec, weights: Weights, guard: Guard | None = None) -> int:
    """The size of group for a checkpoint: kept from an earlier start that asked the usual guard, or chosen now.

    Raises LoadError with the figures if none passes.
    """
    graph = family_graph(spec)
    path = graphs_folder() / f"int8-openvino-{digest(graph, spec.folder, msgspec.json.encode(tuning.machine()))}.json"
    kept = _read(path) if guard is None else None
    chosen = kept or fastest(trials(spec, graph, weights), guard or GUARD, spec)
    log.info("int8 on OpenVINO: %s", chosen)
    if kept is None:
        _write(chosen, path)
    return chosen.group


def trials(spec: ModelSpec, graph: Graph, weights: Weights, groups: Sequence[int] = GROUPS) -> list[Trial]:
    """Sample texts in float32 and in int8 with each size of group, one model in memory at a time."""
    rate, exact = _measured(OpenVinoBackend(spec, graph, weights, threads=available_cores()))
    found = []
    for group in groups:
        backend = OpenVinoBackend(spec, graph, weights, dtype="int8", group=group, threads=available_cores())
        own_rate, vectors = _measured(backend)
        found.append(Trial(group, own_rate / rate, fidelity(vectors, exact)))
    return found


def fastest(found: Sequence[Trial], guard: Guard, spec: ModelSpec) -> Trial:
    """The fastest trial that passes. Raises LoadError with the figures of all if none does."""
    passing = [trial for trial in found if trial.fidelity.passes(guard)]
    if not passing:
        figures = "; ".join(map(str, found))
        raise LoadError(f"{spec.folder}: int8 on OpenVINO is too far from float32: {figures}; asked for: {guard}")
    return max(passing, key=lambda trial: trial.speed)


def _measured(backend: OpenVinoBackend) -> tuple[float, Floats]:
    """(tokens a second, vectors of the sample texts)."""
    with closing(backend):
        return tuning.rate(backend, BUSY_TOKENS, perf_counter), sample_vectors(backend)


def _read(path: Path) -> Trial | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Trial)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        log.warning("%s is not readable, int8 is tried again: %s", path, error)
        return None


def _write(chosen: Trial, path: Path) -> None:
    try:
        with whole(path) as part:
            part.write_bytes(msgspec.json.encode(chosen))
    except OSError as error:
        log.warning("what was found of int8 cannot be kept, each start will try it again: %s", error)
