"""Chooses the backend of a model, with the reason. Only this module names concrete backends, and
imports them late.

A plain install has ONNX Runtime, and on Linux OpenVINO. `PREFERRED` gives the order; `hybridtei
tune` measures all of them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from hybridtei.config import ModelConfig
from hybridtei.errors import LoadError
from hybridtei.inference.backends.base import Backend, Routed
from hybridtei.inference.backends.graph.onnx_files import check_graphs, find_own_graph
from hybridtei.inference.backends.graph.ops import family_graph
from hybridtei.inference.backends.graph.writer import Graph
from hybridtei.models.checkpoint.contents import has_readable, no_weights
from hybridtei.models.checkpoint.kinds import Static
from hybridtei.models.checkpoint.spec import ModelSpec, Router
from hybridtei.models.checkpoint.weights import Weights, has_weights, weight_files
from hybridtei.models.families import family_of
from hybridtei.system.machine import install_command

log = logging.getLogger(__name__)

# Checked first, since importing torch to find a device takes seconds
NVIDIA = Path("/dev/nvidiactl")
# Values of CUDA_VISIBLE_DEVICES by which a user keeps programs from all GPUs
HIDDEN = ("", "-1")
# The first GPUs that compute bfloat16: Ampere
BFLOAT16_CAPABILITY = (8, 0)
# On CPUs the first backend that can run the model is chosen. In float32 OpenVINO was 6 % slower to
# 12 % faster than ONNX Runtime (`python -m conformance.load precisions`), and takes up to twice the
# memory.
PREFERRED = {
    "float32": ("ort", "openvino", "torch"),
    "bfloat16": ("openvino", "torch"),
    "float16": ("torch",),
    "int8": ("openvino", "ort"),
    "fp8": ("torch",),
}
PACKAGES = {
    "ort": (),
    "openvino": ("openvino",),
    "torch": ("torch", "transformers"),
}
INSTALLS = {"openvino": "pip install openvino", "torch": install_command("torch")}
DTYPES = {
    name: tuple(dtype for dtype, names in PREFERRED.items() if name in names) for name in PACKAGES
}


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """A backend's name, the precision, and the reason."""

    name: str
    dtype: str
    why: str


def open_backend(config: ModelConfig, spec: ModelSpec, *, bulk_niceness: int = 0) -> Backend:
    """Open the configured backend, or the best one that can run the model. Raises LoadError."""
    if isinstance(spec.kind, Static):
        from hybridtei.inference.backends.static import StaticBackend

        return StaticBackend(spec)
    if isinstance(spec.kind, Router):
        # The model for documents, and the one for queries
        routes = (replace(spec, kind=spec.kind.of_documents), spec.kind.of_queries)
        return Routed(
            spec, [open_backend(config, route, bulk_niceness=bulk_niceness) for route in routes]
        )
    if not has_readable(spec.folder) and find_own_graph(spec) is None:
        raise no_weights(spec.folder)
    if not weight_files(spec.folder):
        check_graphs(spec, config.backend, config.dtype)
    reason = None if config.backend in ("ort", "openvino") else no_gpu()
    if reason is not None:
        level = logging.WARNING if NVIDIA.exists() else logging.INFO
        log.log(level, "no GPU is used: %s", reason)
    failure: LoadError | None = None
    for choice in choices(config, spec):
        try:
            backend = _OPENERS[choice.name](config, spec, choice.dtype, bulk_niceness)
        except LoadError as error:
            if config.backend != "auto":
                raise
            log.warning("%s cannot run this model, the next is tried: %s", choice.name, error)
            failure = failure or error
        else:
            log.info("backend %s, %s: %s", choice.name, choice.dtype, choice.why)
            return backend
    assert failure is not None
    raise failure


def choices(config: ModelConfig, spec: ModelSpec) -> list[BackendChoice]:
    """The possible choices for the model, the best first. Raises LoadError with all reasons if
    there is none."""
    name, why = config.backend, "asked for"
    if name == "auto" and no_gpu() is None:
        name, why = "torch", "torch finds a CUDA device"
    if name != "auto":
        reason = why_not(name, config.dtype, spec)
        if reason is not None:
            raise LoadError(f"{spec.folder}: cannot run on {name}: {reason}")
        return [BackendChoice(name, config.dtype or _usual_dtype(name, spec), why)]
    dtype = config.dtype or "float32"
    refused = {name: why_not(name, config.dtype, spec) for name in _order(dtype)}
    able = [name for name, reason in refused.items() if reason is None]
    if not able:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        raise LoadError(f"{spec.folder}: nothing here can run it in {dtype}: {reasons}")
    why = "the only one that can"
    if len(able) > 1:
        why = "usually the best here; `hybridtei tune` measures all"
    return [BackendChoice(name, dtype, why) for name in able]


def _order(dtype: str) -> Sequence[str]:
    """The backends of a precision, the usually best one first."""
    if dtype != "int8" or _sums_exactly():
        return PREFERRED[dtype]
    # OpenVINO multiplies bytes only if the processor adds their products exactly
    return tuple(reversed(PREFERRED[dtype]))


def _sums_exactly() -> bool:
    from hybridtei.inference.backends.graph.int8 import max_weight

    return max_weight() == 127


def why_not(name: str, dtype: str | None, spec: ModelSpec) -> str | None:
    """The reason why a backend cannot run a model, or None if it can."""
    if dtype not in (None, *DTYPES[name]):
        return f"it runs {' and '.join(DTYPES[name])} only, not {dtype}"
    lacking = None
    if name == "torch":
        lacking = _half_lacks(dtype, spec)
    missing = [package for package in PACKAGES[name] if not _installed(package)]
    if missing and lacking is None:
        lacking = f"this needs {' and '.join(missing)}: {INSTALLS[name]}"
    if name == "torch" or lacking is not None:
        return lacking
    if name == "openvino" and spec.is_splade:
        return "SPLADE is not supported there yet: leave `--backend` out, or use ort or torch"
    # ONNX Runtime runs the folder's own ONNX file, and does not read the weights
    if name == "ort" and find_own_graph(spec, dtype or "float32") is not None:
        return None
    outcome = _graph_or_reason(spec)
    return outcome if isinstance(outcome, str) else None


def _half_lacks(dtype: str | None, spec: ModelSpec) -> str | None:
    """The reason why torch cannot compute a model in half a float32 or less here, or None."""
    if dtype not in ("float16", "bfloat16", "fp8"):
        return None
    reason = no_gpu()
    if dtype == "fp8":
        return reason and f"fp8 needs a GPU, and {reason}; on a CPU ask for int8"
    if dtype == "bfloat16":
        if reason is None and not _has_bfloat16():
            return "bfloat16 needs a GPU of compute capability 8.0 or later; ask for float16"
    elif family_of(spec.model_type).is_wide:
        wide = "bfloat16 or float32" if reason is not None else _wide_dtype()
        return f"states of `{spec.model_type}` exceed float16's range; ask for {wide}"
    elif reason is not None:
        return f"float16 is for GPUs, and {reason}; on a CPU ask for bfloat16 or float32"
    return None


def _graph_or_reason(spec: ModelSpec) -> Graph | str:
    """The graph of a checkpoint's family, or the reason why its weights cannot run in a graph."""
    if not has_weights(spec.folder):
        return (
            "its weights (*.bin) were saved by torch before 1.6, or are cut short: save them "
            "again, or use torch"
        )
    try:
        return family_graph(spec)
    except LoadError as error:
        return str(error).removeprefix(f"{spec.folder}: ")


@cache
def _installed(package: str) -> bool:
    return find_spec(package) is not None


def may_use_gpu(config: ModelConfig) -> bool:
    """True if a model may run on a GPU here. Does not import torch, so it can be wrong."""
    return config.backend in ("auto", "torch") and NVIDIA.exists() and _installed("torch")


def no_gpu() -> str | None:
    """The reason why torch cannot use a GPU here, or None if it can. Imports torch only if there is
    a GPU. Raises LoadError if the driver is too old for torch."""
    if not NVIDIA.exists():
        return f"there is no NVIDIA device here ({NVIDIA})"
    if not _installed("torch"):
        return f"torch is not installed: {INSTALLS['torch']}"
    import torch

    if torch.cuda.is_available():
        return None
    built = torch.version.cuda
    if built is None:
        return "torch is built for CPUs only"
    if os.environ.get("CUDA_VISIBLE_DEVICES") in HIDDEN:
        return "CUDA_VISIBLE_DEVICES hides it"
    raise LoadError(
        f"torch, built for CUDA {built}, cannot use this machine's GPU: update the driver; or "
        "give `--backend ort` to compute on the CPU"
    )


def _usual_dtype(backend: str, spec: ModelSpec) -> str:
    """The precision without `--dtype`: float32 on a CPU; on a GPU half precision, bfloat16 if the
    checkpoint is stored so or float16 is too narrow for its family."""
    if backend != "torch" or no_gpu() is not None:
        return "float32"
    if family_of(spec.model_type).is_wide:
        return _wide_dtype()
    if _has_bfloat16() and _stored_in_bfloat16(spec):
        return "bfloat16"
    return "float16"


def _wide_dtype() -> str:
    """The shortest precision here with float32's range."""
    return "bfloat16" if _has_bfloat16() else "float32"


def _has_bfloat16() -> bool:
    import torch

    capability: tuple[int, int] = torch.cuda.get_device_capability(0)
    return capability >= BFLOAT16_CAPABILITY


def _stored_in_bfloat16(spec: ModelSpec) -> bool:
    if has_weights(spec.folder):
        return Weights.open(spec.folder).widest() == "BF16"
    return bool(spec.config.get("dtype", spec.config.get("torch_dtype")) == "bfloat16")


# Opens ONNX Runtime. All openers take the same arguments; this one has no use for `niceness`
def _ort(config: ModelConfig, spec: ModelSpec, dtype: str, niceness: int) -> Backend:
    from hybridtei.inference.backends.graph.onnx_backend import OnnxBackend

    outcome = _graph_or_reason(spec)
    if isinstance(outcome, str):
        # The weights cannot run in a graph of this package; `why_not` let the model through only
        # because the folder has an ONNX file of its own
        own_file = find_own_graph(spec, dtype)
        assert own_file is not None
        if spec.tanh_gelu:
            raise LoadError(
                f"{own_file}: computes GELU as it was exported; --gelu tanh needs the checkpoint's "
                "weights"
            )
        return OnnxBackend.from_file(spec, own_file, dtype=dtype)
    weights = Weights.open(spec.folder)
    if dtype == "int8":
        from hybridtei.inference.backends.graph.int8 import int8_graph

        return OnnxBackend(
            spec, int8_graph(spec, weights), weights, cache_gb=config.packed_cache_gb
        )
    return OnnxBackend(spec, outcome, weights, cache_gb=config.packed_cache_gb)


def _openvino(config: ModelConfig, spec: ModelSpec, dtype: str, niceness: int) -> Backend:
    from hybridtei.inference.backends.graph.openvino_backend import OpenVinoBackend

    weights = Weights.open(spec.folder)
    if dtype == "int8":
        from hybridtei.inference.backends.graph.openvino_int8 import open_int8

        return open_int8(spec, weights, bulk_niceness=niceness)
    if dtype == "bfloat16":
        from hybridtei.inference.backends.graph.openvino_int8 import open_bfloat16

        return open_bfloat16(spec, weights, bulk_niceness=niceness)
    return OpenVinoBackend(spec, family_graph(spec), weights, dtype=dtype, bulk_niceness=niceness)


def _torch(config: ModelConfig, spec: ModelSpec, dtype: str, niceness: int) -> Backend:
    from hybridtei.inference.backends.torch.backend import TorchBackend
    from hybridtei.inference.backends.torch.fp8 import open_fp8

    device = "cpu" if no_gpu() else "cuda:0"
    if dtype == "fp8":
        return open_fp8(spec, device=device, trust_remote_code=config.trust_remote_code)
    return TorchBackend(
        spec, dtype=dtype, device=device, trust_remote_code=config.trust_remote_code
    )


_OPENERS = {
    "ort": _ort,
    "openvino": _openvino,
    "torch": _torch,
}
