"""`torch.compile` of a packed trunk while the model is loaded. Nothing is compiled after that.

The traced module is compiled for any number of tokens. Attention is not compiled, since its shapes follow the lengths of texts;
the device's kernel computes it. So each layer is compiled code, then attention.

A GPU computes a short text faster than its host launches the kernels. So a pass of at most SIZES[-1] tokens is padded to one of
SIZES and computed by `mode="reduce-overhead"`, which records compiled code as CUDA graphs and replays them. Torch stores
recordings by thread, and torch 2.11 only for the thread that imported their module, so one thread records and replays all.
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

SIZES = (
    64,
    128,
    256,
    512,
    1024,
)  # tokens of recorded passes; a smaller pass is padded to the next size
CALLS_TO_RECORD = 3  # the first run allocates, the second is recorded, the third is replayed
# The largest deviation of states from the module's, relative to the largest state: sums have another order and fewer roundings.
NEAR = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 0.1, "fp8": 0.3}
MAX_LETTERS = 300  # characters of a reason; compilers add pages
NEEDS = "on a CPU torch needs a C++ compiler (g++, or another one in CXX), on a GPU Triton and gcc"

Compiler = str | Callable[..., Any]

_COMPILING = (
    threading.Lock()
)  # a compiler synchronises whole devices, which breaks another model's recording
_RECORDER = ThreadPoolExecutor(1, "torch-compile")


def compile_trunk(backend: TorchBackend, compiler: Compiler = "inductor") -> None:
    """Replace a backend's passes by compiled code. `compiler`: the function or name, as for `torch.compile`, that compiles
    passes without recording.

    Raises LoadError if compiling fails, or the compiled code deviates from the module.
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
            worst = float(
                np.max([_deviation(backend, trunk, compiled, tokens) for tokens in compiled.probes])
            )
    except Exception as error:  # compilers and their libraries raise their own exceptions
        words = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_LETTERS]
        raise LoadError(
            f"{folder}: --torch-compile failed ({NEEDS}; else leave it out): {words}"
        ) from error
    if not worst <= NEAR[backend.dtype]:  # `not`, so that NaN fails too
        raise LoadError(
            f"{folder}: --torch-compile made code whose states differ from the module's by {worst:.2g} of the largest, and "
            f"{NEAR[backend.dtype]:.2g} is allowed in {backend.dtype}: leave it out"
        )
    trunk.compiled = compiled
    log.info(
        "torch.compile took %.0f s; states differ by %.2g of the largest",
        time.monotonic() - began,
        worst,
    )


class CompiledPass:
    """Computes the module's states float[t, h] by compiled code. `probes`: sizes of passes that compile and record all code."""

    def __init__(self, model: fx.GraphModule, device: torch.device, compiler: Compiler) -> None:
        self._device = device
        self._sizes = SIZES if device.type == "cuda" else ()
        self.probes = (SIZES[-1] + 1, *(self._sizes or SIZES[:1]))
        if self._sizes:
            _RECORDER.submit(importlib.import_module, "torch._inductor.cudagraph_trees").result()
            own = fx.GraphModule(
                model, model.graph
            )  # torch caches compiled code by function, so two forms need two functions
            self._small = torch.compile(own, dynamic=True, mode="reduce-overhead")
        self._any_size = torch.compile(model, dynamic=True, backend=compiler)

    def __call__(self, ids: Ids, layout: PackedLayout) -> Tensor:
        count = len(ids["input_ids"])
        size = (
            None
            if layout.once is not None
            else next((size for size in self._sizes if count <= size), None)
        )
        if size is not None:
            return _RECORDER.submit(
                self._play, ids, layout, size, torch.cuda.current_stream(self._device)
            ).result()
        with _one_thread():
            found: Tensor = self._any_size(
                filled(ids, max(count, 2)), Outside(layout)
            )  # torch compiles again for a size of 1
        return found[:count]

    def _play(self, ids: Ids, layout: PackedLayout, size: int, stream: torch.cuda.Stream) -> Tensor:
        """Replay a pass. Return a copy of the states, since the next replay overwrites them."""
        with torch.inference_mode(), torch.cuda.stream(stream), _one_thread():
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            found: Tensor = self._small(filled(ids, size), Outside(layout))
            return found[: len(ids["input_ids"])].clone()


class Outside:
    """A layout that calls attention between compiled parts."""

    def __init__(self, layout: PackedLayout) -> None:
        self._layout = layout

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(self, q: Tensor, k: Tensor, v: Tensor, **form: object) -> Tensor:
        """Like `PackedLayout.attend`. The rows of padding are undefined."""
        return self._layout.attend(q, k, v, **form)  # type: ignore[arg-type]


def filled(ids: Ids, size: int) -> Ids:
    """Pad a batch's integers with zeros: these tokens belong to no sequence and affect no other row."""
    return {name: pad(values, (0, size - len(values))) for name, values in ids.items()}


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread, as in a lane, since torch compiles again for another number of threads."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _deviation(
    backend: TorchBackend, trunk: PackedTrunk, compiled: CompiledPass, tokens: int
) -> float:
    """The `deviation` of compiled states from the module's for a batch of `tokens` tokens."""
    longest = min(tokens, backend.spec.max_input_length)
    batch = made_up(
        backend.spec,
        tokens // longest * [longest] + ([tokens % longest] if tokens % longest else []),
    )
    ids, layout = trunk.place(batch), trunk.layout(batch)
    calls = CALLS_TO_RECORD if backend.device.type == "cuda" else 1
    *_, found = (compiled(ids, layout) for _ in range(calls))
    return deviation(found, trunk.model(ids, layout))


def deviation(found: Tensor, expected: Tensor) -> float:
    """The largest difference of two tensors, relative to the largest value of the second."""
    found, expected = found.float(), expected.float()
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-12))
