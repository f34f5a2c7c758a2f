"""Refuses folders that no backend can read: names the unsupported files, and what to use
instead."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hybridtei.errors import LoadError, MissingArtifact
from hybridtei.models.checkpoint.folder import Folder
from hybridtei.models.checkpoint.peft import ADAPTER, base_of, read_adapter
from hybridtei.models.checkpoint.weights import weight_files

GLINER = "gliner_config.json"
CONFIG = "config.json"
# ONNX Runtime runs these graphs without weight files
GRAPHS = ("*.onnx", "onnx/*.onnx")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
# Keys of config.json that quantised weights have -> the method if it has no name.
QUANTISED = {
    "quantization_config": "of an unnamed method",
    "compression_config": "of an unnamed method",
    "quantization": "of MLX",
}
READ = "hybridtei reads model.safetensors or its shards, or pytorch_model.bin"
NOT_FETCHED = "GGUF, TensorFlow's and Flax's files are not fetched from the hub"
ORIGINAL = "give the model that they were made from, whose repository has them"
SAVED = "save the model by `save_pretrained`, which writes model.safetensors"
# Pattern of unsupported weight files -> their description, and what the user should do.
FOREIGN = {
    "*.gguf": ("weights for llama.cpp (GGUF)", ORIGINAL),
    "tf_model*.h5": (
        "TensorFlow's weights",
        "transformers 4 converts them, by `from_tf=True` and `save_pretrained`",
    ),
    "*.ckpt*": ("TensorFlow's weights", ORIGINAL),
    "flax_model*.msgpack": (
        "Flax's weights",
        "transformers 4 converts them, by `from_flax=True` and `save_pretrained`",
    ),
    "consolidated*": (
        "weights under the publisher's own names",
        "give the repository that holds them in transformers' form",
    ),
    "model.*.safetensors": ("weights of a variant", "rename the file to model.safetensors"),
    "pytorch_model.*.bin": ("weights of a variant", "rename the file to pytorch_model.bin"),
    "*.mlmodel*": ("weights for Core ML", ORIGINAL),
    "*.mlpackage": ("weights for Core ML", ORIGINAL),
    "openvino*.xml": ("OpenVINO's graph", ORIGINAL),
    "openvino/*.xml": ("OpenVINO's graph", ORIGINAL),
    "model.bin": ("weights for CTranslate2", ORIGINAL),
    "*.tflite": ("weights for TensorFlow Lite", ORIGINAL),
    "*.engine": ("a graph for TensorRT", ORIGINAL),
    "*.plan": ("a graph for TensorRT", ORIGINAL),
    "*.ot": ("weights for rust-bert", ORIGINAL),
    "*model*.pt": ("a program of TorchScript, or weights under a name of their own", SAVED),
    "*.pth": ("torch's weights under a name of their own", SAVED),
    "checkpoint-*/*.safetensors": ("checkpoints of a training", "give one of these folders"),
}
# Characters of a name from a file, as shown in messages
LONGEST_SHOWN = 200


def check_contents(root: Folder, transformer: Folder | None = None) -> None:
    """Raises LoadError or MissingArtifact, naming the file, if a folder holds an adapter, quantised
    weights, or no readable model. `transformer`: its folder inside it. Names from files are
    shown, but never resolved."""
    folder = transformer or root
    home = folder.path
    # Often the same folder
    for each in dict.fromkeys((root.path, home)):
        _check_adapter(each)
    if (home / GLINER).exists():
        raise LoadError(
            f"{home / GLINER}: a GLiNER model, which finds entities of any name, is not supported"
        )
    foreign = None if has_readable(home) else _foreign(home)
    if foreign is not None:
        description, cure = foreign
        raise MissingArtifact(f"{home}: holds {description}. {READ}: {cure}")
    if not (home / CONFIG).exists():
        raise MissingArtifact(f"{home / CONFIG}: missing{_instead(home)}")
    _check_quantised(folder)


def has_readable(folder: Path) -> bool:
    """True if the folder has weights or a graph that some backend reads."""
    files = (*INDEXES, *GRAPHS)
    return bool(weight_files(folder)) or any(
        next(folder.glob(pattern), None) is not None for pattern in files
    )


def no_weights(folder: Path) -> MissingArtifact:
    """Return the error of a folder without weights and without a graph."""
    again = "copy or download the whole repository again, or give one with safetensors"
    return MissingArtifact(
        f"{folder / 'model.safetensors'}: missing. {READ}: {again}; {NOT_FETCHED}"
    )


def _check_quantised(folder: Folder) -> None:
    config, file = folder.object(), folder.path / CONFIG
    nested = config.get("text_config")
    parts = [config, nested] if isinstance(nested, dict) else [config]
    for part in parts:
        key = next((key for key in QUANTISED if part.get(key)), None)
        if key is not None:
            settings = part[key]
            method = isinstance(settings, dict) and settings.get("quant_method")
            named = _shown(method or QUANTISED[key])
            raise LoadError(
                f"{file}: the weights are quantised (`{key}`, {named}); read are those in "
                "float32, float16 or bfloat16. Give the model that it was made from; `--dtype "
                "int8` quantises here"
            )


def _check_adapter(folder: Path) -> None:
    """Raises LoadError for an adapter that is not LoRA's, or whose base's weights are elsewhere."""
    file = folder / ADAPTER
    if not file.exists():
        return
    base = base_of(read_adapter(folder))
    if not has_readable(folder):
        raise LoadError(
            f"{file}: an adapter of {_shown(base)}, without the weights of its base: put the "
            "base's files and the adapter's into one folder, and serve that"
        )


def _foreign(folder: Path) -> tuple[str, str] | None:
    """Return a description of unsupported weights in the folder, and what to do about them."""
    for pattern, (what, cure) in FOREIGN.items():
        files = sorted(str(file.relative_to(folder)) for file in folder.glob(pattern))
        if files:
            more = " …" if len(files) > 3 else ""
            return f"{what}: {', '.join(files[:3])}{more}", cure
    return None


def _instead(folder: Path) -> str:
    """Return the end of the message about a folder without config.json."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return f": the folder is empty. Copy or download a model in safetensors; {NOT_FETCHED}"
    inner = sorted(
        str(file.parent)
        for pattern in ("*/config.json", "snapshots/*/config.json")
        for file in folder.glob(pattern)
    )
    # A folder such as 1_Pooling is a module of sentence-transformers, not a model
    inner = [name for name in inner if not re.match(r"\d+_", Path(name).name)]
    if inner:
        return f". The folder {inner[0]} has one: is that the model's?"
    return ". It says which model the weights are of: copy or download the whole repository again"


def _shown(value: Any) -> str:
    return repr(str(value)[:LONGEST_SHOWN])
