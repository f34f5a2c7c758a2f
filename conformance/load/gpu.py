"""A GPU, measured by one command: tokens/s, the time of a lone text, share of the device's product rate, memory, requests/s.

    python conformance/load/gpu.py [--models …] [--ways …] [--dtype float16] [--seconds 2] [--minutes 9] \\
        [--http-workers 1,8] [--wheels DIR]

Models have the shape of known ones and random weights, made on the device. Each is driven in process as the engine drives it:
one queue, batches taken by as many threads as the backend takes at once. Texts of 5, 50, 512 and 8192 tokens, and a mix (70 %
of 5–30 tokens, 30 % of 100–400). The share is of the rate at which this device multiplies large matrices of that precision,
measured first. `small/s` is tokens/s in passes of a thousand tokens, where launches cost more than arithmetic.

Each model is measured in ways that build on each other, so that each row says what one more of them brings: `plain`, kernel by
kernel; `graphs`, small batches launched at once; `compiled`, torch.compile, which is how a server ends up. `plain` also with
each other attention kernel of this installation, and in fp8 where the card has it. Over HTTP nothing is compiled: that would
take place while it is measured.

In process, torch, transformers and numpy are enough. Over HTTP, the server's packages are needed too: bring them as wheels in
a folder, `--wheels DIR`; they are installed beside, for this run only. What could not be measured is said, and why. Prints a
table and one line of JSON. `--cpu-smoke` runs all of it with tiny models on a CPU, to see that the script works: its figures
mean nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parent), str(HERE.parents[2])]

LENGTHS = {"5": ((1.0, (5, 5)),), "50": ((1.0, (50, 50)),), "512": ((1.0, (512, 512)),), "8192": ((1.0, (8192, 8192)),)}
TRAFFIC = {**LENGTHS, "mixed": ((0.7, (5, 30)), (0.3, (100, 400)))}
WAYS = ("plain", "graphs", "compiled")
SOME = ("5", "50", "512")
COMPILE_SECONDS = 150.0


class Clock:
    """When to stop beginning new measurements."""

    def __init__(self, minutes: float) -> None:
        self._until = time.monotonic() + 60 * minutes

    @property
    def left(self) -> float:
        return self._until - time.monotonic()


@dataclass(frozen=True)
class Bench:
    """How to measure: the settings, FLOP/s of the device's products, and when to stop."""

    options: Any
    rate: float
    clock: Clock


def cells(name: str, made: Any, label: dict[str, str], traffic: list[str], bench: Bench) -> list[dict[str, Any]]:
    """A row a traffic; what fails is a row that says so."""
    import torch
    from gpu_drive import Source, drive, lone, small

    from hybridtei.errors import BackendError

    options, rows = bench.options, []
    for kind in traffic:
        longest = made.backend.spec.max_input_length
        if kind in LENGTHS and int(kind) > longest:
            continue
        if bench.clock.left < 2 * options.seconds:
            rows.append({"model": name, **label, "tokens": kind, "failed": "no time was left"})
            continue
        source = Source(TRAFFIC[kind], longest, made.backend.spec.vocab_size)
        on_gpu = options.device.startswith("cuda")
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        try:
            drive(made.backend, source, options.budget, 0.2 * options.seconds)  # warm
            tokens, texts, keys = drive(made.backend, source, options.budget, options.seconds)
            row = {"tokens_per_s": tokens, "texts_per_s": texts}
            row |= {"small_tokens_per_s": small(made.backend, source, options), "lone_ms": lone(made.backend, source)}
            row |= {"share": tokens * made.flop_per_token(keys) / bench.rate}
            row |= {"peak_mb": torch.cuda.max_memory_allocated() / 1e6 if on_gpu else 0.0}
        except (BackendError, RuntimeError) as error:
            row = {"failed": str(error).splitlines()[0]}
        rows.append({"model": name, **label, "tokens": kind, **row})
    return rows


def of_model(name: str, shape: Any, bench: Bench) -> list[dict[str, Any]]:
    """All rows of a model: in each way, by each other kernel, and in fp8."""
    from gpu_models import make

    options, rows = bench.options, []
    made = make(shape, dtype=options.dtype, device=options.device)
    told = {"dtype": options.dtype, "kernel": made.backend.trunk.attention.name}
    for way in WAYS:
        label = {**told, "way": way}
        fault = taken(way, made.backend, bench)
        if fault is not None:
            rows.append({"model": name, **label, "tokens": "all", "failed": fault})
            continue
        if way in options.ways:
            rows += cells(name, made, label, [*TRAFFIC] if way == options.ways[-1] else [*SOME], bench)
        for which in other_kernels(made.backend.trunk, options) if way == "plain" else []:
            rows += by_kernel(name, made, which, bench)
    release(made)
    del made
    if options.cpu_smoke or has_fp8(options.device):
        rows += in_fp8(name, shape, bench)
    return rows


def taken(way: str, backend: Any, bench: Bench) -> str | None:
    """Change a backend to a way from the one before; why that cannot be, or None."""
    from hybridtei.backends.torch.acceleration import AccelerationOptions

    options, faster = bench.options, backend.faster
    if way == "graphs" and {"graphs", "compiled"} & {*options.ways}:
        faster.begin()
        if faster.graphs is None:
            return f"batches cannot be recorded with {backend.trunk.attention.name}"
    if way == "compiled" and way in options.ways:
        faster.options = AccelerationOptions(
            graphs=True, compiled="true", compiler="aot_eager" if options.cpu_smoke else "inductor"
        )
        faster.begin()
        if not faster.compiling.ended.wait(min(COMPILE_SECONDS, max(bench.clock.left, 0))):
            return "the compiler was not done in time"
        return faster.compiling.fault  # type: ignore[no-any-return]
    return None


def other_kernels(trunk: Any, options: Any) -> list[str]:
    """Names of the kernels of this installation that could have been chosen too; on a CPU, of those that run there."""
    import torch

    from hybridtei.backends.torch import attention
    from hybridtei.backends.torch.attention import facts_of

    facts = facts_of(trunk.forms, trunk.dtype, torch.device(options.device))
    able = [one.name for one in attention.choices(facts)] if facts.device == "cuda" else [attention.PADDED]
    return [which for which in able if which != trunk.attention.name]


def by_kernel(name: str, made: Any, which: str, bench: Bench) -> list[dict[str, Any]]:
    """Two rows of another kernel; the one that was chosen is put back."""
    from hybridtei.backends.torch.attention import OPENERS

    trunk, told = made.backend.trunk, {"dtype": bench.options.dtype, "kernel": which, "way": "plain"}
    chosen = trunk.kernel
    try:
        trunk.kernel = OPENERS[which]()
        return cells(name, made, told, ["50", "mixed"], bench)
    except Exception as error:  # installed, and not for this torch or this card
        return [{"model": name, **told, "tokens": "mixed", "failed": f"{type(error).__name__}: {error}"}]
    finally:
        trunk.kernel = chosen


def in_fp8(name: str, shape: Any, bench: Bench) -> list[dict[str, Any]]:
    """Rows with the trunk's matrices in eight bits; the share stays that of the rate in the precision asked for."""
    from gpu_models import make

    from hybridtei.backends.torch.fp8 import replace_linears

    made = make(shape, dtype="bfloat16", device=bench.options.device)
    for layer in replace_linears(made.backend.trunk.model):
        layer.exact = None
    made.backend.catch_up()
    told = {"dtype": "fp8", "kernel": made.backend.trunk.attention.name, "way": "plain"}
    rows = cells(name, made, told, ["50", "512", "mixed"], bench)
    release(made)
    return rows


def has_fp8(device: str) -> bool:
    import torch

    return device.startswith("cuda") and torch.cuda.get_device_capability() >= (9, 0)


def release(made: Any) -> None:
    import gc

    made.backend.close()
    gc.collect()
    made.backend.make_room()


def over_http(name: str, bench: Bench) -> tuple[list[dict[str, Any]], str | None]:
    """(rows, None), or (none, why there are none)."""
    import gpu_http

    options, lacking = bench.options, gpu_http.lacking()
    if lacking:
        return [], f"it needs {', '.join(lacking)}: bring them as wheels, --wheels DIR"
    if bench.clock.left < 30:
        return [], "no time was left"
    workers = [int(number) for number in options.http_workers.split(",") if number]
    try:
        return gpu_http.measure(
            name, dtype=options.dtype, device=options.device, workers=workers, seconds=options.seconds, few=options.cpu_smoke
        ), None
    except (Exception, SystemExit) as error:
        return [], f"{type(error).__name__}: {error}"


def install(wheels: str, beside: str) -> None:
    """Unpack wheels into a folder that this process and its children import from."""
    files = [str(path) for path in sorted(Path(wheels).glob("*.whl"))]
    if not files:
        sys.exit(f"--wheels {wheels}: no wheel is there")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", beside, *files]
    subprocess.run(pip, check=True)
    sys.path.append(beside)


def heading(options: Any, rate: float) -> dict[str, Any]:
    import torch
    import transformers

    on_gpu = options.device.startswith("cuda")
    return {
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine(),
        "smoke": options.cpu_smoke,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "dtype": options.dtype,
        "budget_tokens": options.budget,
        "product_tflops": rate / 1e12,
    }


def table(told: dict[str, Any], rows: list[dict[str, Any]], http: list[dict[str, Any]], unmeasured: list[str]) -> None:
    """For people; then the same as one line of JSON."""
    print(", ".join(f"{name} {value}" for name, value in told.items()))
    speeds = f"{'tokens/s':>12}{'texts/s':>10}{'small/s':>10}{'lone ms':>9}{'share':>7}{'MB':>8}"
    print(f"{'model':22}{'dtype':>10}  {'attention':24}{'way':10}{'tokens':>7}{speeds}")
    for row in rows:
        start = f"{row['model']:22}{row['dtype']:>10}  {row['kernel']:24}{row['way']:10}{row['tokens']:>7}"
        if "failed" in row:
            print(f"{start}  not measured: {row['failed']}")
            continue
        speed = f"{row['tokens_per_s']:12.0f}{row['texts_per_s']:10.0f}{row['small_tokens_per_s']:10.0f}{row['lone_ms']:9.2f}"
        print(f"{start}{speed}{row['share']:7.0%}{row['peak_mb']:8.0f}")
    if http:
        speeds = f"{'tokens/s':>12}{'req/s':>10}{'p50 ms':>9}{'p95 ms':>9}"
        print(f"{'over HTTP':22}{'workers':>10}  {'traffic':24}{'clients':>7}{speeds}")
    for row in http:
        start = f"{row['model']:22}{row['http_workers']:>10}  {row['traffic']:24}{row['clients']:>7}"
        print(f"{start}{row['tokens_per_s']:12.0f}{row['requests_per_s']:10.0f}{row['p50_ms']:9.1f}{row['p95_ms']:9.1f}")
    for line in unmeasured:
        print(line)
    requests = [
        {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in row.items()} for row in http
    ]
    print(json.dumps({**told, "rows": rows, "http": requests, "unmeasured": unmeasured}, default=float))


def read_options() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", help="some of the models, by name, separated by commas [default: all]")
    parser.add_argument("--ways", default=",".join(WAYS), help="which to measure of those below, separated by commas")
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--budget", type=int, default=16384, help="tokens of a pass at most")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--minutes", type=float, default=9.0, help="after which no measurement is begun")
    parser.add_argument("--http-workers", default=f"1,{min(8, max(2, (os.cpu_count() or 2) - 6))}", help="empty: no HTTP")
    parser.add_argument("--wheels", metavar="DIR", help="wheels of packages that are not installed here")
    parser.add_argument("--cpu-smoke", action="store_true", help="tiny models on a CPU: does the script work?")
    options = parser.parse_args()
    if options.cpu_smoke:
        options.device, options.dtype, options.budget = "cpu", "float32", 1024
        os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: its teams of threads meet after each small operation
    options.dtype = options.dtype or "float16"
    options.ways = [way for way in WAYS if way in options.ways.split(",")]
    if not options.ways:
        parser.error(f"--ways: none of {', '.join(WAYS)}")
    return options


def run(options: Any) -> None:
    from gpu_drive import product_rate
    from gpu_models import SHAPES, SMOKE

    clock = Clock(options.minutes)
    shapes = SMOKE if options.cpu_smoke else SHAPES
    names = options.models.split(",") if options.models else [*shapes]
    rate = product_rate(options.dtype, options.device, 512 if options.cpu_smoke else 8192)
    bench = Bench(options, rate, clock)
    rows, http, unmeasured = [], [], []
    for name in names:
        rows += of_model(name, shapes[name], bench)
        if shapes[name].http and options.http_workers:
            found, why = over_http(name, bench)
            http += found
            unmeasured += [f"{name} over HTTP was not measured: {why}"] if why else []
    table(heading(options, rate), rows, http, unmeasured)


def main() -> None:
    options = read_options()
    with tempfile.TemporaryDirectory() as beside:
        if options.wheels:
            install(options.wheels, beside)
        os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[2]), beside, os.environ.get("PYTHONPATH", "")])
        import torch

        if options.device.startswith("cuda") and not torch.cuda.is_available():
            sys.exit("torch finds no CUDA device here: nothing was measured (--cpu-smoke tries the script with tiny models)")
        run(options)


if __name__ == "__main__":
    main()
