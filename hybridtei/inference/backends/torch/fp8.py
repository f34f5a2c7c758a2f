"""fp8 on Ada and later GPUs, with a guard like int8's: the model is refused unless sample texts
keep their vectors.

The trunk's matrices have eight bits and a scale per output channel. Activations have a scale per
row (a token), so a text's vectors do not depend on its neighbours. Products are summed in float32.
There is no calibration: each pass computes the rows' scales. Everything except products with the
trunk's matrices stays bfloat16.

Functions import checkpoint readers locally: `conformance/load/gpu.py` measures matrices without
msgspec.
"""

from __future__ import annotations

import logging
import math
import operator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx

from hybridtei.errors import LoadError
from hybridtei.inference.backends.torch.fusing import added, is_product

if TYPE_CHECKING:
    from hybridtei.inference.backends.fidelity import Guard
    from hybridtei.inference.backends.torch.backend import TorchBackend
    from hybridtei.models.checkpoint.spec import ModelSpec

log = logging.getLogger(__name__)

EIGHT_BITS = torch.float8_e4m3fn
LARGEST = torch.finfo(EIGHT_BITS).max
# The scale of a row of zeros
MIN_SCALE = 1e-12
# Both sides of a matrix must be multiples of it
STEP = 16


def quantised(rows: Tensor) -> tuple[Tensor, Tensor]:
    """float[n, k] -> (eight bits [n, k], float32 scale [n, 1]). Each row's largest number becomes
    fp8's largest."""
    largest = torch.linalg.vector_norm(rows, math.inf, 1, keepdim=True, dtype=torch.float32)
    scale = (largest / LARGEST).clamp_min(MIN_SCALE)
    return (rows / scale).to(EIGHT_BITS), scale


def product(
    rows: Tensor,
    row_scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
) -> Tensor:
    """Rows [n, k] with scales [n, 1] times weight [m, k] with scales [m, 1] -> dtype[n, m]."""
    if rows.device.type != "cpu":
        return torch._scaled_mm(
            rows,
            weight.t(),
            scale_a=row_scales,
            scale_b=weight_scales.t(),
            bias=bias,
            out_dtype=dtype,
            use_fast_accum=True,
        )
    exact = emulated(rows, row_scales, weight, weight_scales)
    if bias is not None:
        exact += bias
    return exact.to(dtype)


def emulated(rows: Tensor, row_scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    """`product` in float32, on any device: the same factors, summed in another order."""
    return (rows.float() @ weight.float().t()) * row_scales * weight_scales.t()


def to_eight_bits(model: fx.GraphModule) -> int:
    """Quantise every matrix with a suitable shape, and its input rows. Return the number of
    matrices."""
    graph, dtypes, parts = model.graph, dict[str, torch.dtype](), dict[fx.Node, list[fx.Node]]()
    for node in [*graph.nodes]:
        if not (is_product(node) or node.target is added):
            continue
        rows, matrix, last = node.args
        name = matrix.target
        if name not in dtypes:
            exact = getattr(model, name)
            if exact.shape[0] % STEP or exact.shape[1] % STEP:
                continue
            dtypes[name] = exact.dtype
            delattr(model, name)
            for kind, tensor in zip(
                (name, f"{name}_scale"), quantised(exact.detach()), strict=True
            ):
                model.register_buffer(kind, tensor)
        with graph.inserting_before(node):
            # An input of several matrices is quantised once
            if rows not in parts:
                pair = graph.call_function(quantised, (rows,))
                parts[rows] = [
                    graph.call_function(operator.getitem, (pair, place)) for place in range(2)
                ]
            scale = graph.get_attr(f"{name}_scale")
            inputs = (*parts[rows], matrix, scale, dtypes[name])
            if node.target is added:
                out = graph.call_function(
                    operator.add, (graph.call_function(product, inputs), last)
                )
            else:
                out = graph.call_function(product, inputs, {"bias": last})
        node.replace_all_uses_with(out)
        graph.erase_node(node)
    model.recompile()
    return len(dtypes)


CAPABILITY = (8, 9)


def open_fp8(
    spec: ModelSpec,
    *,
    device: str,
    trust_remote_code: bool = False,
    guard: Guard | None = None,
) -> TorchBackend:
    """Open a model in fp8 and judge it. Raises LoadError with the figures if it is too far from
    bfloat16, or without fp8."""
    from hybridtei.inference.backends.fidelity import Guard
    from hybridtei.inference.backends.torch.backend import TorchBackend

    on = torch.device(device)
    if on.type != "cuda" or torch.cuda.get_device_capability(on) < CAPABILITY:
        raise LoadError(
            f"fp8 needs a GPU of compute capability {'.'.join(map(str, CAPABILITY))} or later, not "
            f"{device}"
        )
    backend = TorchBackend(
        spec, dtype="bfloat16", device=device, trust_remote_code=trust_remote_code
    )
    return judged(backend, guard or Guard())


def judged(backend: TorchBackend, guard: Guard) -> TorchBackend:
    """Change a bfloat16 backend's matrices to eight bits, and judge it. Raises LoadError with the
    figures."""
    from hybridtei.inference.backends.fidelity import check, fidelity, sample_vectors

    exact = sample_vectors(backend)
    layers = (
        to_eight_bits(backend.trunk.model) if isinstance(backend.trunk.model, fx.GraphModule) else 0
    )
    if not layers:
        raise LoadError(
            f"{backend.spec.folder}: fp8: no matrix of a known family has sides of a multiple of "
            f"{STEP}"
        )
    backend.catch_up()
    figures = fidelity(sample_vectors(backend), exact)
    log.info("fp8, %d matrices, against bfloat16: %s", layers, figures)
    check(figures, guard, backend.spec, "fp8 is too far from bfloat16")
    backend.make_room()
    backend.dtype = "fp8"
    return backend
