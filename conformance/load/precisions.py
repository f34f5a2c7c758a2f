"""Engines and precisions of one model in one process, in turns: `python -m conformance.load.precisions [MODEL ...]`

MODEL: a folder, a hub id, the embedded model, or a name of conformance/families/shapes/checkpoints.toml, which is written with
random weights. Each engine computes blocks of batches of `--texts` texts of `--length` tokens as the server would drive it: a
thread for each of its bulk lanes, and none of its threads for what takes all cores itself. Blocks of all engines alternate.
Printed are the median of tokens/s, and the median of the ratios of a round to `--against`. int8 on OpenVINO has the form that
its guard chooses; on random weights, whose neighbours mean nothing, the fastest form.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from time import perf_counter

import numpy as np

from conformance.families.shapes.checkpoint import read_checkpoints, write_checkpoint
from hybridtei.backends import tuning
from hybridtei.backends.base import Backend
from hybridtei.backends.fidelity import Guard
from hybridtei.backends.graph.openvino_backend import OpenVinoBackend
from hybridtei.backends.graph.openvino_int8 import fastest, forms, trials
from hybridtei.backends.graph.ops import family_graph
from hybridtei.backends.select import open_backend
from hybridtei.batch import Encoding, Head, PackedBatch, pack
from hybridtei.checkpoint.spec import ModelSpec
from hybridtei.checkpoint.weights import Weights
from hybridtei.config import EMBEDDED_MODEL, ModelConfig
from hybridtei.load import find_model
from hybridtei.system.machine import LaneKind, available_cores

ENGINES = (
    "ort-float32",
    "openvino-float32",
    "openvino-bfloat16",
    "ort-int8",
    "openvino-int8",
    "torch-float32",
    "torch-bfloat16",
)
FLAGS = ("avx2", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
ANY = Guard(worst=-math.inf, mean=-math.inf)


class Engine:
    """A backend and the threads of its lanes."""

    def __init__(self, name: str, spec: ModelSpec, *, is_random: bool) -> None:
        self.name = name
        backend, dtype = name.split("-")
        if name == "openvino-int8" and is_random:
            weights, graph = Weights.open(spec.folder), family_graph(spec)
            found = forms(spec, graph, weights)
            chosen = fastest(trials(spec, graph, weights, found), ANY, spec)
            print(f"int8: {chosen}; the guard was not asked")
            form = next(one for one in found if one.group == chosen.group)
            self.backend: Backend = OpenVinoBackend(spec, graph, weights, dtype="int8", int8=form)
        else:
            self.backend = open_backend(ModelConfig(model_id=str(spec.folder), backend=backend, dtype=dtype), spec)
        self.lanes = self.backend.lanes.count(LaneKind.BULK)
        enter = self.backend.enter_lane if self.lanes > 1 else lambda _: None
        self._threads = ThreadPoolExecutor(self.lanes, initializer=enter, initargs=(LaneKind.BULK,))

    def rate(self, batch: PackedBatch, batches: int) -> float:
        """Tokens a second over some batches in each lane."""
        began = perf_counter()
        for done in [self._threads.submit(self.backend.forward, batch) for _ in range(batches * self.lanes)]:
            done.result()
        return batches * self.lanes * len(batch.input_ids) / (perf_counter() - began)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0."""
    parser = argparse.ArgumentParser(
        prog="python -m conformance.load.precisions", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=[EMBEDDED_MODEL], metavar="MODEL")
    parser.add_argument("--engine", action="append", choices=ENGINES, help="repeatable; all if none is given")
    parser.add_argument("--against", default="openvino-int8", choices=ENGINES, help="that ratios are of")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", type=int, default=3, help="in a lane, of a round")
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    options = parser.parse_args(argv)
    packages = ", ".join(f"{name} {version(name)}" for name in ("onnxruntime", "openvino", "torch"))
    print(f"{tuning.processor()}, {available_cores()} cores, {flags()}; {packages}, Python {platform.python_version()}")
    for name in options.models:
        with found(name) as (spec, is_random):
            print(f"{name}, {options.texts} x {options.length} tokens a batch, {'random' if is_random else 'real'} weights")
            engines = [Engine(one, spec, is_random=is_random) for one in options.engine or ENGINES if one in able()]
            for line in compared(engines, batch_of(spec, options.texts, options.length), options):
                print(line, flush=True)
    return 0


@contextmanager
def found(name: str) -> Iterator[tuple[ModelSpec, bool]]:
    """(a model, whether its weights are random)."""
    checkpoints = read_checkpoints()
    if name not in checkpoints:
        yield find_model(ModelConfig(model_id=name)), False
        return
    with tempfile.TemporaryDirectory(prefix="precisions-") as scratch:
        write_checkpoint(Path(scratch) / name, checkpoints[name])
        yield find_model(ModelConfig(model_id=str(Path(scratch) / name))), True


def compared(engines: Sequence[Engine], batch: PackedBatch, options: argparse.Namespace) -> Iterator[str]:
    """A line for each engine."""
    rates: dict[str, list[float]] = {engine.name: [] for engine in engines}
    for engine in engines:
        engine.rate(batch, 1)  # kernels are made
    for _ in range(options.rounds):
        for engine in engines:
            rates[engine.name].append(engine.rate(batch, options.batches))
    base = rates.get(options.against)
    for engine in engines:
        own = rates[engine.name]
        line = f"  {engine.name:20}{engine.lanes:3} lanes {statistics.median(own):9.0f} tokens/s"
        ratios = [] if base is None else [one / other for one, other in zip(base, own, strict=True)]
        yield line + (f"   {options.against} does {statistics.median(ratios):5.2f} x" if ratios else "")


def batch_of(spec: ModelSpec, texts: int, length: int) -> PackedBatch:
    """Texts of random words."""
    draw = np.random.default_rng(0)
    rows = draw.integers(min(1000, spec.vocab_size // 2), spec.vocab_size, (texts, length), dtype=np.int64)
    return pack([Encoding(row) for row in rows], frozenset({Head.DENSE}), spec.positions)


def able() -> list[str]:
    """Engines that run here: bfloat16 wants a processor with instructions for it."""
    return [name for name in ENGINES if not name.endswith("bfloat16") or "bf16" in flags()]


def flags() -> str:
    """What this processor has for few bits."""
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return os.uname().machine
    return " ".join(
        word for word in ("avx2", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8") if word in words
    )


if __name__ == "__main__":
    sys.exit(main())
