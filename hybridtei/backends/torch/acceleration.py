"""What makes a torch backend's passes faster before it serves: compiled functions, recordings for small batches, or neither.

This module decides when and where; `compiling` and `cuda_graphs` do the work. Recordings are of the compiled pass, if there is
one, so it is made first.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hybridtei.backends.torch.attention import REPLAYED
from hybridtei.backends.torch.compiling import compile_pass
from hybridtei.backends.torch.cuda_graphs import BYTES_OF_RECORDING, TOKENS, Graphs, Recorder, buckets, on_gpu
from hybridtei.backends.torch.memory import made_up
from hybridtei.backends.torch.trunk import PackedTrunk
from hybridtei.batch import PackedBatch

if TYPE_CHECKING:
    from hybridtei.backends.torch.backend import TorchBackend
    from hybridtei.checkpoint.spec import ModelSpec

log = logging.getLogger(__name__)

# Lengths of the texts that a pass is compiled with and compared on; the second has other totals, as every batch will.
PROBES = ((9, 250, 61, 33), (5, 17, 40))
MAKING = threading.Lock()  # a compiler waits for whole devices, and a graph that is recorded meanwhile is lost by that
RECORDINGS_SHARE = 4  # recordings may take this part of the memory for passes at most, one in so many bytes


@dataclass(frozen=True, slots=True)
class AccelerationOptions:
    """`graphs`: record small batches, on a GPU. `compiled`: auto is on a GPU. `compiler`: torch's name of it, or one."""

    graphs: bool = False
    compiled: Literal["auto", "true", "false"] = "false"
    compiler: str | Callable[..., Any] = "inductor"
    recorder: Recorder | None = None


class Acceleration:
    """Of one backend. `graphs`: None until `begin`, and where there are none. `fault`: why what should be is not compiled."""

    def __init__(self, backend: TorchBackend, options: AccelerationOptions) -> None:
        self.graphs: Graphs | None = None
        self.fault: str | None = None
        self._backend, self.options = backend, options
        refused = _why_no_graphs(options, backend)
        self._records = options.graphs and refused is None
        if options.graphs and refused is not None:
            on_gpu = backend.device.type == "cuda"
            log.log(logging.INFO if on_gpu else logging.DEBUG, "small batches are not recorded: %s", refused)

    def begin(self) -> None:
        """Compile what is to be compiled, and record what is to be recorded; what was made before is not made again."""
        backend, options, trunk = self._backend, self.options, self._backend.trunk
        if not isinstance(trunk, PackedTrunk):
            return
        compiles = options.compiled == "true" or (options.compiled == "auto" and backend.device.type == "cuda")
        with MAKING:
            if compiles and trunk.packs and trunk.instead is None:
                with backend.alone():
                    self.fault = compile_pass(trunk, probes(backend.spec), dtype=backend.dtype, compiler=options.compiler)
            if self._records and self.graphs is None:
                self.graphs = Graphs(backend, trunk, options.recorder or on_gpu(backend.stream))
                self.graphs.record()

    def reserved(self, allowed: int, peak: Callable[[int], int | None]) -> int:
        """Bytes that recordings will take of those `allowed` for passes. `peak`: bytes of a pass of so many tokens.

        Where that is too much of it there will be no recordings.
        """
        if not self._records:
            return 0
        taken, count = peak(TOKENS[-1]), len(buckets(self._backend.spec.max_input_length))
        needed = None if taken is None else taken + count * BYTES_OF_RECORDING
        if needed is None or needed > allowed // RECORDINGS_SHARE:
            self._records = False
            log.info("small batches are not recorded, for want of memory")
            return 0
        return needed

    def forget(self) -> None:
        """Drop recordings; for the thread that may launch, once nothing that was launched runs any more."""
        if self.graphs is not None:
            self.graphs.forget()

    def close(self) -> None:
        """Make no more."""
        if self.graphs is not None:
            self.graphs.close()
        self.graphs = None


def probes(spec: ModelSpec) -> list[PackedBatch]:
    """Batches of the lengths in PROBES, or what the model takes of them."""
    return [made_up(spec, [min(length, spec.max_input_length) for length in lengths]) for lengths in PROBES]


def _why_no_graphs(options: AccelerationOptions, backend: TorchBackend) -> str | None:
    if options.recorder is not None:
        return None
    if backend.device.type != "cuda":
        return "that is for GPUs"
    if not backend.trunk.packs:
        return "the family does not run packed"
    kernel = backend.trunk.attention.name
    return None if kernel in REPLAYED else f"the shapes inside {kernel} follow the lengths of texts"
