"""What a model's vectors follow from, in a few hashes: vectors of two models can be compared where these are equal."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from threading import Lock, Thread
from typing import Any
from weakref import WeakKeyDictionary

import orjson

from hybridtei.checkpoint.files import sha256_of
from hybridtei.checkpoint.spec import ModelSpec

Fingerprint = Mapping[str, str | None]
log = logging.getLogger(__name__)
WEIGHTS = (".safetensors", ".bin", ".pt")  # of one model in several forms the first counts
ACTIVATIONS = ("hidden_act", "hidden_activation", "activation", "activation_function")


def fingerprint(spec: ModelSpec, *, dtype: str | None = None, default_prompt: str | None = None) -> dict[str, str | None]:
    """Return `model`, the hash of all below but the dtype and the default prompt; `id`, the hash of all; and the parts:
    `weights`, `tokenizer`, `pooling`, `prompts`, `activation`, `dtype`. A part is None where there are no files of it.

    Reads the weights once, about a second for a gigabyte, and again when a file changes. Raises OSError.
    """
    weights = [_of_file(path) for path in sorted(set(_weights(spec)))]
    tokenizer = spec.folder / "tokenizer.json"
    parts: dict[str, str | None] = {
        "weights": _digest(weights) if weights else None,
        "tokenizer": _of_file(tokenizer) if tokenizer.is_file() else None,
        "pooling": _pooling(spec),
        "prompts": _digest(dict(spec.prompts or {})),
        "activation": _activation(spec),
    }
    model = _digest(parts)
    parts["dtype"] = dtype
    return {"id": _digest([model, dtype, default_prompt]), "model": model, **parts}


def _weights(spec: ModelSpec) -> Iterator[Path]:
    multivector = spec.multivector
    steps = [*spec.dense_modules, *((*multivector.before, multivector.module) if multivector else ())]
    for folder in (spec.folder, *(folder for step in steps if isinstance(folder := getattr(step, "folder", None), Path))):
        for suffix in WEIGHTS:
            if found := [*folder.glob(f"*{suffix}")]:
                yield from found
                break
    if spec.query is not None:
        yield from (*_weights(spec.query), spec.query.folder / "tokenizer.json")
    yield from (head.file for head in (spec.sparse, multivector) if head is not None and head.file and head.file.is_file())


def _of_file(path: Path) -> str:
    status = path.stat()
    return _kept(path, status.st_size, status.st_mtime_ns, status.st_ino)


@lru_cache(1024)
def _kept(path: Path, *_: int) -> str:
    return sha256_of(path)


def _pooling(spec: ModelSpec) -> str:
    steps = [type(step).__name__ for step in spec.dense_modules]
    sparse = [] if spec.sparse is None else [spec.sparse.kind]
    return "+".join([*spec.pooling, *steps, *sparse, *(["multivector"] if spec.multivector else [])])


def _activation(spec: ModelSpec) -> str | None:
    name = next((str(spec.config[key]) for key in ACTIVATIONS if spec.config.get(key)), None)
    return f"{name}, tanh form" if name == "gelu" and spec.tanh_gelu else name


def _digest(value: Mapping[str, Any] | list[Any]) -> str:
    return sha256(orjson.dumps(value, option=orjson.OPT_SORT_KEYS)).hexdigest()


_begun: WeakKeyDictionary[Any, Future[Fingerprint | None]] = WeakKeyDictionary()
_beginning = Lock()


def begin(owner: Any, spec: ModelSpec, **options: str | None) -> Future[Fingerprint | None]:
    """Return the fingerprint of what `owner` serves, which a thread makes from the first call on: no start waits for it, and a
    process does not wait for it to end. None where a file is no longer there. `options`: of `fingerprint`."""
    with _beginning:
        if (found := _begun.get(owner)) is not None:
            return found
        made: Future[Fingerprint | None] = Future()
        _begun[owner] = made

    def read() -> None:
        try:
            made.set_result(fingerprint(spec, **options))
        except OSError as error:
            log.warning("no fingerprint: %s", error)
            made.set_result(None)

    Thread(target=read, name="fingerprint", daemon=True).start()
    return made


async def model_hash(reading: Future[Fingerprint | None]) -> str | None:
    """Return `model` of a fingerprint that `begin` makes, once it is there; a waiter that is cancelled leaves it to others."""
    found = await asyncio.shield(asyncio.wrap_future(reading))
    return None if found is None else found["model"]
