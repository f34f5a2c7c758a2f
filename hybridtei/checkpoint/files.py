"""Where a model's files are: a local folder first, a snapshot of the hub second.

Of a hub repository only what is read later is fetched: never ONNX or TensorFlow twins, and pickled weights only where
there are no safetensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridtei.errors import LoadError, MissingArtifact

CONFIGURATION = (
    *("*.json", "*/*.json", "*.txt", "*.model", "*.jinja", "artifact.metadata"),
    *("*/*.safetensors", "*/pytorch_model.bin"),
)
HEADS = ("sparse_linear.*", "colbert_linear.*")
POINTER = b"version https://git-lfs"
IS_POINTER = "a git-lfs pointer, not the file itself; run `git lfs pull` in the model's folder"
JSON_BYTES_MOST = 256_000_000  # the largest tokenizer.json of a public model has 35 MB
FILES_MOST = 10_000
NEVER = ("onnx/*", "openvino/*", "*.onnx", "*.h5", "*.msgpack", "*.ot")


def resolve(
    model_id: str, *, revision: str | None = None, token: str | None = None, cache: str | None = None, offline: bool = False
) -> Path:
    """Folder of a model. Raises MissingArtifact if it is neither a folder nor to be had from the hub."""
    if not model_id:
        raise MissingArtifact("the model id is empty: give a folder or a hub id")
    folder = Path(model_id).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute() or model_id.startswith("."):
        raise MissingArtifact(f"{model_id}: no such folder")
    return _snapshot(model_id, revision, token, cache, offline)


def _snapshot(model_id: str, revision: str | None, token: str | None, cache: str | None, offline: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    def fetch(patterns: tuple[str, ...]) -> Path:
        return Path(
            snapshot_download(
                model_id,
                revision=revision,
                token=token,
                cache_dir=cache,
                local_files_only=offline,
                allow_patterns=list(patterns),
                ignore_patterns=list(NEVER),
            )
        )

    try:
        folder = fetch((*CONFIGURATION, *HEADS, "*.safetensors"))
        if not any(folder.glob("model*.safetensors")):
            folder = fetch((*CONFIGURATION, *HEADS, "pytorch_model*.bin"))
        return folder
    except LocalEntryNotFoundError as error:
        raise MissingArtifact(f"{model_id}: not a local folder, not in the hub cache, and the hub is out of reach") from error
    except HFValidationError as error:
        raise MissingArtifact(f"{model_id}: neither a local folder nor a valid hub id") from error
    except (HfHubHTTPError, OSError) as error:
        raise MissingArtifact(f"{model_id}: cannot be fetched from the hub: {error}") from error


def read_json(path: Path) -> Any:
    """Parsed content of a JSON file that must exist. Raises MissingArtifact or LoadError, naming the file."""
    try:
        if path.stat().st_size > JSON_BYTES_MOST:
            raise LoadError(f"{path}: larger than {JSON_BYTES_MOST} bytes")
        text = path.read_text(encoding="utf-8")
        if text.startswith(POINTER.decode()):
            raise MissingArtifact(f"{path}: {IS_POINTER}")
        return json.loads(text)
    except FileNotFoundError as error:
        raise MissingArtifact(f"{path}: missing") from error
    except (ValueError, OSError, RecursionError) as error:
        raise LoadError(f"{path}: not readable as JSON: {error}") from error


def read_object(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """Like `read_json`, for files that hold one object; {} for an optional file that is not there."""
    if optional and not path.exists():
        return {}
    value = read_json(path)
    if not isinstance(value, dict):
        raise LoadError(f"{path}: holds a JSON {type(value).__name__}, should be an object")
    return value


def positive(settings: Mapping[str, Any], key: str, file: Path) -> int:
    """The whole number above zero that `file` gives as `key`. Raises LoadError, naming both."""
    value = settings.get(key)
    if value is None:
        raise LoadError(f"{file}: lacks `{key}`")
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())  # 1e30: a length without limit
    if not whole or isinstance(value, bool) or value < 1:
        raise LoadError(f"{file}: `{key}` is {value!r}, should be a whole number above zero")
    return int(value)


def require(path: Path) -> Path:
    """The path, if it is a file with content. Raises MissingArtifact, naming it and what is wrong with it."""
    if not path.is_file():
        raise MissingArtifact(f"{path}: missing")
    with path.open("rb") as file:
        head = file.read(40)
    if not head:
        raise MissingArtifact(f"{path}: empty")
    if head.startswith(POINTER):
        raise MissingArtifact(f"{path}: {IS_POINTER}")
    return path


def inside(folder: Path, relative: str) -> Path:
    """`folder/relative`, if that does not leave the folder: such names come from a checkpoint's own files."""
    path = folder / relative
    if Path(relative).is_absolute() or ".." in Path(relative).parts or "\0" in relative:
        raise LoadError(f"{folder}: the module path {relative!r} leads out of the model's folder")
    return path


def check_links(folder: Path) -> None:
    """Raises LoadError, naming the link, if one in a model's folder leads out of it: who made the folder chose what it reads.

    The hub's cache is made of links, out of a snapshot into the files of the same repository: these are as good as inside.
    """
    root = folder.resolve()
    blobs = root.parent.parent / "blobs"
    homes = (root, blobs) if root.parent.name == "snapshots" and blobs.is_dir() else (root,)
    seen = 0
    for place, folders, files in os.walk(root):  # which does not go through links
        for name in (*folders, *files):
            seen += 1
            path = Path(place, name)
            if path.is_symlink() and not any(path.resolve().is_relative_to(home) for home in homes):
                raise LoadError(f"{path}: a link that leads out of the model's folder, to {path.resolve()}")
            if seen > FILES_MOST:
                raise LoadError(f"{folder}: more than {FILES_MOST} files: not the folder of a model")
