"""`torch.compile` of the packed pass, in the background: the module itself serves until what was made is ready.

What is compiled is everything but attention, which stays the kernel that was chosen: token-wise arithmetic over any number of
tokens, whose norms, activations and additions become one kernel where they were several. A compiler would look into the layout
and bake in where the sequences of one batch end, so attention is one operation that it leaves alone, rows in and rows out,
`torch.ops.hybridtei.attend`; its layout is set beside the call, by thread. What was made is compared with the modules before it
takes their place; whatever fails or differs leaves them there, with one line in the log.

Off unless on a GPU: there it saves launches and trips to memory; on a CPU nearly all time goes into products, which it leaves
to the same library, and the compiler, a minute of it, would take the cores and the interpreter from those who are served.

What is ready is never compiled again. A batch it has no code for (of one token) is computed by the modules, since
to compile at that point would be to wait.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from hybridtei.backends.torch.layout import PackedLayout
from hybridtei.backends.torch.memory import is_out_of_memory
from hybridtei.backends.torch.trunk import Ids, PackedTrunk, Pass
from hybridtei.batch import PackedBatch

log = logging.getLogger(__name__)

UNBOUNDED = 0  # a window of none
_current = threading.local()


class Opaque:
    """A layout that knows nothing, for `Layout.attend` while a pass is compiled or runs compiled: see `meant`."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, causal: bool) -> Tensor:
        """See `Layout.attend`, of the layout that is meant."""
        out = torch.ops.hybridtei.attend(q, k, v, scale=scale, window=window or UNBOUNDED, causal=causal)
        return out  # type: ignore[no-any-return]


@contextmanager
def meant(layout: PackedLayout) -> Iterator[None]:
    """Within, this thread's `Opaque` means that layout."""
    before = getattr(_current, "layout", None)
    _current.layout = layout
    try:
        yield
    finally:
        _current.layout = before


@cache
def opaque() -> Opaque:
    """The one there is; makes the operation known to torch."""
    library: Any = torch.library.Library("hybridtei", "FRAGMENT")  # type: ignore[no-untyped-call]
    schema = "attend(Tensor q, Tensor k, Tensor v, *, float scale, int window, bool causal) -> Tensor"
    library.define(schema, tags=(torch.Tag.needs_fixed_stride_order,))  # flash kernels want a head's numbers side by side
    library.impl("attend", _attend, "CompositeExplicitAutograd")
    torch.library.register_fake("hybridtei::attend", _shape, lib=library)
    _KEPT.append(library)  # the operation goes with it
    return Opaque()


_KEPT: list[Any] = []


def _attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int, causal: bool) -> Tensor:
    layout: PackedLayout = _current.layout
    return layout.attend(q, k, v, scale=scale, window=None if window == UNBOUNDED else window, causal=causal).contiguous()


def _shape(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int, causal: bool) -> Tensor:
    return q.new_empty(q.shape)


# How far states may be from those of the modules themselves, relative to the largest: another order of sums, fewer roundings.
NEAR = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 0.1, "fp8": 0.3}
# The same kernels on the same numbers: what differs is at most the order of a sum.
SAME = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 4e-2, "fp8": 4e-2}
BUSY_WITH_DEVICE = (
    threading.Lock()
)  # a compiler waits for whole devices, and a graph that is recorded meanwhile is lost by that
PATIENCE_SECONDS = 0.2
EXIT_SECONDS = 10.0
MAX_LETTERS = 300  # of a reason; compilers add pages


class Abandoned(BaseException):
    """Raised in a thread whose work nobody wants any more."""


class Compiling:
    """The compilation of one trunk. `ended`: whatever came of it; `fault`: why nothing did."""

    def __init__(
        self,
        trunk: PackedTrunk,
        probes: Sequence[PackedBatch],
        *,
        dtype: str,
        device: torch.device,
        swapped: Callable[[], None] = lambda: None,
        backend: str | Callable[..., Any] = "inductor",
    ) -> None:
        """`probes`: batches to compile with and to compare on, at least two, of several tokens each. `swapped`: called once
        the compiled pass serves."""
        self.ended = threading.Event()
        self.fault: str | None = None
        self._trunk, self._probes, self._dtype, self._device = trunk, probes, dtype, device
        self._swapped, self._backend = swapped, backend
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="hybridtei-compile", daemon=True)

    def start(self) -> None:
        """Begin."""
        _RUNNING.add(self)
        self._thread.start()

    def close(self) -> None:
        """Let nothing come of it any more; returns at once, and the thread ends at the next line of Python it runs."""
        self._closed = True
        if self._thread.is_alive() and not self.ended.is_set():
            _interrupt(self._thread)

    def join(self, seconds: float) -> None:
        """Wait for the thread to end, so long at most."""
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            self._work()
        except Abandoned:
            self.fault = "abandoned"
        finally:
            self.ended.set()

    def _work(self) -> None:
        began = time.monotonic()
        try:
            with self._device_alone(), torch.inference_mode():
                made, worst = self._made()
            if not self._closed:
                self._trunk.instead = made
                self._swapped()
                log.info(
                    "torch.compile: what it made serves from now on, after %.0f s; states differ by %.2g from those of "
                    "the module itself, relative to the largest",
                    time.monotonic() - began,
                    worst,
                )
        except Exception as error:  # compilers, and the libraries they call, each raise their own kinds
            self._refuse(error)

    def _made(self) -> tuple[Pass, float]:
        """(the compiled pass, how far it is from the modules). Raises whatever the compiler does; RuntimeError if too far."""
        try:
            call = self._compiled(fullgraph=True)
        except Exception as error:
            log.debug("torch.compile: not as one graph: %s", error)
            call = self._compiled(fullgraph=False)
        worst = 0.0
        for probe in self._probes:
            ids, layout = self._trunk.place(probe), self._trunk.layout(probe)
            worst = max(worst, deviation(call(ids, layout), self._trunk.eager(ids, layout)))
            if not worst <= NEAR[self._dtype]:  # NaN fails too
                raise RuntimeError(f"what it made differs by {worst:.2g} from the module itself, relative to the largest state")
        return self._guarded(call), worst

    def _compiled(self, *, fullgraph: bool) -> Pass:
        trunk, layout = self._trunk, opaque()

        def forward(inputs: Ids) -> Tensor:
            return trunk.model(inputs, layout)  # type: ignore[no-any-return]

        own = _with_code_of_its_own(forward)
        compiled = torch.compile(own, dynamic=True, fullgraph=fullgraph, backend=self._backend)
        probe = self._probes[0]
        with meant(trunk.layout(probe)):
            compiled(trunk.place(probe))
        known = torch._dynamo.run(own)  # uses what was compiled, and compiles no more

        def call(ids: Ids, layout: PackedLayout) -> Tensor:
            with meant(layout):
                return known(ids)  # type: ignore[no-any-return]

        return call

    def _guarded(self, call: Pass) -> Pass:
        trunk = self._trunk

        def guarded(ids: Ids, layout: PackedLayout) -> Tensor:
            try:
                return call(ids, layout)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                trunk.instead = None
                self._refuse(error)
                return trunk.eager(ids, layout)

        return guarded

    def _refuse(self, error: Exception) -> None:
        if self.fault is None:
            self.fault = _in_one_line(error)
            log.warning("torch.compile: the module itself serves on: %s", self.fault)

    @contextmanager
    def _device_alone(self) -> Iterator[None]:
        """One compilation at a time, on a stream of its own; on a CPU for one thread, which is what lanes have."""
        while not BUSY_WITH_DEVICE.acquire(timeout=PATIENCE_SECONDS):
            if self._closed:
                raise Abandoned
        try:
            if self._device.type != "cuda":
                torch.set_num_threads(1)
                yield
                return
            with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream(self._device)):  # type: ignore[no-untyped-call]
                yield
        finally:
            BUSY_WITH_DEVICE.release()


def deviation(found: Tensor, expected: Tensor) -> float:
    """The largest difference of two tensors, relative to the largest value of the second."""
    found, expected = found.float(), expected.float()
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-12))


def _with_code_of_its_own(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch keeps what it compiled by code object, a few for each: models that shared one would crowd each other out."""
    return types.FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )


def _in_one_line(error: Exception) -> str:
    words = " ".join(f"{type(error).__name__}: {error}".split())
    return words if len(words) <= MAX_LETTERS else f"{words[:MAX_LETTERS]} …"


def _interrupt(thread: threading.Thread) -> None:
    """Raise in a thread, at its next line of Python."""
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Abandoned))


_RUNNING: WeakSet[Compiling] = WeakSet()


@atexit.register
def _before_the_interpreter_ends() -> None:
    """A thread inside a compiler's native code, when the interpreter goes, would take the process down with it."""
    for compiling in [*_RUNNING]:
        compiling.close()
    for compiling in [*_RUNNING]:
        compiling.join(EXIT_SECONDS)
