"""`torch.compile` of a packed trunk, while the model is loaded: nothing is compiled once it serves.

The traced module is compiled for any number of tokens. Attention stays outside, by the kernel that was chosen for the device:
its shapes follow the lengths of texts. So each layer is compiled code, then attention.

A GPU computes a short text faster than its host launches the kernels one by one. There, a pass of at most SIZES[-1] tokens is
filled up to one of SIZES and computed by `mode="reduce-overhead"`, which records compiled code as CUDA graphs and plays them.
Torch keeps recordings by thread, and torch 2.11 only those of the thread that imported their module: one thread of this process
makes and plays all.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.nn.functional import pad

from hybridtei.errors import LoadError
from hybridtei.inference.backends.base import made_up
from hybridtei.inference.backends.torch.layout import PackedLayout
from hybridtei.inference.backends.torch.trunk import Ids, PackedTrunk

if TYPE_CHECKING:
    from hybridtei.inference.backends.torch.backend import TorchBackend

log = logging.getLogger(__name__)

SIZES = (64, 128, 256, 512, 1024)  # tokens: each is recorded, and a smaller pass is filled up to the next
CALLS_TO_RECORD = 3  # the first allocates, the second is recorded, the third is played
# How far states may be from those of the module, relative to the largest: another order of sums, fewer roundings.
NEAR = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 0.1, "fp8": 0.3}
MAX_LETTERS = 300  # of a reason; compilers add pages
NEEDS = "on a CPU torch needs a C++ compiler (g++, or another one in CXX), on a GPU Triton and gcc"

Compiler = str | Callable[..., Any]

_COMPILING = threading.Lock()  # a compiler waits for whole devices, which spoils what another model records meanwhile
_RECORDER = ThreadPoolExecutor(1, "torch-compile")


def compile_trunk(backend: TorchBackend, compiler: Compiler = "inductor") -> None:
    """Have compiled code compute a backend's passes. `compiler`: a function or name, as `torch.compile` takes them, of
    what compiles passes that are not recorded.

    Raises LoadError if it cannot be made, or differs from the module.
    """
    trunk, folder = backend.trunk, backend.spec.folder
    if not isinstance(trunk, PackedTrunk):
        raise LoadError(
            f"{folder}: --torch-compile is for families that run packed, and transformers' own modules run "
            f"{backend.spec.model_type}: leave it out"
        )
    began = time.monotonic()
    try:
        with _COMPILING, backend.alone():
            compiled = CompiledPass(trunk.model, backend.device, compiler)
            worst = float(np.max([_deviation(backend, trunk, compiled, tokens) for tokens in compiled.probes]))
    except Exception as error:  # compilers, and the libraries they call, each raise their own kinds
        words = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_LETTERS]
        raise LoadError(f"{folder}: --torch-compile failed ({NEEDS}; else leave it out): {words}") from error
    if not worst <= NEAR[backend.dtype]:  # NaN fails too, and is the largest to numpy
        raise LoadError(
            f"{folder}: --torch-compile made code whose states differ from the module's by {worst:.2g} of the largest, and "
            f"{NEAR[backend.dtype]:.2g} is allowed in {backend.dtype}: leave it out"
        )
    trunk.compiled = compiled
    log.info("torch.compile took %.0f s; states differ by %.2g of the largest", time.monotonic() - began, worst)


class CompiledPass:
    """The module's states, float[t, h], by compiled code. `probes`: tokens of the passes that compile and record all of it."""

    def __init__(self, model: fx.GraphModule, device: torch.device, compiler: Compiler) -> None:
        self._device = device
        self._sizes = SIZES if device.type == "cuda" else ()
        self.probes = (SIZES[-1] + 1, *(self._sizes or SIZES[:1]))
        if self._sizes:
            _RECORDER.submit(importlib.import_module, "torch._inductor.cudagraph_trees").result()
            own = fx.GraphModule(model, model.graph)  # torch keeps compiled code by function: two forms need two
            self._small = torch.compile(own, dynamic=True, mode="reduce-overhead")
        self._any_size = torch.compile(model, dynamic=True, backend=compiler)

    def __call__(self, ids: Ids, layout: PackedLayout) -> Tensor:
        count = len(ids["input_ids"])
        size = None if layout.once is not None else next((size for size in self._sizes if count <= size), None)
        if size is not None:
            return _RECORDER.submit(self._play, ids, layout, size, torch.cuda.current_stream(self._device)).result()
        with _one_thread():
            found: Tensor = self._any_size(filled(ids, max(count, 2)), Outside(layout))  # for a size of 1 torch compiles anew
        return found[:count]

    def _play(self, ids: Ids, layout: PackedLayout, size: int, stream: torch.cuda.Stream) -> Tensor:
        """A copy of the states: the next pass is played into the same memory."""
        with torch.inference_mode(), torch.cuda.stream(stream), _one_thread():
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            found: Tensor = self._small(filled(ids, size), Outside(layout))
            return found[: len(ids["input_ids"])].clone()


class Outside:
    """A layout whose attention is called between compiled parts."""

    def __init__(self, layout: PackedLayout) -> None:
        self._layout = layout

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(self, q: Tensor, k: Tensor, v: Tensor, **form: object) -> Tensor:
        """See `PackedLayout.attend`. Rows behind those of the layout come out undefined."""
        return self._layout.attend(q, k, v, **form)  # type: ignore[arg-type]


def filled(ids: Ids, size: int) -> Ids:
    """A batch's integers with zeros behind them: tokens of no sequence, whose rows reach no other row."""
    return {name: pad(values, (0, size - len(values))) for name, values in ids.items()}


@contextmanager
def _one_thread() -> Iterator[None]:
    """As in a lane: torch compiles anew for another number of threads."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _deviation(backend: TorchBackend, trunk: PackedTrunk, compiled: CompiledPass, tokens: int) -> float:
    """`deviation` of compiled states from the module's, for a batch of `tokens` tokens."""
    longest = min(tokens, backend.spec.max_input_length)
    batch = made_up(backend.spec, tokens // longest * [longest] + ([tokens % longest] if tokens % longest else []))
    ids, layout = trunk.place(batch), trunk.layout(batch)
    calls = CALLS_TO_RECORD if backend.device.type == "cuda" else 1
    *_, found = (compiled(ids, layout) for _ in range(calls))
    return deviation(found, trunk.model(ids, layout))


def deviation(found: Tensor, expected: Tensor) -> float:
    """The largest difference of two tensors, relative to the largest value of the second."""
    found, expected = found.float(), expected.float()
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-12))
