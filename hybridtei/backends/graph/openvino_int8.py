"""int8 on OpenVINO: its form is chosen by what sample texts keep and how fast it is, and remembered.

Small groups are closer to float32 and large ones mostly faster; which are how fast depends on the processor. Vectors of sample
texts are held against those in float32, of the same engine and the same weights. What channels are divided by comes from the
same texts; it changes nothing but where numbers are rounded, whatever the text.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from time import perf_counter

import msgspec
import numpy as np

from hybridtei.backends import tuning
from hybridtei.backends.fidelity import Fidelity, Guard, fidelity, sample_encodings, sample_vectors
from hybridtei.backends.graph.host import Feed, end_to_end
from hybridtei.backends.graph.openvino_backend import BUSY_TOKENS, OpenVinoBackend
from hybridtei.backends.graph.openvino_model import (
    BY_TOKEN,
    TINY,
    Int8Form,
    declared,
    give_weights,
    int8_matrices,
    shared_inputs,
    tensors_of,
)
from hybridtei.backends.graph.ops import family_graph
from hybridtei.backends.graph.weights import graph_keys
from hybridtei.backends.graph.writer import Graph, digest, graphs_folder
from hybridtei.batch import Head, pack
from hybridtei.checkpoint.spec import ModelSpec
from hybridtei.checkpoint.weights import Weights
from hybridtei.errors import LoadError
from hybridtei.outputs import Floats
from hybridtei.system.machine import available_cores, whole

import openvino as ov  # isort: skip  # after `openvino_model`, which turns its reports off

log = logging.getLogger(__name__)

GUARD = Guard(worst=0.997, mean=0.997, overlap=0.97)
GROUPS = (128, 64)  # those of 384 kept MiniLM's sample texts above the guard's bounds, and other texts below
SHARE = 0.6  # of outliers that goes from tokens to matrices
LEAST = 1e-3  # of the largest: a channel that the sample texts leave at zero may have a size in others
GAIN = 2  # numbers made of one that is rounded: fewer are not worth finding the scale of a token
MIN_SECONDS = 0.2  # of measuring a form: other programs that run meanwhile make a short one look slow
CPU_INFO = Path("/proc/cpuinfo")


class Trial(msgspec.Struct, frozen=True):
    """A size of group, and what was found of it. `speed`: tokens a second, of those in float32."""

    group: int
    speed: float
    fidelity: Fidelity

    def __str__(self) -> str:
        form = "whole tokens" if self.group == BY_TOKEN else f"groups of {self.group}"
        return f"{form}, {self.speed:.2f} x the speed of float32, {self.fidelity}"


class _Kept(msgspec.Struct, frozen=True):
    """A trial that was chosen. `divisors`: of `Int8Form`, in bytes."""

    trial: Trial
    divisors: dict[str, bytes]


def open_int8(spec: ModelSpec, weights: Weights, *, bulk_niceness: int) -> OpenVinoBackend:
    """A model in int8 that passed the guard. Raises LoadError."""
    form = int8_form(spec, weights)
    return OpenVinoBackend(spec, family_graph(spec), weights, dtype="int8", int8=form, bulk_niceness=bulk_niceness)


def int8_form(spec: ModelSpec, weights: Weights, guard: Guard | None = None) -> Int8Form:
    """The form for a checkpoint: kept from an earlier start that asked the usual guard, or chosen now.

    Raises LoadError with the figures if none passes.
    """
    graph = family_graph(spec)
    path = graphs_folder() / f"int8-openvino-{digest(graph, spec.folder, msgspec.json.encode(tuning.machine()))}.msgpack"
    kept = _read(path) if guard is None else None
    if kept is not None:
        log.info("int8 on OpenVINO: %s", kept.trial)
        return Int8Form(kept.trial.group, {name: np.frombuffer(data, np.float32) for name, data in kept.divisors.items()})
    found = forms(spec, graph, weights)
    chosen = fastest(trials(spec, graph, weights, found), guard or GUARD, spec)
    log.info("int8 on OpenVINO: %s", chosen)
    form = next(form for form in found if form.group == chosen.group)
    _write(_Kept(chosen, {name: divisor.tobytes() for name, divisor in (form.divisors or {}).items()}), path)
    return form


def forms(spec: ModelSpec, graph: Graph, weights: Weights) -> list[Int8Form]:
    """Those worth a trial here, the roughest first."""
    every, wide = _divisors(spec, graph, weights)
    rough = [Int8Form(BY_TOKEN, wide)] if has_matrix_tiles() else []
    return [*rough, *(Int8Form(group, every) for group in GROUPS)]


def has_matrix_tiles() -> bool:
    """Whether the processor multiplies tiles of bytes (AMX), which beats bfloat16 there; groups are for vector registers."""
    try:
        return "amx_int8" in CPU_INFO.read_text().split()
    except OSError:
        return False


def trials(spec: ModelSpec, graph: Graph, weights: Weights, asked: Sequence[Int8Form]) -> list[Trial]:
    """Sample texts in float32 and in int8 of each form, one model in memory at a time."""
    rate, exact = _measured(OpenVinoBackend(spec, graph, weights, threads=available_cores()))
    found = []
    for form in asked:
        backend = OpenVinoBackend(spec, graph, weights, dtype="int8", int8=form, threads=available_cores())
        own_rate, vectors = _measured(backend)
        found.append(Trial(form.group, own_rate / rate, fidelity(vectors, exact)))
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
        began, rates = perf_counter(), [tuning.rate(backend, BUSY_TOKENS, perf_counter)]
        while perf_counter() - began < MIN_SECONDS:
            rates.append(tuning.rate(backend, BUSY_TOKENS, perf_counter))
        return max(rates), sample_vectors(backend)


def _divisors(spec: ModelSpec, graph: Graph, weights: Weights) -> tuple[Mapping[str, Floats], Mapping[str, Floats]]:
    """Of all matrices, by the sample texts in float32, and of those alone that make `GAIN` times the numbers that they take."""
    core = ov.Core()
    model = declared(core, graph)
    shared = shared_inputs(model, int8_matrices(graph))
    give_weights(model, tensors_of(graph, weights, None))
    largest = _largest(spec, core, model, [output for output, _ in shared])
    keys = graph_keys(graph, weights)
    every, wide = dict[str, Floats](), dict[str, Floats]()
    for (_, names), size in zip(shared, largest, strict=True):
        rows = np.maximum.reduce([np.abs(weights.float32(key)).max(0) for key in map(keys.__getitem__, names)])
        found = dict.fromkeys(names, smoothing(size, rows))
        every |= found
        if sum(graph.weights[name][0] for name in names) >= GAIN * len(size):
            wide |= found
    return every, wide


def smoothing(tokens: Floats, matrix: Floats) -> Floats:
    """Divisors float32[k] of channels by the largest magnitude of each in tokens and in a matrix. Their geometric mean is 1."""
    logarithms = SHARE * _logarithms(tokens) - (1 - SHARE) * _logarithms(matrix)
    return np.asarray(np.exp(logarithms - logarithms.mean()), dtype=np.float32)


def _logarithms(sizes: Floats) -> Floats:
    return np.asarray(np.log(np.maximum(sizes, LEAST * sizes.max() + TINY)))


def _largest(spec: ModelSpec, core: ov.Core, model: ov.Model, values: Sequence[ov.Output]) -> list[Floats]:
    """The largest magnitude in each channel of some values of a model, float32[k] each, over the sample texts."""
    model.add_outputs(list(values))
    settings = {"INFERENCE_PRECISION_HINT": ov.Type.f32, "INFERENCE_NUM_THREADS": available_cores()}
    request = core.compile_model(model, "CPU", settings).create_infer_request()
    names = frozenset(port.any_name for port in model.inputs)
    found: list[Floats] = []

    def run(feed: Feed) -> Floats:
        hidden, *rest = request.infer({name: feed[name] for name in names}, share_outputs=True).values()
        sizes = [np.abs(one).max(0) for one in rest]
        found[:] = [np.maximum(one, other) for one, other in zip(found or sizes, sizes, strict=True)]
        return np.asarray(hidden)

    heads = frozenset({Head.DENSE})
    for encoding in sample_encodings(spec):
        end_to_end(pack([encoding], heads, spec.positions), names, run)
    return found


def _read(path: Path) -> _Kept | None:
    try:
        kept: _Kept = msgspec.msgpack.decode(path.read_bytes(), type=_Kept)
        return kept
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        log.warning("%s is not readable, int8 is tried again: %s", path, error)
        return None


def _write(chosen: _Kept, path: Path) -> None:
    try:
        with whole(path) as part:
            part.write_bytes(msgspec.msgpack.encode(chosen))
    except OSError as error:
        log.warning("what was found of int8 cannot be kept, each start will try it again: %s", error)
