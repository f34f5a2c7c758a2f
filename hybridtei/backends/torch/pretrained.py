"""Families without a file here: transformers' own modules, loaded strictly, no weight made up and none left over."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hybridtei.checkpoint import layers
from hybridtei.checkpoint.files import require
from hybridtei.checkpoint.spec import ModelSpec
from hybridtei.checkpoint.weights import left_over, not_finite
from hybridtei.errors import LoadError, UnsupportedArchitecture, WeightMismatch


def load_model(spec: ModelSpec, *, dtype: torch.dtype, trust_remote_code: bool = False) -> Any:
    """transformers' model of a checkpoint, without heads. Raises LoadError and its kinds."""
    from transformers import AutoConfig, AutoModel

    _weights_file(spec.folder)
    try:
        config = AutoConfig.from_pretrained(spec.folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except (ValueError, OSError, KeyError) as error:
        raise UnsupportedArchitecture(f"{spec.folder / 'config.json'}: {_first_line(error)}") from error
    except Exception as error:  # its checks of types raise kinds of their own, some of them on several lines
        raise LoadError(f"{spec.folder / 'config.json'}: {' '.join(str(error).split())}") from error
    if spec.tanh_gelu:
        layers.in_config(config)
    try:
        with _quiet():
            model, report = AutoModel.from_pretrained(
                spec.folder,
                config=config,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # so that `_check` refuses them, by name
                **_without_pooler(config),
            )
    except Exception as error:  # safetensors, pickle, shape and attribute errors, each of another kind
        raise LoadError(f"{spec.folder}: weights cannot be loaded: {_first_line(error)}") from error
    _check(report, spec.folder)
    check_numbers(model, spec.folder)
    return model.eval()


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers prints bars and a report of unused keys at each load; what matters of it is checked here instead."""
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
    """BERT-like models build a pooler that embedding checkpoints do not carry; it would be random, so it is left out."""
    from transformers import AutoModel

    try:
        model_class = AutoModel._model_mapping[type(config)]
    except KeyError:
        return {}
    names = inspect.signature(model_class.__init__).parameters
    return {"add_pooling_layer": False} if "add_pooling_layer" in names else {}


def _check(report: dict[str, Any], folder: Path) -> None:
    """Every weight of the trunk in its place, none made up and none left over: config.json and weights are of one model."""
    faults = {
        "lack": sorted(name for name in report.get("missing_keys", ()) if "pooler" not in name),
        "have another shape at": sorted(str(entry) for entry in report.get("mismatched_keys", ())),
        "hold what config.json does not": left_over(report.get("unexpected_keys", ())),
    }
    for what, names in faults.items():
        if names:
            raise WeightMismatch(f"{folder}: the weights {what}: {names[:5]}, {len(names)} in all; nothing was made up")


def check_numbers(model: torch.nn.Module, folder: Path) -> None:
    """What is no number in one weight is none in every vector. Half precision may have made it of a number too large for it."""
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter.sum(dtype=torch.float32)):
            wrong = parameter.numel() - int(torch.isfinite(parameter).sum())
            if wrong:
                raise not_finite(folder, name, wrong, parameter.numel())


def _weights_file(folder: Path) -> None:
    names = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
    found = next((folder / name for name in names if (folder / name).exists()), folder / names[0])
    require(found)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
