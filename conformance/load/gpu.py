"""A GPU, measured in process: how near each kernel is, how fast each model is in each way. Prints one table.

    python -m conformance.load.gpu [--models BERT-base,BGE-M3] [--ways plain,compiled] [--minutes 8] [--out DIR]

Models have the shape of known ones and random weights, made on the device: nothing is downloaded, and torch, transformers and
numpy are enough. Every model in a way is a cell: a child process with a time limit of its own, which appends each row to
DIR/rows.jsonl as soon as it is measured. Where a child raises, dies or takes too long, a row says so, its stderr is in
DIR/MODEL.WAY.stderr, and the next cell begins. `--cpu-smoke` runs tiny models on a CPU, to see that the program works.

A way is `nearness`, each kernel and dtype against float32 on the CPU; `transformers`, its modules with the same weights, on
texts of one length; or words joined by `+`: `plain`; `compiled` (`--torch-compile`); `fp8`; `outputs`, all of the model's
outputs; or the name of a kernel. Columns: `tokens/s`, `texts/s` of packed batches, two under way at once; `small`, tokens/s in
passes of a thousand tokens; `lone ms`, of a single text; `share`, of the rate at which the device multiplies large matrices;
`deviation`, of states, relative to the largest; `cosine`, the least of dense vectors: of fp8 with those before, of ours with
transformers'.

Requests/s of a server on a GPU: `python -m conformance.load http_load`, with `--backend torch --dtype float16` in the server's
command.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.nn.functional import linear

from hybridtei.batch import Encoding, Head, PackedBatch, Positions, pack
from hybridtei.inference.backends.heads import HeadLayers
from hybridtei.inference.backends.torch import attention
from hybridtei.inference.backends.torch.backend import DTYPES, TorchBackend
from hybridtei.inference.backends.torch.compiling import NEAR, compile_trunk, deviation
from hybridtei.inference.backends.torch.fp8 import product, to_eight_bits
from hybridtei.inference.backends.torch.ops import ModuleOptions, family_module
from hybridtei.inference.backends.torch.trunk import PackedTrunk
from hybridtei.models.checkpoint.classifiers import LinearLayer
from hybridtei.models.families import run_family

Row = dict[str, Any]
Mix = Sequence[tuple[float, tuple[int, int]]]  # (share, (shortest, longest))

COLUMNS = {"model": 18, "way": 21, "dtype": 8, "kernel": 21, "tokens": 6, "tokens/s": 10, "texts/s": 9, "small": 9}
COLUMNS |= {"lone ms": 8, "share": 8, "peak MB": 8, "deviation": 10, "cosine": 8}
VARLEN, GROUPS, EACH = attention.VARLEN, attention.PADDED, attention.PER_SEQUENCE
# What matters most first: a call may end before the last.
CELLS: dict[str, tuple[str, ...]] = {
    "BERT": ("nearness",),
    "Qwen3": ("nearness",),
    "BERT-base": ("plain", "compiled", "transformers", "fp8", "fp8+compiled", VARLEN, GROUPS),
    "BGE-M3": ("plain", "compiled", "outputs", "transformers"),
    "MiniLM": ("plain", "compiled", "transformers"),
    "Qwen3-Embedding-8B": ("plain", "compiled", "fp8", "fp8+compiled"),
}
SMOKE: dict[str, tuple[str, ...]] = {
    "tiny BERT": ("nearness", "plain", "compiled", "transformers", GROUPS, VARLEN),
    "tiny Qwen3": ("nearness", "fp8+compiled", "transformers"),
    "tiny M3": ("outputs",),
}
WORDS = frozenset({"plain", "compiled", "fp8", "outputs"})
MIXES: dict[str, Mix] = {"mixed": ((0.7, (5, 30)), (0.3, (100, 400)))}
MIXES |= {str(length): ((1.0, (length, length)),) for length in (512, 50, 5, 8192)}
PROBE = (9, 250, 61, 33, 1, 512)
SMALL_TOKENS, BATCHES = 1024, 8
M3_OFFSET = 2  # RoBERTa's positions begin behind its padding id


@dataclass(frozen=True)
class Shape:
    """transformers' name for the classes, its sizes, and more of them. `outputs`: it has BGE-M3's heads."""

    classes: str
    pooling: str
    longest: int
    sizes: Sequence[int]
    outputs: bool = False
    more: Mapping[str, int] = field(default_factory=dict)

    def config(self) -> Any:
        """Return transformers' configuration."""
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
        sizes = {**dict(zip(names, self.sizes, strict=True)), **self.more, "max_position_embeddings": self.longest + M3_OFFSET}
        return getattr(transformers, f"{self.classes}Config")(**sizes)


SMALL, TINY, M3 = (256, 4, 4, 512, 2000), (32, 2, 4, 48, 500), {"type_vocab_size": 1, "pad_token_id": 1}
QWEN3_8B = (4096, 36, 32, 12288, 151665)
SHAPES = {
    "BERT": Shape("Bert", "cls", 512, SMALL),
    "Qwen3": Shape("Qwen3", "lasttoken", 1024, SMALL, more={"num_key_value_heads": 2, "head_dim": 64}),
    "BERT-base": Shape("Bert", "cls", 512, (768, 12, 12, 3072, 30522)),
    "MiniLM": Shape("Bert", "mean", 512, (384, 6, 12, 1536, 30522)),
    "BGE-M3": Shape("XLMRoberta", "cls", 8192, (1024, 24, 16, 4096, 250002), outputs=True, more=M3),
    "Qwen3-Embedding-8B": Shape("Qwen3", "lasttoken", 8192, QWEN3_8B, more={"num_key_value_heads": 8, "head_dim": 128}),
    "tiny BERT": Shape("Bert", "cls", 512, TINY),
    "tiny Qwen3": Shape("Qwen3", "lasttoken", 1024, TINY, more={"num_key_value_heads": 2, "head_dim": 8}),
    "tiny M3": Shape("XLMRoberta", "cls", 512, TINY, outputs=True, more=M3),
}


def measured(shape: Shape, way: str, options: argparse.Namespace) -> Iterator[Row]:
    """Measure a cell. Raises as torch, its libraries and compilers do."""
    if way == "nearness":
        for kernel in (EACH, GROUPS) if options.cpu_smoke else (VARLEN, GROUPS):
            for dtype in ("float32", "bfloat16") if options.cpu_smoke else ("float16", "bfloat16", "float32"):
                yield {"dtype": dtype, "kernel": kernel, **nearness(shape, kernel, dtype, options.device)}
    elif way == "transformers":
        for length in (50, 512):
            yield beside_transformers(shape, length, options)
    else:
        yield from speeds(shape, way, options)


def nearness(shape: Shape, kernel: str, dtype: str, device: str) -> Row:
    """Compare states of the device with float32's on the CPU, of the same weights."""
    exact = make(shape, "float32", "cpu", drawn("cpu", torch.float32, "cpu"))
    backend = make(shape, dtype, device, drawn(device, DTYPES[dtype], "cpu"))
    try:
        with_kernel(backend, kernel)
    except (ImportError, ValueError) as error:
        return {"failed": f"{error}"}
    expected, found = (one.forward(packed(one, PROBE, {Head.DENSE, Head.TOKENS})) for one in (exact, backend))
    worst = deviation(torch.from_numpy(found.tokens.values), torch.from_numpy(expected.tokens.values))
    far = {} if worst <= NEAR[dtype] else {"failed": f"farther than {NEAR[dtype]:.2g}"}
    return {"deviation": worst, "cosine": cosine(found.dense, expected.dense), **far}


def speeds(shape: Shape, way: str, options: argparse.Namespace) -> Iterator[Row]:
    """Measure a model, a row a kind of traffic."""
    words = {*way.split("+")}
    dtype = "bfloat16" if "fp8" in words else options.dtype
    backend = make(shape, dtype, options.device)
    row = {"dtype": "fp8" if "fp8" in words else dtype, "kernel": backend.trunk.attention}
    if not words <= WORDS:
        with_kernel(backend, way)
        row["kernel"] = way
    if "fp8" in words:
        asked = packed(backend, PROBE, {Head.DENSE})
        before = backend.forward(asked).dense
        to_eight_bits(backend.trunk.model)
        backend.catch_up()
        backend.dtype, row["cosine"] = "fp8", cosine(backend.forward(asked).dense, before)
    if "compiled" in words:
        compile_trunk(backend, "aot_eager" if options.cpu_smoke else "inductor")
    heads = backend.spec.heads - {Head.TOKENS} if "outputs" in words else {Head.DENSE}
    peak = product_rate(dtype, options)
    for kind, mix in MIXES.items():
        if kind.isdigit() and int(kind) > shape.longest:
            continue
        batches, small, lone = (batches_of(backend, mix, tokens, heads) for tokens in (options.budget, SMALL_TOKENS, 1))
        if options.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        tokens, texts = rate(backend, batches, options.seconds)
        row |= {"tokens": kind, "tokens/s": tokens, "texts/s": texts, "small": rate(backend, small, options.seconds)[0]}
        row["share"] = tokens * flop_per_token(backend, batches) / peak
        row["lone ms"] = 1000 / rate(backend, lone, options.seconds, 1)[1]
        yield {**row, "peak MB": torch.cuda.max_memory_allocated() / 1e6}


def beside_transformers(shape: Shape, length: int, options: argparse.Namespace) -> Row:
    """Measure transformers' modules on texts of one length, so without padding, and how near our vectors are."""
    kind = {"dtype": DTYPES[options.dtype], "device": options.device}
    torch.manual_seed(0)
    theirs = transformers.AutoModel.from_config(shape.config(), dtype=kind["dtype"]).to(options.device).eval()
    weights = theirs.state_dict()
    heads = ("sparse", "colbert")  # of BGE-M3, for which no text asks here
    backend = make(
        shape, options.dtype, options.device, lambda name, size: torch.zeros(size, **kind) if name in heads else weights[name]
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

    row = {"dtype": options.dtype, "tokens": str(length), "cosine": cosine(backend.forward(batch).dense, forward())}
    passed, began = 0, time.perf_counter()
    while not passed or time.perf_counter() - began < options.seconds:
        forward()
        passed += 1
    texts = passed * count / (time.perf_counter() - began)
    return {**row, "tokens/s": texts * length, "texts/s": texts}


def make(shape: Shape, dtype: str, device: str, tensor_of: Callable[..., Tensor] | None = None) -> Any:
    """Return a TorchBackend. `tensor_of`: weights by transformers' names [default: random ones, see `drawn`]."""
    config, on, precision = shape.config(), torch.device(device), DTYPES[dtype]
    spec: Any = SimpleNamespace(
        folder=shape.classes,
        model_type=config.model_type,
        vocab_size=config.vocab_size,
        max_input_length=shape.longest,
        positions=Positions(M3_OFFSET if shape.outputs else 0),
        pooling=(shape.pooling,),
        sparse=SimpleNamespace(inputs=("hidden",)) if shape.outputs else None,
        multivector=SimpleNamespace(drop="first") if shape.outputs else None,
        classifier=None,
        removed_ids=frozenset(),
        has_token_types=shape.classes == "Bert",
        config=config.to_dict(),
        is_splade=False,
        sparse_width=config.vocab_size,
        is_rounded=False,
        adapters=None,
        heads=frozenset({Head.DENSE, Head.TOKENS, *((Head.SPARSE, Head.MULTIVECTOR) if shape.outputs else ())}),
    )
    family = partial(run_family, model_type=config.model_type, config=spec.config, file=shape.classes, is_native=True)
    tensor_of = tensor_of or drawn(device, precision, device)
    model, forms = family_module(family, tensor_of, ModuleOptions(precision, on, typed=spec.has_token_types))
    heads = HeadLayers()
    if shape.outputs:
        width = config.hidden_size
        one, square = tensor_of("sparse", (1, width)), tensor_of("colbert", (width, width))
        heads = HeadLayers(lexical=[LinearLayer(one, one[0, :1])], multivector=[LinearLayer(square, square[0])])
    trunk = PackedTrunk(model, forms, spec, device=on, dtype=precision)
    return TorchBackend(spec, dtype=dtype, device=device, loaded=(trunk, heads))


def drawn(device: str, dtype: torch.dtype, place: str) -> Callable[..., Tensor]:
    """Return random weights for a device, drawn at `place`: two devices with one place have the same."""
    draw = torch.Generator(place).manual_seed(0)

    def tensor_of(name: str, size: tuple[int, ...]) -> Tensor:
        random = torch.randn(size, generator=draw, device=place, dtype=dtype if place == "cuda" else torch.float32) * 0.02
        return (random + 1 if "norm" in name.lower() and name.endswith("weight") else random).to(device, dtype)

    return tensor_of


def with_kernel(backend: Any, name: str) -> None:
    """Have another kernel compute attention. Raises ValueError if it cannot run here."""
    fault = attention.fault_of(name, backend.trunk.forms, backend.trunk.dtype, backend.device)
    if fault is not None:
        raise ValueError(f"{name}: {fault}")
    backend.trunk.kernel = attention.OPENERS[name]()


def flop_per_token(backend: Any, batches: Sequence[PackedBatch]) -> float:
    """Of products with weights, and of attention where a query meets as many keys as in these texts on average."""
    lengths, model = np.concatenate([batch.lengths for batch in batches]), backend.trunk.model
    place = {linear: 1, product: 2}  # of the matrix among the arguments
    matrices = [node.args[place[node.target]].target for node in model.graph.nodes if node.target in place]
    config, (form, *_) = backend.spec.config, backend.trunk.forms
    met = (lengths**2).sum() / lengths.sum() / (2 if backend.trunk.causal else 1)
    weights = sum(getattr(model, name).numel() for name in matrices)
    return float(2 * weights + 4 * config["num_hidden_layers"] * form.heads.count * form.heads.dim * met)


def packed(backend: Any, lengths: Iterable[int], heads: AbstractSet[Head], seed: int = 0) -> PackedBatch:
    """Return texts of such lengths, or of as much as the model takes."""
    draw, spec = np.random.default_rng(seed), backend.spec
    texts = [Encoding(draw.integers(5, spec.vocab_size, min(length, spec.max_input_length))) for length in lengths]
    return pack(texts, frozenset(heads), spec.positions)


def batches_of(backend: Any, mix: Mix, tokens: int, heads: AbstractSet[Head]) -> list[PackedBatch]:
    """Return batches of at most so many tokens, or of one text; lengths are drawn from the mix."""
    draw, made = np.random.default_rng(0), list[PackedBatch]()
    for seed in range(BATCHES):
        lengths: list[int] = []
        while not lengths or sum(lengths) < tokens:
            low, high = mix[0][1] if draw.random() < mix[0][0] else mix[-1][1]
            lengths.append(int(draw.integers(low, high + 1)))
        made.append(packed(backend, lengths[:-1] or lengths, heads, seed))
    return made


def rate(backend: Any, batches: Sequence[PackedBatch], seconds: float, at_once: int | None = None) -> tuple[float, float]:
    """Return (tokens/s, texts/s). `at_once`: passes under way [default: as many as the backend takes]."""
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
    """Return the FLOP/s of matrix products: the best of several, since other programs only slow one down."""
    size, best = 256 if options.cpu_smoke else 8192, 0.0
    a, b = (torch.randn(size, size, device=options.device).to(DTYPES[dtype]) for _ in range(2))
    for _ in range(12):
        began = time.perf_counter()
        (a @ b)[0, 0].item()  # waits for the device
        best = max(best, 2 * size**3 / (time.perf_counter() - began))
    return best


def cosine(found: Any, expected: Any) -> float:
    """Return the least of rows with rows."""
    found, expected = (np.asarray(one, dtype=np.float64) for one in (found, expected))
    return float(((found * expected).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(expected, axis=1)).min())


def run(cell: tuple[str, str], options: argparse.Namespace, limit: float) -> str | None:
    """Have a child measure a cell; why it did not to the end, or None."""
    command = [sys.executable, "-m", "conformance.load.gpu", *sys.argv[1:], "--out", options.out, "--cell", *cell]
    path = Path(options.out, re.sub(r"[^\w.+-]+", "-", f"{'.'.join(cell)}.stderr"))
    with path.open("w") as errors:
        try:
            code = subprocess.run(command, timeout=limit, stdout=errors, stderr=errors, check=False).returncode
        except subprocess.TimeoutExpired:
            return f"took more than {limit:.0f} s"
    last = path.read_text().strip().rpartition("\n")[2][-200:]
    return f"exit status {code}: {last}" if code else None


def tell(options: argparse.Namespace, cell: tuple[str, str], row: Row) -> None:
    """Have a row on disk when this returns."""
    with Path(options.out, "rows.jsonl").open("a") as file:
        file.write(json.dumps({"model": cell[0], "way": cell[1], **row}, default=float) + "\n")


def line(row: Row) -> str:
    """Return a row of the table."""
    values = {name: row.get(name, "") for name in COLUMNS}
    shown = {
        name: format(one, ",.0f" if one > 99 else ".4g") if isinstance(one, float) else one for name, one in values.items()
    }
    return " ".join(
        [*(f"{text:<{COLUMNS[name]}}" for name, text in shown.items()), f"failed: {row['failed']}" if "failed" in row else ""]
    ).rstrip()


def read_options() -> argparse.Namespace:
    """Return the command line, with `cells`: (model, way) each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", help="some, by name, separated by commas [default: all]")
    parser.add_argument("--ways", help="some, separated by commas [default: all]")
    parser.add_argument("--out", metavar="DIR", help="where rows and stderr go [default: a new folder]")
    parser.add_argument("--dtype", choices=DTYPES, help="[default: float16, with --cpu-smoke float32]")
    parser.add_argument("--seconds", type=float, default=1.5, help="of each measurement")
    parser.add_argument("--cell-seconds", type=float, default=240.0, help="after which a child is killed")
    parser.add_argument("--minutes", type=float, default=8.0, help="of all cells")
    parser.add_argument("--cpu-smoke", action="store_true", help="tiny models on a CPU: does the program work?")
    parser.add_argument("--cell", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.device, dtype, options.budget = ("cpu", "float32", 1024) if options.cpu_smoke else ("cuda", "float16", 16384)
    options.dtype = options.dtype or dtype
    asked = [None if text is None else text.split(",") for text in (options.models, options.ways)]
    every = [(model, way) for model, ways in (SMOKE if options.cpu_smoke else CELLS).items() for way in ways]
    options.cells = [cell for cell in every if all(one is None or word in one for word, one in zip(cell, asked, strict=True))]
    if not options.cells:
        parser.error("--models, --ways: no cell has these")
    return options


def main() -> None:
    """See the module."""
    options = read_options()
    if options.cell:
        for row in measured(SHAPES[options.cell[0]], options.cell[1], options):
            tell(options, options.cell, row)
        return
    if not options.cpu_smoke and not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device here: nothing was measured (--cpu-smoke tries the program with tiny models)")
    options.out = options.out or tempfile.mkdtemp(prefix="gpu-")
    Path(options.out).mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + 60 * options.minutes
    for cell in options.cells:
        left = min(options.cell_seconds, until - time.monotonic())
        fault = run(cell, options, left) if left > 0 else "no time was left"
        if fault is not None:
            tell(options, cell, {"failed": fault})
    name, rows = platform.machine() if options.cpu_smoke else torch.cuda.get_device_name(), Path(options.out, "rows.jsonl")
    print(f"{name}, torch {torch.__version__}, transformers {transformers.__version__}; rows: {rows}")
    for row in [{name: name for name in COLUMNS}, *map(json.loads, rows.read_text().splitlines())]:
        print(line(row))


if __name__ == "__main__":
    main()
