"""A GPU, measured in 6.5 minutes: does it work, how fast is each model in each way, how fast a
server.

    python -m conformance.load.gpu [--models BERT-base,BGE-M3] [--ways plain,fp8] [--minutes 6.5]
    [--out DIR]

In this order: 90 s of `pytest -m gpu`; 150 s of rates, in texts of 512 and 50 tokens; 60 s of a
server, asked for 1 and 32 texts; 90 s of fp8 and of other kernels. What follows them runs if
`--minutes` allows. Models have the shape of known ones and random weights, made on the device:
nothing is downloaded, and torch, transformers and numpy are enough for all but the server and its
tests. A machine without an index needs these wheels for them, 4.4 MB (of Python 3.12: `pip download
--no-deps --python-version 3.12 --only-binary=:all:`): litestar, litestar-htmx, msgspec, multipart,
sniffio, polyfactory, faker, rich-click, orjson, uvicorn, httptools, backports.zstd; pytest for the
tests.

Every model in a way is a cell: a child process with a time limit of its own, which prints each row
and appends it to DIR/rows.jsonl as soon as it is measured. Where a child raises, dies or takes too
long, a row says so, its stderr is in DIR/MODEL.WAY.stderr, and the next cell begins. `--cpu-smoke`
runs tiny models on a CPU, to see that the program works.

A way is `tests`; `server`; `nearness`, each kernel and dtype against float32 on the CPU;
`transformers`, its modules with the same weights, on texts of one length; or words joined by `+`:
`plain`; `fp8`; `outputs`, all of the model's outputs; `FA3` or `FA4`, that implementation of flash
attention; `cuDNN`, in padded groups; or the name of a kernel. Columns: `tokens/s`, `texts/s` of
packed batches, two under way at once; `small`, tokens/s in passes of a thousand tokens; `lone ms`,
of a single text; `launches` and `host us` of a large pass; `share`, of the rate at which the device
multiplies large matrices; `deviation`, of states, relative to the largest; `cosine`, the least of
dense vectors: of fp8 with those before, of ours with transformers'.
"""

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import Request

import numpy as np
import torch
import transformers
from torch.nn.functional import linear

from conformance import processes
from conformance.load.gpu_models import SHAPES, Mix, Shape, batches_of, drawn, make, packed
from conformance.load.launches import Launches
from hybridtei.batch import Head, PackedBatch
from hybridtei.inference.backends.heads import kept_rows
from hybridtei.inference.backends.torch import kernels
from hybridtei.inference.backends.torch.backend import DTYPES
from hybridtei.inference.backends.torch.fp8 import product, to_eight_bits
from hybridtei.inference.backends.torch.fusing import added

Row = dict[str, Any]

COLUMNS = {
    "model": 18,
    "way": 21,
    "dtype": 8,
    "kernel": 21,
    "tokens": 6,
    "tokens/s": 10,
    "texts/s": 9,
    "small": 9,
}
COLUMNS |= {"lone ms": 8, "launches": 8, "host us": 8, "share": 8, "peak MB": 8}
COLUMNS |= {"deviation": 10, "cosine": 8}
FLASH, GROUPS, EACH = kernels.FLASH, kernels.PADDED, kernels.PER_SEQUENCE
# Seconds -> (model, way): what matters most first, since a call may end before the last
Phases = Sequence[tuple[float, Sequence[tuple[str, str]]]]
PHASES: Phases = (
    (90, [("BERT", "tests")]),
    (
        150,
        [
            ("BERT-base", "plain"),
            ("BGE-M3", "outputs"),
            ("MiniLM", "plain"),
            ("Qwen3-Embedding-8B", "plain"),
        ],
    ),
    (60, [("BERT-base", "server")]),
    (
        90,
        [
            ("BERT-base", "fp8"),
            ("Qwen3-Embedding-8B", "fp8"),
            ("BERT-base", "FA3"),
            ("BERT-base", "FA4"),
            ("BERT-base", "cuDNN"),
        ],
    ),
    (
        600,
        [
            ("BERT", "nearness"),
            ("Qwen3", "nearness"),
            ("BERT-base", "transformers"),
            ("BERT-base", GROUPS),
            ("BGE-M3", "transformers"),
            ("MiniLM", "transformers"),
        ],
    ),
)
SMOKE: Phases = (
    (90, [("tiny BERT", "tests")]),
    (300, [("tiny BERT", "plain"), ("tiny M3", "outputs")]),
    (60, [("tiny BERT", "server")]),
    (90, [("tiny Qwen3", "fp8")]),
    (
        300,
        [
            ("tiny BERT", "nearness"),
            ("tiny Qwen3", "nearness"),
            ("tiny BERT", "transformers"),
            ("tiny Qwen3", "transformers"),
            ("tiny BERT", GROUPS),
            ("tiny BERT", FLASH),
        ],
    ),
)
IMPLEMENTATIONS = frozenset({"FA3", "FA4"})
WORDS = frozenset({"plain", "fp8", "outputs", "cuDNN"}) | IMPLEMENTATIONS
MIXES: dict[str, Mix] = {str(length): ((1.0, (length, length)),) for length in (512, 50)}
PROBE = (9, 250, 61, 33, 1, 512)
SMALL_TOKENS = 1024
# The largest deviation of states from float32's, relative to the largest state.
NEAR = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 0.1}


def measured(shape: Shape, way: str, options: argparse.Namespace) -> Iterator[Row]:
    """Measure a cell. Raises as torch, its libraries and compilers do."""
    if way == "nearness":
        for kernel in (EACH, GROUPS) if options.cpu_smoke else (FLASH, GROUPS):
            for dtype in (
                ("float32", "bfloat16") if options.cpu_smoke else ("float16", "bfloat16", "float32")
            ):
                yield {
                    "dtype": dtype,
                    "kernel": kernel,
                    **nearness(shape, kernel, dtype, options.device),
                }
    elif way == "tests":
        yield run_tests(options)
    elif way == "server":
        yield from served_rates(options)
    elif way == "transformers":
        for length in (50, 512):
            yield beside_transformers(shape, length, options)
    else:
        yield from speeds(shape, way, options)


def run_tests(options: argparse.Namespace) -> Row:
    """Run the tests of a GPU, which are skipped without one."""
    folder = "tests/inference/backends/torch"
    path = f"{folder}/attention" if options.cpu_smoke else folder
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-rf", path]
    # More words than the project's -q
    ended = subprocess.run([*command, "-v"], capture_output=True, text=True, check=False)
    (*_, last) = (ended.stdout + ended.stderr).strip().splitlines() or ["no output"]
    return {"failed" if ended.returncode else "note": last.strip("= ")}


def served_rates(options: argparse.Namespace) -> Iterator[Row]:
    """Measure a server of ModernBERT's shape, asked for 1 and for 32 texts of about 50 words."""
    # It needs msgspec
    from conformance.families.shapes.checkpoint import read_checkpoints, write_checkpoint

    name = "TinyBERT_General_4L_312D" if options.cpu_smoke else "gte-modernbert-base"
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, name)
        write_checkpoint(model, read_checkpoints()[name])
        port = processes.free_port()
        flags = ("--model-id", str(model), "--backend", "torch", "--dtype", options.dtype)
        command = processes.served(port, *flags)
        with processes.started(command, port, Path(options.out, "server.log")):
            for size in (1, 32):
                row = {"dtype": options.dtype, "tokens": f"{size} x 50", "note": name}
                yield row | asked(f"http://127.0.0.1:{port}/embed", size, options)


def asked(url: str, size: int, options: argparse.Namespace) -> Row:
    """Ask a server with 64 clients at once, or 2 in a smoke test."""
    clients = 2 if options.cpu_smoke else 64
    until = time.perf_counter() + max(options.seconds, 0.5)

    def ask(client: int) -> tuple[int, float]:
        count, longest = 0, 0.0
        while not count or time.perf_counter() < until:
            texts = [f"{client} {count} {place} " + "word " * 47 for place in range(size)]
            began = time.perf_counter()
            body = json.dumps({"inputs": texts}).encode()
            request = Request(url, body, {"content-type": "application/json"})
            with processes.DIRECT.open(request, timeout=60) as answer:
                answer.read()
            longest = max(longest, time.perf_counter() - began)
            count += 1
        return count, longest

    began = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        counts, longest = zip(*pool.map(ask, range(clients)), strict=True)
    texts = size * sum(counts) / (time.perf_counter() - began)
    return {"texts/s": texts, "lone ms": 1000 * max(longest)}


def nearness(shape: Shape, kernel: str, dtype: str, device: str) -> Row:
    """Compare states of the device with float32's on the CPU, of the same weights."""
    exact = make(shape, "float32", "cpu", drawn("cpu", torch.float32, "cpu"))
    backend = make(shape, dtype, device, drawn(device, DTYPES[dtype], "cpu"))
    with_kernel(backend, kernel)
    expected, found = (
        one.forward(packed(one, PROBE, {Head.DENSE, Head.TOKENS})) for one in (exact, backend)
    )
    worst = deviation(
        torch.from_numpy(found.tokens.values), torch.from_numpy(expected.tokens.values)
    )
    far = {} if worst <= NEAR[dtype] else {"failed": f"farther than {NEAR[dtype]:.2g}"}
    return {"deviation": worst, "cosine": cosine(found.dense, expected.dense), **far}


def speeds(shape: Shape, way: str, options: argparse.Namespace) -> Iterator[Row]:
    """Measure a model, a row a kind of traffic."""
    words = {*way.split("+")}
    dtype = "bfloat16" if "fp8" in words else options.dtype
    backend = make(shape, dtype, options.device)
    row = {"dtype": "fp8" if "fp8" in words else dtype, "kernel": backend.trunk.attention}
    for name in words & IMPLEMENTATIONS:
        torch.nn.attention.activate_flash_attention_impl(name)
    if "cuDNN" in words:
        with_kernel(backend, GROUPS)
        for enable in ("flash", "mem_efficient", "math"):
            getattr(torch.backends.cuda, f"enable_{enable}_sdp")(False)
    if not words <= WORDS:
        with_kernel(backend, way)
        row["kernel"] = way
    if "fp8" in words:
        asked = packed(backend, PROBE, {Head.DENSE})
        before = backend.forward(asked).dense
        to_eight_bits(backend.trunk.model)
        backend.catch_up()
        backend.dtype, row["cosine"] = "fp8", cosine(backend.forward(asked).dense, before)
    heads = backend.spec.heads - {Head.TOKENS} if "outputs" in words else {Head.DENSE}
    peak = product_rate(dtype, options)
    for kind, mix in MIXES.items():
        if kind.isdigit() and int(kind) > shape.longest:
            continue
        batches, small, lone = (
            batches_of(backend, mix, tokens, heads) for tokens in (options.budget, SMALL_TOKENS, 1)
        )
        if options.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        tokens, texts = rate(backend, batches, options.seconds)
        row |= {
            "tokens": kind,
            "tokens/s": tokens,
            "texts/s": texts,
            "small": rate(backend, small, options.seconds)[0],
        }
        row |= of_a_pass(backend, batches[0])
        row["share"] = tokens * flop_per_token(backend, batches) / peak
        row["lone ms"] = 1000 / rate(backend, lone, options.seconds, 1)[1]
        yield {**row, "peak MB": torch.cuda.max_memory_allocated() / 1e6}


def of_a_pass(backend: Any, batch: PackedBatch) -> Row:
    """Count the launches of a pass, and the host's time to launch it (of a CPU: to compute it)."""
    with Launches() as counted:
        backend.forward(batch)
    rows, _ = kept_rows(batch, backend.spec)
    times = []
    for _ in range(5):
        staged = backend.stage(batch, rows)
        with backend.alone():
            began = time.perf_counter()
            backend.launch(staged)
            times.append(time.perf_counter() - began)
    return {"launches": counted.counts.total(), "host us": 1e6 * min(times)}


def beside_transformers(shape: Shape, length: int, options: argparse.Namespace) -> Row:
    """Measure transformers' modules on texts of one length, so without padding, and how near our
    vectors are."""
    kind = {"dtype": DTYPES[options.dtype], "device": options.device}
    torch.manual_seed(0)
    theirs = (
        transformers.AutoModel.from_config(shape.config(), dtype=kind["dtype"])
        .to(options.device)
        .eval()
    )
    weights = theirs.state_dict()
    # Of BGE-M3, for which no text asks here
    heads = ("sparse", "colbert")
    backend = make(
        shape,
        options.dtype,
        options.device,
        lambda name, size: torch.zeros(size, **kind) if name in heads else weights[name],
    )
    count = max(options.budget // length, 1)
    batch = packed(backend, count * [length], {Head.DENSE})
    ids = torch.as_tensor(batch.input_ids.reshape(count, length), device=options.device)
    form = {"use_cache": False} if backend.trunk.causal else {}

    def forward() -> Any:
        with torch.inference_mode():
            states = theirs(input_ids=ids, **form).last_hidden_state
            pooled = {"cls": states[:, 0], "lasttoken": states[:, -1]}.get(shape.pooling)
            return (states.float().mean(1) if pooled is None else pooled.float()).cpu().numpy()

    row = {
        "dtype": options.dtype,
        "tokens": str(length),
        "cosine": cosine(backend.forward(batch).dense, forward()),
    }
    passed, began = 0, time.perf_counter()
    while not passed or time.perf_counter() - began < options.seconds:
        forward()
        passed += 1
    texts = passed * count / (time.perf_counter() - began)
    return {**row, "tokens/s": texts * length, "texts/s": texts}


def with_kernel(backend: Any, name: str) -> None:
    """Have another kernel compute attention."""
    backend.trunk.kernel = kernels.KERNELS[name]


def flop_per_token(backend: Any, batches: Sequence[PackedBatch]) -> float:
    """Of products with weights, and of attention where a query meets as many keys as in these texts
    on average."""
    lengths, model = np.concatenate([batch.lengths for batch in batches]), backend.trunk.model
    # Of the matrix among the arguments
    place = {linear: 1, added: 1, product: 2}
    matrices = [
        node.args[place[node.target]].target for node in model.graph.nodes if node.target in place
    ]
    config, ((heads, _), *_) = backend.spec.config, backend.trunk.forms
    met = (lengths**2).sum() / lengths.sum() / (2 if backend.trunk.causal else 1)
    weights = sum(getattr(model, name).numel() for name in matrices)
    return float(2 * weights + 4 * config["num_hidden_layers"] * heads.count * heads.dim * met)


def rate(
    backend: Any, batches: Sequence[PackedBatch], seconds: float, at_once: int | None = None
) -> tuple[float, float]:
    """Return (tokens/s, texts/s). `at_once`: passes under way [default: as many as the backend
    takes]."""
    backend.forward(batches[0])
    lanes, began = at_once or 1 + backend.ahead, time.perf_counter()

    def work(first: int) -> list[PackedBatch]:
        passed: list[PackedBatch] = []
        while not passed or time.perf_counter() - began < seconds:
            passed.append(batches[(first + len(passed)) % len(batches)])
            backend.forward(passed[-1])
        return passed

    with ThreadPoolExecutor(lanes) as pool:
        passed = [batch for some in pool.map(work, range(lanes)) for batch in some]
    took = time.perf_counter() - began
    return sum(len(batch.input_ids) for batch in passed) / took, sum(map(len, passed)) / took


def product_rate(dtype: str, options: argparse.Namespace) -> float:
    """Return the FLOP/s of matrix products: the best of several, since other programs only slow one
    down."""
    size, best = 256 if options.cpu_smoke else 8192, 0.0
    a, b = (torch.randn(size, size, device=options.device).to(DTYPES[dtype]) for _ in range(2))
    for _ in range(12):
        began = time.perf_counter()
        # Waits for the device
        (a @ b)[0, 0].item()
        best = max(best, 2 * size**3 / (time.perf_counter() - began))
    return best


def deviation(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference of two tensors, relative to the largest value of the second."""
    found, expected = found.float(), expected.float()
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-12))


def cosine(found: Any, expected: Any) -> float:
    """Return the least of rows with rows."""
    found, expected = (np.asarray(one, dtype=np.float64) for one in (found, expected))
    return float(
        (
            (found * expected).sum(1)
            / np.linalg.norm(found, axis=1)
            / np.linalg.norm(expected, axis=1)
        ).min()
    )


def run(cell: tuple[str, str], options: argparse.Namespace, limit: float) -> str | None:
    """Measure a cell in a child process. Return the reason why it failed, or None."""
    command = [
        sys.executable,
        "-m",
        "conformance.load.gpu",
        *sys.argv[1:],
        "--out",
        options.out,
        "--cell",
        *cell,
    ]
    path = Path(options.out, re.sub(r"[^\w.+-]+", "-", f"{'.'.join(cell)}.stderr"))
    with path.open("w") as errors:
        try:
            code = subprocess.run(command, timeout=limit, stderr=errors, check=False).returncode
        except subprocess.TimeoutExpired:
            return f"took more than {limit:.0f} s"
    last = path.read_text().strip().rpartition("\n")[2][-200:]
    return f"exit status {code}: {last}" if code else None


def tell(options: argparse.Namespace, cell: tuple[str, str], row: Row) -> None:
    """Have a row printed and on disk when this returns."""
    row = {"model": cell[0], "way": cell[1], **row}
    print(line(row), flush=True)
    with Path(options.out, "rows.jsonl").open("a") as file:
        file.write(json.dumps(row, default=float) + "\n")


def line(row: Row) -> str:
    """Return a row of the table."""
    values = {name: row.get(name, "") for name in COLUMNS}
    shown = {
        name: format(one, ",.0f" if one > 99 else ".4g") if isinstance(one, float) else one
        for name, one in values.items()
    }
    return " ".join(
        [
            *(f"{text:<{COLUMNS[name]}}" for name, text in shown.items()),
            f"failed: {row['failed']}" if "failed" in row else row.get("note", ""),
        ]
    ).rstrip()


def read_options() -> argparse.Namespace:
    """Return the command line, with `phases`: seconds and cells each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", help="some, by name, separated by commas [default: all]")
    parser.add_argument("--ways", help="some, separated by commas [default: all]")
    parser.add_argument(
        "--out", metavar="DIR", help="where rows and stderr go [default: a new folder]"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="[default: float16, with --cpu-smoke float32]"
    )
    parser.add_argument("--seconds", type=float, default=1.5, help="of each measurement")
    parser.add_argument(
        "--cell-seconds", type=float, default=240.0, help="after which a child is killed"
    )
    parser.add_argument("--minutes", type=float, default=6.5, help="of all cells")
    parser.add_argument(
        "--cpu-smoke", action="store_true", help="tiny models on a CPU: does the program work?"
    )
    parser.add_argument("--cell", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.device, dtype, options.budget = (
        ("cpu", "float32", 1024) if options.cpu_smoke else ("cuda", "float16", 16384)
    )
    options.dtype = options.dtype or dtype
    asked = [None if text is None else text.split(",") for text in (options.models, options.ways)]
    options.phases = [
        (seconds, [cell for cell in cells if _is_asked(cell, asked)])
        for seconds, cells in (SMOKE if options.cpu_smoke else PHASES)
    ]
    if not any(cells for _, cells in options.phases):
        parser.error("--models, --ways: no cell has these")
    return options


def _is_asked(cell: tuple[str, str], names: Sequence[Sequence[str] | None]) -> bool:
    return all(some is None or word in some for word, some in zip(cell, names, strict=True))


def main() -> None:
    """See the module."""
    options = read_options()
    if options.cell:
        for row in measured(SHAPES[options.cell[0]], options.cell[1], options):
            tell(options, options.cell, row)
        return
    if not options.cpu_smoke and not torch.cuda.is_available():
        sys.exit(
            "torch finds no CUDA device here: nothing was measured (--cpu-smoke tries the program "
            "with tiny models)"
        )
    options.out = options.out or tempfile.mkdtemp(prefix="gpu-")
    Path(options.out).mkdir(parents=True, exist_ok=True)
    name = platform.machine() if options.cpu_smoke else torch.cuda.get_device_name()
    rows = Path(options.out, "rows.jsonl")
    print(
        f"{name}, torch {torch.__version__}, transformers {transformers.__version__}; rows: {rows}"
    )
    print(line({name: name for name in COLUMNS}), flush=True)
    until = time.monotonic() + 60 * options.minutes
    for seconds, cells in options.phases:
        ends = min(time.monotonic() + seconds, until)
        for cell in cells:
            left = min(options.cell_seconds, ends - time.monotonic())
            fault = run(cell, options, left) if left > 0 else "no time was left"
            if fault is not None:
                tell(options, cell, {"failed": fault})


if __name__ == "__main__":
    main()
