"""Hashes of everything that a model's vectors depend on. If they are equal, vectors of two models
can be compared."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from hashlib import sha256
from pathlib import Path
from threading import Lock, Thread
from typing import Any
from weakref import WeakKeyDictionary

import orjson

from hybridtei.models.checkpoint.files import JsonObject, sha256_of
from hybridtei.models.checkpoint.folder import Folder
from hybridtei.models.checkpoint.kinds import Late, Static
from hybridtei.models.checkpoint.peft import ADAPTER
from hybridtei.models.checkpoint.sentence import PROMPTS
from hybridtei.models.checkpoint.sizes import lengths
from hybridtei.models.checkpoint.spec import ModelSpec, Router
from hybridtei.models.checkpoint.tokenizer.settings import apply_settings, truncation_side
from hybridtei.models.checkpoint.tokenizer.vocabularies import read_raw, tokenizer_files

Fingerprint = Mapping[str, str | None]
log = logging.getLogger(__name__)
# If a model has weights in several formats, the first format counts
WEIGHTS = (".safetensors", ".bin", ".pt")
# Upper and lower case, accents, Chinese, leading and inner spaces, special tokens as text.
PROBE = " Na\u00efve CAF\u00c9,  \u6771\u4eac</s>[SEP]<|endoftext|> end"
ACTIVATIONS = ("hidden_act", "hidden_activation", "activation", "activation_function")


def fingerprint(
    spec: ModelSpec, *, dtype: str | None = None, default_prompt: str | None = None
) -> dict[str, str | None]:
    """Return the parts `weights`, `tokenizer`, `pooling`, `prompts`, `activation`, `dtype`; `id`,
    the hash of all of them; and `model`, the hash of all but dtype and default prompt. A part
    without files is None. `reading` is added only if texts are read differently than in version
    0.1.0, so that other models' collections keep their fingerprints.

    Reads the weights once (about a second a gigabyte) and again when a file changes. Raises
    OSError.
    """
    weights = [
        sha256_of(path) for path in sorted(set(_weights(spec)), key=partial(_order, spec.folder))
    ]
    parts: dict[str, str | None] = {
        "weights": _digest(weights) if weights else None,
        "tokenizer": spec.tokenizer_sha256,
        "pooling": _pooling(spec),
        "prompts": _digest(dict(spec.prompts or {})),
        "activation": _activation(spec),
    }
    if (reading := _reading(spec)) is not None:
        parts["reading"] = reading
    model = _digest(parts)
    parts["dtype"] = dtype
    return {"id": _digest([model, dtype, default_prompt]), "model": model, **parts}


def _weights(spec: ModelSpec) -> Iterator[Path]:
    multivector = spec.multivector
    steps: list[Any] = [*spec.kind.steps]
    if multivector:
        steps += [*multivector.before, multivector.module]
    # Some steps have no folder of their own
    folders = [getattr(step, "folder", None) for step in steps]
    for folder in (spec.folder, *(folder for folder in folders if isinstance(folder, Path))):
        for suffix in WEIGHTS:
            if files := [*folder.glob(f"*{suffix}")]:
                yield from files
                break
    # An adapter's alpha is in its configuration
    yield from (*spec.folder.glob(ADAPTER), *spec.folder.glob("*/adapter_*"))
    if isinstance(spec.kind, Router):
        query = spec.kind.of_queries
        yield from (*_weights(query), *tokenizer_files(query.folder))
    yield from (
        head.file
        for head in (spec.sparse, multivector)
        if head is not None and head.file and head.file.is_file()
    )


def _order(folder: Path, file: Path) -> tuple[bool, tuple[str, ...]]:
    """Sort key: the checkpoint's files by relative path, then others by name. Hashes must not
    depend on absolute paths."""
    if file.is_relative_to(folder):
        return False, file.relative_to(folder).parts
    return True, (file.name,)


def _reading(spec: ModelSpec) -> str | None:
    """Return the hash of the settings for reading texts, or None if version 0.1.0 read texts the
    same way. It ignored tokenizer_config.json, used the smallest of all lengths, no default prompt,
    and no prompt called passage for documents."""
    file, prompts = spec.folder / "tokenizer.json", _newly_used(spec)
    if isinstance(spec.kind, Static) or not file.is_file():
        return _digest(prompts) if prompts else None
    folder = Folder(spec.folder)
    written = folder.object("tokenizer_config.json", optional=True)
    config = JsonObject(spec.config, spec.folder / "config.json")
    limits = lengths(folder.transformer, config, written, spec.positions)
    old_limit = min(
        (length for length in limits[isinstance(spec.kind, Late) :] if length is not None),
        default=0,
    )
    now = read_raw(spec.folder)
    settings = spec.tokenizer_settings
    changed = apply_settings(now, settings, file)
    side = truncation_side(now, settings)
    if [changed, spec.max_input_length, side, prompts] == [[], old_limit, "right", []] and not (
        spec.bare or settings.lowercase or settings.template
    ):
        return None
    before = read_raw(spec.folder)
    if spec.bare:
        now.post_processor = None
    read = [
        changed,
        now.encode("").ids,
        now.encode(PROBE).ids,
        spec.max_input_length,
        side,
        prompts,
    ]
    probe = PROBE.lower() if settings.lowercase else PROBE
    if read == [[], before.encode("").ids, before.encode(probe).ids, old_limit, "right", []]:
        return None
    return _digest(read)


def _newly_used(spec: ModelSpec) -> list[str]:
    """Return the prompts that version 0.1.0 ignored: the default if it is a type's, and documents'
    prompts with their second and third names."""
    prompts, default = spec.prompts or {}, spec.default_prompt_name or ""
    names = [default for typed in PROMPTS.values() if default in typed]
    if "document" not in prompts:
        names += ["passage", "corpus"]
    return [text for name in names if (text := prompts.get(name))]


def _pooling(spec: ModelSpec) -> str:
    steps = [type(step).__name__ for step in spec.kind.steps]
    parts = [*spec.pooling, *steps]
    if spec.sparse is not None:
        parts.append(spec.sparse.kind)
        if spec.is_splade and spec.sparse.active:
            parts[-1] += f" of {spec.sparse.active}"
    if spec.multivector is not None:
        parts.append("multivector")
    return "+".join(parts)


def _activation(spec: ModelSpec) -> str | None:
    name = next((str(spec.config[key]) for key in ACTIVATIONS if spec.config.get(key)), None)
    if name == "gelu" and spec.tanh_gelu:
        return "gelu, tanh form"
    return name


def _digest(value: Mapping[str, Any] | list[Any]) -> str:
    return sha256(orjson.dumps(value, option=orjson.OPT_SORT_KEYS)).hexdigest()


_fingerprints: WeakKeyDictionary[Any, Future[Fingerprint | None]] = WeakKeyDictionary()
_lock = Lock()


def begin(owner: Any, spec: ModelSpec, **options: str | None) -> Future[Fingerprint | None]:
    """Return the future fingerprint of `owner`'s model. The first call starts a thread that
    computes it; neither a start nor the end of the process waits for it. None if a file is missing
    or changed since it was loaded. `options`: arguments of `fingerprint`."""
    with _lock:
        started = _fingerprints.get(owner)
        if started is not None:
            return started
        future: Future[Fingerprint | None] = Future()
        _fingerprints[owner] = future

    def read() -> None:
        future.set_result(fingerprint_of_loaded(spec, **options))

    Thread(target=read, name="fingerprint", daemon=True).start()
    return future


def fingerprint_of_loaded(spec: ModelSpec, **options: str | None) -> Fingerprint | None:
    """Return the fingerprint of the files that were loaded, not of others that lie in the folder by
    now: None, and a warning, if a file is missing or changed. `options`: arguments of
    `fingerprint`."""
    try:
        parts = fingerprint(spec, **options)
    except Exception as error:
        # The files changed while they were read
        log.warning("no fingerprint: %s", error)
        return None
    changed = spec.loaded_files.changed()
    if changed is not None:
        log.warning("no fingerprint: %s is not the file that was loaded", changed)
        return None
    return parts


def model_of(parts: Fingerprint | None) -> str | None:
    """Return `model` of a fingerprint."""
    return None if parts is None else parts["model"]


async def model_hash(reading: Future[Fingerprint | None]) -> str | None:
    """Wait for a fingerprint from `begin` and return its `model`. Cancelling one waiter does not
    affect the others."""
    return model_of(await asyncio.shield(asyncio.wrap_future(reading)))
