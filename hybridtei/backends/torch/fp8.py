"""fp8 on Hopper and later, behind a guard like int8's: sample texts must keep their vectors, or the model is refused.

Everything that is not a product of a token with a matrix of the trunk stays bfloat16; the products are `fp8_linear`'s.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hybridtei.backends.fidelity import Fidelity, Guard, check, compare
from hybridtei.backends.torch.acceleration import AccelerationOptions
from hybridtei.backends.torch.backend import TorchBackend
from hybridtei.backends.torch.fp8_linear import STEP, Fp8Linear, replace_linears
from hybridtei.batch import PackedBatch
from hybridtei.errors import LoadError
from hybridtei.outputs import HeadOutputs

if TYPE_CHECKING:
    from hybridtei.checkpoint.spec import ModelSpec

log = logging.getLogger(__name__)

CAPABILITY = (9, 0)


def open_fp8(
    spec: ModelSpec,
    *,
    device: str,
    trust_remote_code: bool = False,
    guard: Guard | None = None,
    acceleration: AccelerationOptions | None = None,
) -> TorchBackend:
    """A model in fp8, judged. Raises LoadError with the figures if it is too far from bfloat16, or on a device without fp8."""
    on = torch.device(device)
    if on.type != "cuda" or torch.cuda.get_device_capability(on) < CAPABILITY:
        raise LoadError(f"fp8 needs a GPU of compute capability {'.'.join(map(str, CAPABILITY))} or later, not {device}")
    backend = TorchBackend(
        spec, dtype="bfloat16", device=device, trust_remote_code=trust_remote_code, acceleration=acceleration
    )
    return judged(backend, guard or Guard())


def judged(backend: TorchBackend, guard: Guard) -> TorchBackend:
    """A bfloat16 backend with its trunk's matrices in eight bits from now on. Raises LoadError with the figures."""
    layers = replace_linears(backend.trunk.model)
    backend.catch_up()
    if not layers:
        raise LoadError(f"{backend.spec.folder}: fp8: no matrix of the trunk has sides of a multiple of {STEP}")
    fidelity = _fidelity(backend, layers)
    log.info("fp8, %d matrices, against bfloat16: %s", len(layers), fidelity)
    check(fidelity, guard, backend.spec, "fp8 is too far from bfloat16")
    for layer in layers:
        layer.exact = None
    backend.make_room()
    backend.dtype = "fp8"
    return backend


@dataclass(frozen=True, slots=True, eq=False)
class _View:
    """A backend that computes exactly, or in eight bits, for the time of a pass."""

    backend: TorchBackend
    layers: list[Fp8Linear]
    exact: bool

    @property
    def spec(self) -> ModelSpec:
        return self.backend.spec

    def forward(self, batch: PackedBatch) -> HeadOutputs:
        for layer in self.layers:
            layer.judging = self.exact
        try:
            return self.backend.forward(batch)
        finally:
            for layer in self.layers:
                layer.judging = False


def _fidelity(backend: TorchBackend, layers: list[Fp8Linear]) -> Fidelity:
    exact, approximate = (_View(backend, layers, exact=exact) for exact in (True, False))
    return compare(exact, approximate)
