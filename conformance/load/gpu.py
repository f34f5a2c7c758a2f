"""A GPU, measured by four commands, each at most eight minutes; whatever breaks, what was measured before is in a file.

    python conformance/load/gpu.py --stage parity --out DIR     the device; each kernel and dtype against float32 on the CPU
    python conformance/load/gpu.py --stage models --out DIR     BERT-base, MiniLM and BGE-M3, beside sentence-transformers
    python conformance/load/gpu.py --stage large  --out DIR     an 8B decoder in bfloat16 and fp8, and how near fp8 comes
    python conformance/load/gpu.py --stage http   --out DIR     requests/s of a server

Every cell, a model in a way, has a child process and a time limit of its own. A child appends each row to DIR/rows.jsonl as
soon as it is measured; where one raises, dies or takes too long, a row says so, its stderr (and that of a server) is in
DIR/STAGE.MODEL.WAY.stderr, and the next cell begins. A stage that has no time left says that of each cell it leaves out.

Models have the shape of known ones and random weights, made on the device (see `gpu_models`). A way is words joined by `+`:
`plain`, kernel by kernel; `graphs`, small batches launched at once; `compiled`, torch.compile; `fp8`; `outputs`, all that the
model has and not its dense vector alone; `peer`, sentence-transformers with the same weights; or the name of a kernel.

Columns: see `gpu_cell`. In process, torch, transformers and numpy are enough. A server needs more packages: `gpu_wheels.py`
gathers them into a folder, `--wheels DIR` installs them beside, for this run only. `--cpu-smoke` runs all of it with tiny
models on a CPU, to see that the script works: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
KERNELS = ("flash-attn 3", "torch varlen_attn", "SDPA on padded groups")
ON_CPU = ("SDPA per sequence", "SDPA on padded groups")
BEST, FP8 = "graphs+compiled", "fp8+compiled"
STAGES = ("parity", "models", "large", "http")
BREAKS = ("raises", "dies", "hangs")
STDERR_LETTERS = 300
PRELOADED = ("gpu_parity", "torch._dynamo", "torch._functorch.aot_autograd", "transformers.models.bert.configuration_bert")
NO_DEVICE = "torch finds no CUDA device here: nothing was measured (--cpu-smoke tries the script with tiny models)"


@dataclass(frozen=True)
class Cell:
    """What a child measures; `seconds`: after which it is killed."""

    stage: str
    model: str
    way: str
    seconds: float

    @property
    def errors(self) -> str:
        """The file of its stderr, under --out."""
        return re.sub(r"[^\w.+-]+", "-", f"{self.stage}.{self.model}.{self.way}.stderr")


def cells(stage: str, options: Any) -> list[Cell]:
    """Those of a stage, what matters most first."""
    found = [(model, way) for model, ways in _ways(stage, options).items() for way in ways]
    limit = options.cell_seconds or (240 if stage == "large" else 120)
    return [
        Cell(stage, model, way, limit)
        for model, way in found
        if (not options.models or model in options.models) and (not options.ways or way in options.ways)
    ]


def _ways(stage: str, options: Any) -> dict[str, tuple[str, ...]]:
    smoke = options.cpu_smoke
    if stage == "parity":
        kernels, dtypes = (ON_CPU, ("float32", "bfloat16")) if smoke else (KERNELS, ("float16", "bfloat16", "float32"))
        ways = tuple(f"{kernel} in {dtype}" for kernel in kernels for dtype in dtypes)
        return {"device": ("probe",), **dict.fromkeys(("tiny BERT", "tiny Qwen3") if smoke else ("BERT", "Qwen3"), ways)}
    if stage == "models" and smoke:
        ways = (*options.breaks, "plain", "graphs", "compiled", BEST, FP8, "peer", ON_CPU[1])
        return {"tiny BERT": ways, "tiny M3": ("plain", "outputs")}
    if stage == "models":
        base = (BEST, "peer", "plain", FP8, "compiled", "graphs", *KERNELS)
        return {
            "BERT-base": base,
            "BGE-M3": (BEST, f"{BEST}+outputs", "plain", "outputs", "peer"),
            "MiniLM": (BEST, "peer", "plain"),
        }
    if stage == "large":
        return {"tiny Qwen3": ("plain", "fp8")} if smoke else {"Qwen3-Embedding-8B": ("plain", "compiled", FP8, "fp8")}
    workers = [f"{number} HTTP processes" for number in options.http_workers.split(",") if number]
    return {"tiny BERT" if smoke else "BERT-base": tuple(workers)}


def run(stage: str, options: Any) -> None:
    """All cells of a stage, one after another, as far as its time goes."""
    until = time.monotonic() + 60 * options.minutes
    for cell in cells(stage, options):
        left = until - time.monotonic()
        fault = measured(cell, left, options) if left > 0 else "no time was left"
        if fault is not None:
            append(options.out, {"stage": stage, "model": cell.model, "way": cell.way, "failed": fault})


def measured(cell: Cell, left: float, options: Any) -> str | None:
    """Have a child measure a cell; why it did not to the end, or None."""
    settings = {name: getattr(options, name) for name in ("out", "device", "dtype", "budget", "pass_seconds", "cpu_smoke")}
    limit, errors = min(cell.seconds, left), Path(options.out, cell.errors)
    errors.touch()
    child = context(options.cpu_smoke and not options.anew).Process(
        target=_child, args=({**asdict(cell), **settings}, str(errors))
    )
    child.start()
    child.join(limit)
    code = child.exitcode
    _end(child)
    if code is None:
        return f"took more than {limit:.0f} s"
    if not code:
        return None
    last = errors.read_text(errors="replace").strip().rpartition("\n")[2][-STDERR_LETTERS:]
    return f"killed by signal {-code}: {last}" if code < 0 else last or f"exit status {code}"


def context(forks: bool) -> Any:
    """How children begin: each anew, or as a copy of a process that has imported what they need, which saves seconds a cell. A
    copy may not use a GPU that an import has looked at."""
    if not forks:
        return multiprocessing.get_context("spawn")
    copies = multiprocessing.get_context("forkserver")
    copies.set_forkserver_preload([*PRELOADED])
    return copies


def _child(cell: dict[str, Any], errors: str) -> None:
    os.setsid()  # a group of its own, to be ended with all that it starts
    file = os.open(errors, os.O_WRONLY | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    import gpu_cell

    gpu_cell.run(cell)


def _end(child: Any) -> None:
    """And what it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.kill()
    child.join()


def append(out: str, row: dict[str, Any]) -> None:
    """A row, on disk when this returns."""
    with Path(out, "rows.jsonl").open("a") as file:
        file.write(json.dumps(row, default=float) + "\n")
        file.flush()
        os.fsync(file.fileno())


def table(out: str, since: int) -> None:
    """For people, the rows from that one on."""
    for line in Path(out, "rows.jsonl").read_text().splitlines()[since:]:
        row = json.loads(line)
        start = "  ".join(
            f"{row.pop(name, ''):{width}}" for name, width in (("stage", 6), ("model", 18), ("way", 32), ("tokens", 5))
        )
        print(start, "  ".join(f"{name} {_shown(value)}" for name, value in row.items()))


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def install(wheels: str, beside: str) -> None:
    """Unpack wheels into a folder that children import from."""
    files = [str(path) for path in sorted(Path(wheels).glob("*.whl"))]
    if not files:
        sys.exit(f"--wheels {wheels}: no wheel is there")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", beside, *files], check=True
    )


def read_options() -> Any:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", default=",".join(STAGES), help="separated by commas [default: all]")
    parser.add_argument("--out", metavar="DIR", help="where rows and stderr go [default: a new folder]")
    parser.add_argument("--models", help="some of the models, by name, separated by commas [default: all]")
    parser.add_argument("--ways", help="some of the ways, separated by commas [default: all]")
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--budget", type=int, default=16384, help="tokens of a pass at most")
    parser.add_argument("--pass-seconds", type=float, default=1.5, help="of each measurement")
    parser.add_argument("--cell-seconds", type=float, help="after which a child is killed [default: 120, of large models 240]")
    parser.add_argument("--minutes", type=float, default=8.0, help="of a stage")
    parser.add_argument("--http-workers", default=f"0,1,{min(8, max(2, (os.cpu_count() or 2) - 6))}", help="one number a cell")
    parser.add_argument("--wheels", metavar="DIR", help="wheels of packages that are not installed here")
    parser.add_argument("--cpu-smoke", action="store_true", help="tiny models on a CPU: does the script work?")
    parser.add_argument("--anew", action="store_true", help="with --cpu-smoke, begin each child anew, as on a GPU")
    parser.add_argument("--breaks", default="", help=f"with --cpu-smoke, cells that fail: of {', '.join(BREAKS)}")
    options = parser.parse_args()
    options.dtype = options.dtype or ("float32" if options.cpu_smoke else "float16")
    for name in ("stage", "models", "ways", "breaks"):
        value = getattr(options, name)
        setattr(options, name, value.split(",") if value else [])
    unknown = {*options.stage} - {*STAGES}
    if unknown:
        parser.error(f"--stage: {', '.join(sorted(unknown))} is none of {', '.join(STAGES)}")
    if options.cpu_smoke:
        options.device, options.budget = "cpu", min(options.budget, 1024)
        os.environ["OMP_NUM_THREADS"] = "1"  # teams of threads meet after each small operation
    if not any(cells(stage, options) for stage in options.stage):
        parser.error("--models, --ways: no cell has these")
    options.out = options.out or tempfile.mkdtemp(prefix="gpu-")
    return options


def main() -> None:
    """See the module."""
    options = read_options()
    with tempfile.TemporaryDirectory() as beside:
        if options.wheels:
            install(options.wheels, beside)
        path = [str(HERE.parent), str(HERE.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")]), beside]
        os.environ["PYTHONPATH"] = os.pathsep.join(path)  # of servers; children that begin anew have `sys.path`
        sys.path[:] = [*path, *sys.path]
        asked = [sys.executable, "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"]
        if options.device.startswith("cuda") and subprocess.run(asked, check=False).returncode:
            sys.exit(NO_DEVICE)
        Path(options.out).mkdir(parents=True, exist_ok=True)
        rows = Path(options.out, "rows.jsonl")
        rows.touch()
        before = len(rows.read_text().splitlines())
        for stage in options.stage:
            run(stage, options)
        table(options.out, before)
        print(f"rows: {rows}")


if __name__ == "__main__":
    main()
