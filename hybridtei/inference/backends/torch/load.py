"""Loads a checkpoint for `TorchBackend`: the trunk and the layers of its heads, on one device.

`checkpoint.layers` reads and checks the layers of heads. Models without a family here are
transformers' modules, loaded
strictly: every weight comes from the checkpoint, and none is left over.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridtei.errors import LoadError, UnsupportedArchitecture, WeightMismatch
from hybridtei.inference.backends.heads import HeadLayers, MlmLayers
from hybridtei.inference.backends.torch.ops import ModuleOptions, family_module, path_of
from hybridtei.inference.backends.torch.trunk import PackedTrunk, PaddedTrunk, Trunk
from hybridtei.inference.backends.weights import check_names, left_over, mlm_layers, word_table
from hybridtei.models.checkpoint.hub_layouts import check_code, needs_code, own_code
from hybridtei.models.checkpoint.layers import in_config
from hybridtei.models.checkpoint.peft import ADAPTER
from hybridtei.models.checkpoint.spec import ModelSpec
from hybridtei.models.checkpoint.weights import Weights, has_weights, not_finite
from hybridtei.models.families import SERVED, run_family

log = logging.getLogger(__name__)


def load(
    spec: ModelSpec, *, dtype: torch.dtype, device: torch.device, trust_remote_code: bool
) -> tuple[Trunk, HeadLayers]:
    """(trunk, heads) with a checkpoint's weights. Heads on tokens (sparse weights, multi-vectors)
    have the trunk's dtype, all others float32. Raises LoadError."""
    trunk, mlm = _load_trunk(spec, dtype, device, trust_remote_code)
    layers = HeadLayers.read(spec, mlm)
    by_token = to_tensors(
        HeadLayers(lexical=layers.lexical, multivector=layers.multivector[-1:], mlm=mlm),
        dtype,
        device,
    )
    exact = to_tensors(
        replace(layers, lexical=(), multivector=layers.multivector[:-1], mlm=None),
        torch.float32,
        device,
    )
    multivector = [*exact.multivector, *by_token.multivector]
    return trunk, replace(
        exact, lexical=by_token.lexical, multivector=multivector, mlm=by_token.mlm
    )


def _load_trunk(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, trust_remote_code: bool
) -> tuple[Trunk, MlmLayers | None]:
    """Load by a family, or by transformers' modules if no family computes the model or only torch
    reads its weights."""
    try:
        if not has_weights(spec.folder):
            raise UnsupportedArchitecture(
                f"{spec.folder}: its weights are neither safetensors nor as torch 1.6 and later "
                "save them"
            )
        return load_family(spec, dtype, device)
    except UnsupportedArchitecture as refused:
        is_adapted = spec.adapters is not None or (spec.folder / ADAPTER).exists()
        if spec.is_splade or is_adapted:
            raise
        computed = spec.is_native or (
            spec.model_type not in SERVED and own_code(spec.config) is None
        )
        if not (computed or trust_remote_code):
            # transformers' own class would compute another model than the publisher's code
            raise
        log.info("transformers runs this model, padded: %s", refused)
    model = load_model(spec, dtype=dtype, trust_remote_code=trust_remote_code).to(device)
    return PaddedTrunk(model, spec, device), None


def load_family(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device
) -> tuple[PackedTrunk, MlmLayers | None]:
    """(the family's trunk, a SPLADE's masked-language-model head or None). Raises LoadError."""
    check_code(spec.config, spec.folder / "config.json")
    weights, keys, shapes = (
        Weights.open(spec.folder),
        dict[str, str](),
        dict[str, tuple[int, ...]](),
    )

    def tensor_of(name: str, shape: tuple[int, ...]) -> Tensor:
        keys[name], shapes[name] = weights.checked(name, shape), shape
        return checked_numbers(
            as_tensor(weights.stored(keys[name])).to(device, dtype), keys[name], spec.folder
        )

    family = partial(
        run_family,
        model_type=spec.model_type,
        config=spec.config,
        file=str(spec.folder / "config.json"),
        adapters=None if spec.adapters is None else spec.adapters.form,
        is_native=spec.is_native,
    )
    options = ModuleOptions(dtype, device, typed=spec.has_token_types, tanh_gelu=spec.tanh_gelu)
    module, forms = family_module(family, tensor_of, options)
    check_names(keys, weights)
    words = word_table(spec, shapes)
    trunk = PackedTrunk(
        module,
        forms,
        spec,
        device=device,
        dtype=dtype,
        words=None if words is None else path_of(words),
    )
    if not spec.is_splade:
        return trunk, None
    assert words is not None
    return trunk, mlm_layers(spec, weights, weights.float32(keys[words]))


def as_tensor(array: NDArray[Any]) -> Tensor:
    """A tensor over an array's memory. Torch must not write to it."""
    with warnings.catch_warnings():
        # Torch warns that the array is read-only
        warnings.simplefilter("ignore", UserWarning)
        if array.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)


def to_tensors(layers: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Layers of heads with their arrays as tensors on a device."""
    if isinstance(layers, np.ndarray):
        # A copy, since the file may change
        return as_tensor(layers).to(device, dtype, copy=True)
    if isinstance(layers, list | tuple):
        return type(layers)(to_tensors(layer, dtype, device) for layer in layers)
    if is_dataclass(layers) and not isinstance(layers, type):
        return replace(
            layers,
            **{
                field.name: to_tensors(getattr(layers, field.name), dtype, device)
                for field in fields(layers)
            },
        )
    return layers


def load_model(spec: ModelSpec, *, dtype: torch.dtype, trust_remote_code: bool = False) -> Any:
    """transformers' model of a checkpoint, without heads. Raises LoadError and its subclasses."""
    from transformers import AutoConfig, AutoModel

    code = own_code(spec.config) if trust_remote_code else None
    if code is not None:
        log.warning(
            "%s: runs `%s`, code of the publisher's own (--trust-remote-code)", spec.folder, code
        )
    try:
        config = AutoConfig.from_pretrained(
            spec.folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (ValueError, OSError, KeyError) as error:
        classes = spec.config.get("auto_map")
        if classes and isinstance(classes, dict) and not trust_remote_code:
            raise needs_code(
                spec.folder / "config.json", str(next(iter(classes.values())))
            ) from error
        raise UnsupportedArchitecture(
            f"{spec.folder / 'config.json'}: {_first_line(error)}"
        ) from error
    except Exception as error:
        # Its type checks raise their own exceptions, some with several lines
        raise LoadError(f"{spec.folder / 'config.json'}: {' '.join(str(error).split())}") from error
    if spec.tanh_gelu:
        in_config(config)
    try:
        with _quiet():
            model, report = AutoModel.from_pretrained(
                spec.folder,
                config=config,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                # So that `_check` can refuse them by name
                ignore_mismatched_sizes=True,
                **({} if code else _without_pooler(config)),
            )
    except Exception as error:
        # Safetensors, pickle, shape and attribute errors have no common base class
        raise LoadError(f"{spec.folder}: weights cannot be loaded: {_first_line(error)}") from error
    _check(report, spec.folder)
    for name, parameter in model.named_parameters():
        checked_numbers(parameter, name, spec.folder)
    return model.eval()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' progress bars and its report of unused keys, which `_check`
    replaces."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _without_pooler(config: Any) -> dict[str, bool]:
    """Remove the pooler of BERT-like models: embedding checkpoints lack its weights, which would be
    random."""
    from transformers import AutoModel

    try:
        model_class = AutoModel._model_mapping[type(config)]
    except KeyError:
        return {}
    names = inspect.signature(model_class.__init__).parameters
    return {"add_pooling_layer": False} if "add_pooling_layer" in names else {}


def _check(report: dict[str, Any], folder: Path) -> None:
    """Raises WeightMismatch unless every trunk weight is loaded, none made up and none left
    over."""
    faults = {
        "lack": sorted(name for name in report.get("missing_keys", ()) if "pooler" not in name),
        "have another shape at": sorted(str(entry) for entry in report.get("mismatched_keys", ())),
        "hold what config.json does not": left_over(report.get("unexpected_keys", ()), folder),
    }
    for what, names in faults.items():
        if names:
            raise WeightMismatch(
                f"{folder}: the weights {what}: {names[:5]}, {len(names)} in all; nothing was made "
                "up"
            )


def checked_numbers(tensor: Tensor, name: str, folder: Path) -> Tensor:
    """Raises LoadError for NaN or infinity, which would spread to every vector. Half precision can
    overflow to infinity."""
    if not torch.isfinite(tensor.sum(dtype=torch.float32)):
        wrong = tensor.numel() - int(torch.isfinite(tensor).sum())
        if wrong:
            raise not_finite(folder, name, wrong, tensor.numel())
    return tensor


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
