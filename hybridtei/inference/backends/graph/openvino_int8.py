"""int8 on OpenVINO in the form that fits the processor's instructions, and bfloat16: each judged
once and kept.

Small groups are closer to float32; large ones are mostly faster, depending on the processor. The
vectors of sample texts are compared with float32's of the same engine and weights. The divisors of
channels come from the same texts; they only change where numbers are rounded.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np

from hybridtei.batch import Head, pack
from hybridtei.inference.backends.fidelity import (
    Fidelity,
    Guard,
    check,
    fidelity,
    sample_encodings,
    sample_vectors,
)
from hybridtei.inference.backends.graph.host import Feed, end_to_end
from hybridtei.inference.backends.graph.openvino_backend import OpenVinoBackend
from hybridtei.inference.backends.graph.openvino_model import (
    BY_TOKEN,
    TINY,
    Int8Form,
    count_positions,
    declared,
    give_weights,
    int8_matrices,
    shared_inputs,
    tensors_of,
)
from hybridtei.inference.backends.graph.ops import family_graph
from hybridtei.inference.backends.graph.writer import Graph, digest, graphs_folder, made_once
from hybridtei.inference.backends.weights import graph_keys
from hybridtei.models.checkpoint.spec import ModelSpec
from hybridtei.models.checkpoint.weights import Weights
from hybridtei.outputs import Floats
from hybridtei.system.machine import available_cores

import openvino as ov  # isort: skip  # after `openvino_model`, which turns off its reports

log = logging.getLogger(__name__)

GUARD = Guard(worst=0.997, mean=0.997, overlap=0.97)
BFLOAT16_GUARD = Guard(worst=0.999, mean=0.999)
# The most exact form, for processors without a row below, which were not measured
SAFEST = 64
# Instruction, by Linux's name -> group size. The processor's first instruction in this order
# counts.
GROUPS = {
    # Measured: 2.9 to 3.2 x the speed of MiniLM in float32 by tiles; groups need vector registers
    "amx_int8": BY_TOKEN,
    # Measured: 1.02 to 1.10 x the speed of groups of 64; groups of 384 failed the guard for some
    # texts
    "avx512_vnni": 128,
    # Not measured
    "avx_vnni": SAFEST,
}
CPU_INFO = Path("/proc/cpuinfo")
# Share of an outlier's scale that moves from tokens to matrices
SHARE = 0.6
# Of the largest channel, as a minimum: a channel that is zero in the sample texts may not be zero
# in others
LEAST = 1e-3
# Products per rounded number; below, computing a token's scale costs too much
GAIN = 2


class _Record(msgspec.Struct, frozen=True):
    """The stored result of a form that passed. `divisors`: of `Int8Form`, in bytes."""

    fidelity: Fidelity
    divisors: dict[str, bytes]


def open_int8(spec: ModelSpec, weights: Weights, *, bulk_niceness: int) -> OpenVinoBackend:
    """Open a model in int8 that passed the guard. Raises LoadError."""
    if group_of(_instructions()) == BY_TOKEN:
        log.warning(
            "this processor has AMX: --dtype bfloat16 is about as fast as int8, and nearer to "
            "float32"
        )
    form = int8_form(spec, weights)
    return OpenVinoBackend(
        spec, family_graph(spec), weights, dtype="int8", int8=form, bulk_niceness=bulk_niceness
    )


def open_bfloat16(spec: ModelSpec, weights: Weights, *, bulk_niceness: int) -> OpenVinoBackend:
    """Open a model in bfloat16 that passed its guard, on a long text too. Raises LoadError."""
    graph = family_graph(spec)
    key = digest(graph, spec.folder, f"bfloat16 {ov.__version__}".encode())

    def make() -> Fidelity:
        figures = judged(spec, graph, weights, "bfloat16")
        check(figures, BFLOAT16_GUARD, spec, "bfloat16 on OpenVINO is too far from float32")
        return figures

    path = graphs_folder() / f"bfloat16-openvino-{key}.msgpack"
    log.info("bfloat16 on OpenVINO: %s", made_once(path, Fidelity, make))
    return OpenVinoBackend(spec, graph, weights, dtype="bfloat16", bulk_niceness=bulk_niceness)


def group_of(instructions: Sequence[str]) -> int:
    """The group size for a processor with these instructions, from `GROUPS`."""
    return next((group for name, group in GROUPS.items() if name in instructions), SAFEST)


def int8_form(spec: ModelSpec, weights: Weights, guard: Guard | None = None) -> Int8Form:
    """This processor's form for a checkpoint: stored by an earlier start with the usual guard, or
    judged now.

    Raises LoadError with the figures if the form fails the guard.
    """
    graph, group = family_graph(spec), group_of(_instructions())
    what = f"int8 on OpenVINO in {'whole tokens' if group == BY_TOKEN else f'groups of {group}'}"
    name = digest(graph, spec.folder, f"{group} {ov.__version__}".encode())
    path = graphs_folder() / f"int8-openvino-{name}.msgpack"

    def make() -> _Record:
        form = Int8Form(
            group, divisors(spec, graph, weights, gain=GAIN if group == BY_TOKEN else 0)
        )
        figures = judged(spec, graph, weights, "int8", form)
        check(figures, guard or GUARD, spec, f"{what} is too far from float32")
        return _Record(
            figures, {name: divisor.tobytes() for name, divisor in (form.divisors or {}).items()}
        )

    record = made_once(path, _Record, make) if guard is None else make()
    log.info("%s: %s", what, record.fidelity)
    return Int8Form(
        group, {name: np.frombuffer(data, np.float32) for name, data in record.divisors.items()}
    )


def _instructions() -> list[str]:
    try:
        return CPU_INFO.read_text().split()
    except OSError:
        return []


def judged(
    spec: ModelSpec, graph: Graph, weights: Weights, dtype: str, form: Int8Form | None = None
) -> Fidelity:
    """The fidelity of a precision to float32 on sample texts, with one model in memory at a time.
    `form`: of int8."""
    vectors: list[Floats] = []
    cores = available_cores()
    for each in (dtype, "float32"):
        backend = OpenVinoBackend(spec, graph, weights, dtype=each, int8=form, threads=cores)
        with closing(backend):
            vectors.append(sample_vectors(backend, with_long=dtype == "bfloat16"))
    return fidelity(*vectors)


def divisors(
    spec: ModelSpec, graph: Graph, weights: Weights, *, gain: float = 0
) -> dict[str, Floats]:
    """The divisors of matrices with at least `gain` products a number, from the sample texts in
    float32."""
    core = ov.Core()
    model = declared(core, graph, count_positions(spec))
    shared = shared_inputs(model, int8_matrices(graph))
    give_weights(model, tensors_of(graph, weights, None))
    largest = _largest(spec, core, model, [output for output, _ in shared])
    keys = graph_keys(graph, weights)
    by_name = dict[str, Floats]()
    for (_, names), size in zip(shared, largest, strict=True):
        if sum(graph.weights[name][0] for name in names) >= gain * len(size):
            rows = np.maximum.reduce(
                [np.abs(weights.float32(key)).max(0) for key in map(keys.__getitem__, names)]
            )
            by_name |= dict.fromkeys(names, smoothing(size, rows))
    return by_name


def smoothing(tokens: Floats, matrix: Floats) -> Floats:
    """Divisors float32[k] from each channel's largest magnitude in tokens and in a matrix. Their
    geometric mean is 1."""
    logarithms = SHARE * _logarithms(tokens) - (1 - SHARE) * _logarithms(matrix)
    return np.asarray(np.exp(logarithms - logarithms.mean()), dtype=np.float32)


def _logarithms(sizes: Floats) -> Floats:
    return np.asarray(np.log(np.maximum(sizes, LEAST * sizes.max() + TINY)))


def _largest(
    spec: ModelSpec, core: ov.Core, model: ov.Model, values: Sequence[ov.Output]
) -> list[Floats]:
    """The largest magnitude in each channel float32[k] of these values of a model, over the sample
    texts."""
    model.add_outputs(list(values))
    settings = {"INFERENCE_PRECISION_HINT": ov.Type.f32, "INFERENCE_NUM_THREADS": available_cores()}
    request = core.compile_model(model, "CPU", settings).create_infer_request()
    names = frozenset(port.any_name for port in model.inputs)
    maxima: list[Floats] = []

    def run(feed: Feed) -> Floats:
        hidden, *rest = request.infer(
            {name: feed[name] for name in names}, share_outputs=True
        ).values()
        sizes = [np.abs(value).max(0) for value in rest]
        maxima[:] = [
            np.maximum(largest, size) for largest, size in zip(maxima or sizes, sizes, strict=True)
        ]
        return np.asarray(hidden)

    heads = frozenset({Head.DENSE})
    for encoding in sample_encodings(spec):
        end_to_end(pack([encoding], heads, spec.positions), names, run)
    return maxima
