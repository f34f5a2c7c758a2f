"""A cell of `gpu`'s tables, in a process of its own. Each row is on disk as soon as it is measured.

`tokens_per_s`, `texts_per_s`: through the engine's queue, texts made beforehand. `passes_tokens_per_s`: of batches that are
packed already; what it is above the first is what the engine costs. `small_tokens_per_s`: in passes of a thousand tokens, where
launches cost more than arithmetic. `lone_ms`: of a single text. `share`: of the rate at which this device multiplies large
matrices of the precision. `cosine`: the least of fp8's dense vectors with those of the same weights before.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from types import SimpleNamespace
from typing import Any

from gpu import BREAKS, append

LENGTHS = {"512": ((1.0, (512, 512)),), "50": ((1.0, (50, 50)),), "5": ((1.0, (5, 5)),), "8192": ((1.0, (8192, 8192)),)}
TRAFFIC = {"mixed": ((0.7, (5, 30)), (0.3, (100, 400))), **LENGTHS}
WORDS = {"plain", "graphs", "compiled", "fp8", "outputs"}


def measure(cell: Any, tell: Any) -> None:
    """All rows of a cell, to `tell` one by one."""
    if cell.way in BREAKS:
        broken(cell.way, tell)

    import gpu_http
    import gpu_parity
    from gpu_models import SHAPES

    if cell.way == "probe":
        for dtype in ("float32", "bfloat16", *(() if cell.cpu_smoke else ("float16",))):
            tell({**heading(cell), "dtype": dtype, "product_tflops": rate(cell, dtype) / 1e12})
    elif cell.stage == "parity":
        tell(gpu_parity.near(SHAPES[cell.model], *cell.way.split(" in "), cell.device))
    elif cell.stage == "http":
        lacking = gpu_http.lacking()
        if lacking:
            sys.exit(f"it needs {', '.join(lacking)}: bring them as wheels, --wheels DIR (gpu_wheels.py gathers them)")
        workers = int(cell.way.split()[0])
        for row in gpu_http.measure(
            cell.model, dtype=cell.dtype, workers=workers, seconds=cell.pass_seconds, few=cell.cpu_smoke
        ):
            tell(row)
    elif cell.way == "peer":
        for row in gpu_parity.peer(SHAPES[cell.model], cell):
            tell(row)
    else:
        speeds(SHAPES[cell.model], cell, tell)


def broken(way: str, tell: Any) -> None:
    """What a cell may come to, to see that nothing else is lost by it; a row was measured before."""
    tell({"tokens": "before"})
    if way == "raises":
        raise RuntimeError("this way raises")
    if way == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(3600)


def speeds(shape: Any, cell: Any, tell: Any) -> None:
    """Rows of a model in a way."""
    import torch
    from gpu_drive import Source, drive, lone, passes
    from gpu_parity import in_fp8, with_kernel

    from hybridtei.batch import Head

    words = {*cell.way.split("+")}
    made, dtype = ready(shape, words, cell), "bfloat16" if "fp8" in words else cell.dtype
    backend = made.backend
    if not words <= WORDS:
        with_kernel(backend, cell.way)
    told = {"dtype": dtype, "kernel": cell.way if not words <= WORDS else backend.trunk.attention.name}
    if "fp8" in words:
        tell({**told, "tokens": "", "cosine": in_fp8(backend)})
    begin(backend, words, cell)
    heads = backend.spec.heads - {Head.TOKENS} if "outputs" in words else frozenset({Head.DENSE})
    product = rate(cell, dtype)
    for kind, mix in TRAFFIC.items():
        if kind in LENGTHS and int(kind) > shape.longest:
            continue
        source = Source(mix, shape.longest, backend.spec.vocab_size, cell.budget)
        if cell.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        drive(backend, source, cell.budget, 0.2 * cell.pass_seconds, heads)  # warm
        tokens, texts, keys = drive(backend, source, cell.budget, cell.pass_seconds, heads)
        row: dict[str, Any] = {**told, "tokens": kind, "tokens_per_s": tokens, "texts_per_s": texts}
        row["passes_tokens_per_s"] = passes(backend, source, cell.budget, cell.pass_seconds, heads)
        row["small_tokens_per_s"] = passes(backend, source, 1024, 0.3 * cell.pass_seconds, heads)
        row |= {
            "lone_ms": lone(backend, source, heads),
            "share": row["passes_tokens_per_s"] * made.flop_per_token(keys) / product,
        }
        tell({**row, "peak_mb": torch.cuda.max_memory_allocated() / 1e6 if cell.device == "cuda" else 0.0})


def ready(shape: Any, words: set[str], cell: Any) -> Any:
    """A model that begins nothing yet; see `begin`."""
    from gpu_models import called_again, make

    from hybridtei.backends.torch.acceleration import AccelerationOptions

    options = AccelerationOptions(
        graphs="graphs" in words,
        compiled="true" if "compiled" in words else "false",
        compiler="aot_eager" if cell.cpu_smoke else "inductor",
        recorder=None if cell.device == "cuda" else called_again,
    )
    dtype = "bfloat16" if "fp8" in words else cell.dtype
    return make(shape, dtype=dtype, device=cell.device, acceleration=options)


def begin(backend: Any, words: set[str], cell: Any) -> None:
    """Record and compile, as the words of the way say. Raises SystemExit if that cannot be."""
    backend.accelerate()
    faster = backend.faster
    if "compiled" in words and backend.trunk.instead is None:
        sys.exit(f"the compiler: {faster.fault}")
    if "graphs" in words and (faster.graphs is None or faster.graphs.off):
        sys.exit(f"small batches cannot be recorded with {backend.trunk.attention.name}")


def rate(cell: Any, dtype: str) -> float:
    """FLOP/s of matrix products."""
    from gpu_drive import product_rate

    return product_rate(dtype, cell.device, 256 if cell.cpu_smoke else 8192)


def heading(cell: Any) -> dict[str, Any]:
    """The machine, and versions."""
    import platform

    import torch
    import transformers

    name = torch.cuda.get_device_name() if cell.device == "cuda" else platform.processor() or platform.machine()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version()}
    return {"device": name, "smoke": cell.cpu_smoke, **versions}


def run(settings: dict[str, Any]) -> None:
    """Measure what `gpu` asks for."""
    cell = SimpleNamespace(**settings)
    where = {"stage": cell.stage, "model": cell.model, "way": cell.way}
    measure(cell, lambda row: append(cell.out, {**where, **row}))
