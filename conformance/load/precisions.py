"""Engines and precisions of one model in one process, in turns.

    python -m conformance.load precisions [MODEL ...] [--engine NAME]... [--rounds 7] [--texts 4]
    [--length 128]

MODEL: a folder, a hub id, the embedded model, or a name of
conformance/families/shapes/checkpoints.toml, which is written with random weights. Each engine
computes batches of `--texts` texts of `--length` tokens as the server would drive it: a thread for
each of its bulk lanes. `ratio`: the rate of `--against` divided by the engine's, the median of the
rounds. On random weights, whose neighbours mean nothing, the guard of OpenVINO's int8 lets
everything through.
"""

import argparse
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import inf
from pathlib import Path
from time import perf_counter

import numpy as np

from conformance.families.shapes.checkpoint import read_checkpoints, write_checkpoint
from conformance.load.report import paired, ratio, table
from hybridtei.batch import Encoding, Head, PackedBatch, pack
from hybridtei.config import EMBEDDED_MODEL, ModelConfig
from hybridtei.inference.backends.base import Backend
from hybridtei.inference.backends.fidelity import Guard
from hybridtei.inference.backends.graph.openvino_backend import OpenVinoBackend
from hybridtei.inference.backends.graph.openvino_int8 import int8_form
from hybridtei.inference.backends.graph.ops import family_graph
from hybridtei.inference.backends.select import open_backend
from hybridtei.inference.load import find_model
from hybridtei.models.checkpoint.spec import ModelSpec
from hybridtei.models.checkpoint.weights import Weights
from hybridtei.system.machine import LaneKind

CPU_INFO = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
INSTRUCTIONS = [
    name
    for name in ("avx2", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
    if name in CPU_INFO
]
ENGINES = ["ort-float32", "ort-int8", "torch-float32", "torch-bfloat16"]
ENGINES += ["openvino-float32", "openvino-bfloat16", "openvino-int8"]
MODELS = {"nargs": "*", "default": [EMBEDDED_MODEL], "metavar": "MODEL"}
CHOSEN = {
    "action": "append",
    "choices": ENGINES,
    "help": "repeatable; default: all that this processor can run",
}
COUNTS = {"--rounds": 7, "--batches": 3, "--texts": 4, "--length": 128}
FLAGS = {
    "precisions": {"models": MODELS, "--engine": CHOSEN, "--against": "openvino-int8", **COUNTS}
}


def opened(name: str, spec: ModelSpec, is_random: bool) -> Backend:
    engine, dtype = name.split("-")
    if name == "openvino-int8" and is_random:
        weights = Weights.open(spec.folder)
        form = int8_form(spec, weights, Guard(worst=-inf, mean=-inf))
        return OpenVinoBackend(spec, family_graph(spec), weights, dtype=dtype, int8=form)
    return open_backend(ModelConfig(model_id=str(spec.folder), backend=engine, dtype=dtype), spec)


def rate(backend: Backend, threads: ThreadPoolExecutor, batch: PackedBatch, number: int) -> float:
    """Tokens a second."""
    began = perf_counter()
    for done in [threads.submit(backend.forward, batch) for _ in range(number)]:
        done.result()
    return number * len(batch.input_ids) / (perf_counter() - began)


def compare(spec: ModelSpec, options: argparse.Namespace, is_random: bool) -> None:
    rows = np.random.default_rng(0).integers(
        min(1000, spec.vocab_size // 2), spec.vocab_size, (options.texts, options.length)
    )
    batch, sides, lanes = (
        pack([Encoding(row) for row in rows], frozenset({Head.DENSE}), spec.positions),
        {},
        {},
    )
    able = [
        name
        for name in ENGINES
        if not name.endswith("bfloat16") or any("bf16" in one for one in INSTRUCTIONS)
    ]
    for name in options.engine or able:
        backend = opened(name, spec, is_random)
        lanes[name] = backend.lanes.count(LaneKind.BULK)
        enter = backend.enter_lane if lanes[name] > 1 else lambda _: None
        threads = ThreadPoolExecutor(lanes[name], initializer=enter, initargs=(LaneKind.BULK,))
        # Kernels are made
        rate(backend, threads, batch, lanes[name])
        sides[name] = partial(rate, backend, threads, batch, options.batches * lanes[name])
    found = paired(options.rounds, sides)
    base = found.get(options.against, next(iter(found.values())))
    speeds = {name: statistics.median(own) for name, own in found.items()}
    table(
        {
            name: {"lanes": lanes[name], "tokens/s": speeds[name], "ratio": ratio(base, own)}
            for name, own in found.items()
        }
    )


def precisions(options: argparse.Namespace) -> int:
    print(" ".join(INSTRUCTIONS))
    checkpoints = read_checkpoints()
    for name in options.models:
        is_random = name in checkpoints
        print(
            f"{name}, {options.texts} x {options.length} tokens a batch, "
            f"{'random' if is_random else 'real'} weights"
        )
        with tempfile.TemporaryDirectory() as scratch:
            if is_random:
                write_checkpoint(Path(scratch) / name, checkpoints[name])
            spec = find_model(
                ModelConfig(model_id=str(Path(scratch) / name) if is_random else name)
            )
            compare(spec, options, is_random)
    return 0
