"""OpenVINO on the CPU, in float32, bfloat16 or int8, with the graphs and heads of ONNX Runtime's
backend.

Passes run in OpenVINO's own threads, whose priority is that of the thread that started them, not
the caller's. So bulk lanes have their own compiled model, made by a thread of low priority; express
lanes have a second one, and single short texts a third one over all cores. Each compiled model
packs the matrices again, which costs memory. So a model with large matrices is compiled once, over
all cores, for a single lane.

OpenVINO compiles kernels for a shape and keeps them: a new shape costs some 15 ms and 2 MB in each
thread. So rectangles and numbers of tokens are rounded up to a few sizes, and each thread keeps a
bounded number of kernels.

In int8, groups of numbers in a matrix's row share a scale. If the processor multiplies bytes,
groups of a token's numbers share a scale that the pass computes; otherwise only the matrices are
smaller. `openvino_model.Int8Form` describes the forms.

Inputs are copied, never shared (`share_inputs`): after a pass on shared memory the graph keeps its
address and writes the next request's inputs there, where other objects may be by then.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from hybridtei.batch import PackedBatch, Padding
from hybridtei.errors import LoadError
from hybridtei.inference.backends.base import HostBackend, busy_tokens
from hybridtei.inference.backends.graph.host import Feed, HostHeads, Sizes, end_to_end
from hybridtei.inference.backends.graph.onnx_backend import MlmHead
from hybridtei.inference.backends.graph.openvino_model import (
    BY_TOKEN,
    POSITIONS,
    Int8Form,
    Tensors,
    count_positions,
    model_of,
    tensors_of,
)
from hybridtei.inference.backends.graph.writer import Graph
from hybridtei.inference.backends.weights import word_table
from hybridtei.models.checkpoint.spec import ModelSpec
from hybridtei.models.checkpoint.weights import Weights
from hybridtei.outputs import Floats, HeadOutputs
from hybridtei.system.machine import LaneKind, available_cores, both_lanes, lower_priority

import openvino as ov  # isort: skip  # after `openvino_model`, which turns off its reports

# Bytes of matrices; above, only one compiled model: on two cores one lane is as fast
LARGE_BYTES = 256_000_000
PRECISIONS = {"float32": ov.Type.f32, "bfloat16": ov.Type.bf16}
THREADS = Path("/proc/self/task")
QUERY_TOKENS = 32
# Kernels that a thread keeps, 2 MB for a dozen of one shape; more kernels saved 3 % of the time
KERNELS = 60
# Closed models; their idle threads may hinder new ones
ATTEMPTS = 8


class OpenVinoBackend(HostBackend):
    """OpenVINO's `Backend`."""

    name = "openvino"
    padding = Padding.ATTENTION
    survives_forks = False

    def __init__(
        self,
        spec: ModelSpec,
        graph: Graph,
        weights: Weights,
        *,
        dtype: str = "float32",
        int8: Int8Form | None = None,
        threads: int = 1,
        bulk_niceness: int = 10,
    ) -> None:
        """`threads`: of one pass. More than one is for a single caller, since such passes share a
        processor badly.

        `int8`: the form for the `dtype` int8; default: groups of 64. `bulk_niceness`: of the bulk
        lanes' threads, since the callers' priority does not reach OpenVINO's threads. Raises
        LoadError.
        """
        super().__init__(spec)
        self.dtype = dtype
        self.shares_prefixes = graph.causal
        cores = available_cores()
        self._lane = threading.local()
        self._positions = count_positions(spec)
        words = word_table(spec, graph.weights)
        form = (int8 or Int8Form(64)) if dtype == "int8" else None
        settings, tensors = _settings(dtype, form), tensors_of(graph, weights, form)
        table = None if words is None else np.asarray(tensors[words], dtype=np.float32)
        is_large = sum(tensors[name].nbytes for name in graph.matrices) > LARGE_BYTES
        threads = max(threads, cores) if is_large else threads
        team = threads if is_large or threads > 1 else 0
        self.busy_tokens = busy_tokens(spec.hidden_size, threads)
        self.lanes = (LaneKind.BULK,) if team else both_lanes(cores)
        try:
            self._models = _Models(
                graph,
                tensors,
                settings,
                positions=self._positions,
                by_token=form is not None and form.group == BY_TOKEN,
                cores=cores,
                team=team,
                bulk_niceness=bulk_niceness,
            )
        except LoadError as error:
            raise LoadError(f"{weights.folder}: {error}") from error
        except Exception as error:
            # OpenVINO raises bare RuntimeErrors
            raise LoadError(f"{weights.folder}: OpenVINO refuses the graph: {error}") from error
        mlm = None
        if spec.is_splade and table is not None:
            mlm = MlmHead(spec, weights, table, threads=threads)
        weights.release()
        self._weights = weights
        self._inputs = self._models.of(LaneKind.EXPRESS, use_all_cores=False).inputs
        self._heads = HostHeads(spec, table, mlm)

    def outputs(self, batch: PackedBatch, *, use_all_cores: bool) -> HeadOutputs:
        return self._heads.outputs(
            batch, self._hidden(batch, use_all_cores=use_all_cores), use_all_cores=use_all_cores
        )

    def enter_lane(self, kind: LaneKind) -> None:
        """Choose the compiled model for this thread too."""
        self._lane.kind = kind
        super().enter_lane(kind)

    def free_unused(self) -> None:
        """Free idle memory. The next pass packs the matrices again, and reads the checkpoint's
        files for that."""
        self._models.free_unused()
        self._weights.release()

    def close(self) -> None:
        """Free the weights."""
        del self._models

    def _hidden(self, batch: PackedBatch, *, use_all_cores: bool) -> Floats:
        model = self._models.of(
            getattr(self._lane, "kind", LaneKind.EXPRESS), use_all_cores=use_all_cores
        )
        _check_ids(batch, self.spec, self._inputs, self._positions)
        return end_to_end(batch, self._inputs, model.run, _grown_sizes)


class _Models:
    """The graph, compiled for each kind of caller.

    Threads inherit their starter's priority, and all models of a process share some threads, so the
    bulk model comes last.
    """

    def __init__(
        self,
        graph: Graph,
        tensors: Tensors,
        settings: Settings,
        *,
        positions: int,
        by_token: bool,
        cores: int,
        team: int,
        bulk_niceness: int,
    ) -> None:
        """`positions`: as for `declared`. `team`: the threads of the only model, which all callers
        share, or 0."""
        core = ov.Core()
        _check_processor(core, settings["INFERENCE_PRECISION_HINT"])
        model = model_of(core, graph, tensors, positions, by_token=by_token)
        if team:
            self._all_cores = self._express = self._bulk = _compile(
                core, model, settings, threads=team, streams=1
            )
            return
        self._all_cores = _compile(core, model, settings, threads=cores, streams=1)
        # A single stream runs in its caller's thread, but one caller at a time
        if cores == 1:
            self._express = self._all_cores
        else:
            self._express = _compile(core, model, settings, threads=cores, streams=cores)
        with ThreadPoolExecutor(1, initializer=lower_priority, initargs=(bulk_niceness,)) as thread:
            self._bulk = thread.submit(
                _compile, core, model, settings, threads=cores, streams=cores
            ).result()

    def free_unused(self) -> None:
        for model in {self._all_cores, self._express, self._bulk}:
            model.free_unused()

    def of(self, kind: LaneKind, *, use_all_cores: bool) -> _Compiled:
        if use_all_cores:
            return self._all_cores
        return self._bulk if kind is LaneKind.BULK else self._express


class _Compiled:
    """A compiled model and its idle inference requests, one for each concurrent caller so far.
    Requests are never deleted, since the model may keep a deleted request's memory.
    """

    def __init__(self, model: ov.CompiledModel) -> None:
        self._model = model
        self._idle: list[ov.InferRequest] = []
        self._running, self._changing = 0, threading.Lock()
        self.inputs = frozenset(port.any_name for port in model.inputs)

    def free_unused(self) -> None:
        """Free the passes' memory, unless a pass runs: OpenVINO would raise, and the next pass
        would need the memory."""
        with self._changing:
            if not self._running:
                self._model.release_memory()

    def run(self, feed: Feed) -> Floats:
        with self._changing:
            self._running += 1
            request = self._idle.pop() if self._idle else self._model.create_infer_request()
        try:
            _fill(request, feed)
            hidden: Floats = request.infer(share_outputs=False)[0]
        finally:
            with self._changing:
                self._running -= 1
                self._idle.append(request)
        return hidden


def _fill(request: ov.InferRequest, feed: Feed) -> None:
    """Copy inputs into the request's tensors. `infer` would raise an exception an input to compare
    shapes: 0.3 ms."""
    for name, values in feed.items():
        tensor = request.get_tensor(name)
        tensor.shape = values.shape
        tensor.data[:] = values


def _grown_sizes(sizes: Sizes) -> Sizes:
    """Round sizes up to few shapes. All lone queries have one shape, since a new shape costs more
    than padding."""
    tokens, rows, columns = sizes
    if rows == 1 and tokens <= QUERY_TOKENS:
        return QUERY_TOKENS, 1, QUERY_TOKENS
    return grown(tokens, 8, 32), grown(rows, 1, 8), grown(columns, 8, 16)


def grown(size: int, unit: int, parts: int) -> int:
    """The next multiple of `unit`, or of a power of two of at most 2 / `parts` of the number."""
    step = max(unit, (1 << (size - 1).bit_length()) // parts)
    return -(-size // step) * step


Settings = Mapping[str, Any]


def _settings(dtype: str, int8: Int8Form | None) -> Settings:
    if int8 is None:
        return {"INFERENCE_PRECISION_HINT": PRECISIONS[dtype]}
    if int8.group == BY_TOKEN:
        return {"INFERENCE_PRECISION_HINT": ov.Type.bf16}
    return {"INFERENCE_PRECISION_HINT": ov.Type.f32, "DYNAMIC_QUANTIZATION_GROUP_SIZE": int8.group}


def _compile(
    core: ov.Core, model: ov.Model, hints: Settings, *, threads: int, streams: int
) -> _Compiled:
    """Compile with new threads: OpenVINO would reuse a closed model's threads, which may have
    another priority."""
    settings: dict[str, Any] = {
        **hints,
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": streams,
        "ENABLE_CPU_PINNING": False,
        "CPU_RUNTIME_CACHE_CAPACITY": str(KERNELS),
    }
    # Earlier attempts are held until the last one, so that it cannot get their threads
    attempts = []
    for _ in range(ATTEMPTS):
        before = _threads()
        attempts.append(core.compile_model(model, "CPU", settings))
        if not before or _threads() - before:
            break
    compiled = attempts[-1]
    actual = compiled.get_property("INFERENCE_PRECISION_HINT")
    precision = hints["INFERENCE_PRECISION_HINT"]
    if actual != precision:
        raise LoadError(
            f"OpenVINO computes in {actual.get_type_name()}, not in {precision.get_type_name()}"
        )
    return _Compiled(compiled)


def _threads() -> frozenset[str]:
    """The threads of this process; none if the system does not list them."""
    return frozenset(os.listdir(THREADS)) if THREADS.exists() else frozenset()


def _check_processor(core: ov.Core, precision: ov.Type) -> None:
    able = core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    if precision == ov.Type.bf16 and "BF16" not in able:
        raise LoadError(
            "this processor does not compute in bfloat16, float32 runs everywhere (it has "
            f"{', '.join(able)})"
        )


def _check_ids(batch: PackedBatch, spec: ModelSpec, taken: frozenset[str], positions: int) -> None:
    """Raises IndexError for ids outside a table, where OpenVINO would read other memory without an
    error."""
    tables = (
        ("input ids", "input_ids", spec.vocab_size),
        ("positions", POSITIONS, positions),
        ("token types", "token_type_ids", spec.config.get("type_vocab_size")),
    )
    for what, name, size in tables:
        ids = getattr(batch, name)
        if name not in taken or ids is None or not isinstance(size, int) or size < 1:
            continue
        if not 0 <= ids.min() <= ids.max() < size:
            raise IndexError(f"{what} from {ids.min()} to {ids.max()}, in a table of {size}")
