"""Loads models: configuration + checkpoint -> a model ready to run; and reads the list of models of
one process.

Only this module names concrete backends. Several models come from repeated `--model-id`, or from a
TOML file of `[[model]]`
tables:

    [[model]]
    model_id = "minilm-hybrid"

    [[model]]
    model_id = "/models/reranker"
    alias = "rerank"
    dtype = "int8"

The keys of a table are the fields of `NamedModel`. The flags are their defaults.
"""

from __future__ import annotations

import logging
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from hybridtei.batch import Encoding, Head, Padding, pack
from hybridtei.config import (
    EMBEDDED_MODEL,
    EngineConfig,
    ModelConfig,
    NamedModel,
)
from hybridtei.errors import (
    BackendError,
    LoadError,
    MissingArtifact,
    UnsupportedArchitecture,
    UsageError,
)
from hybridtei.inference.backends.base import Backend, Routed
from hybridtei.inference.backends.fidelity import SAMPLES
from hybridtei.inference.backends.select import open_backend
from hybridtei.inference.tasks.base import Model
from hybridtei.inference.tasks.embed import WITHOUT_PROMPT
from hybridtei.keywords import check_names, check_value
from hybridtei.models.checkpoint.contents import has_readable
from hybridtei.models.checkpoint.files import (
    check_links,
    embedded_model,
    hub_folder,
    joined,
    read_json,
    resolve,
)
from hybridtei.models.checkpoint.folder import Folder
from hybridtei.models.checkpoint.kinds import Late
from hybridtei.models.checkpoint.layers import query_table, with_tanh_gelu
from hybridtei.models.checkpoint.peft import ADAPTER, base_of, read_adapter
from hybridtei.models.checkpoint.sizes import UNSET_LENGTH
from hybridtei.models.checkpoint.spec import ModelSpec, Router, read_spec
from hybridtei.models.checkpoint.tokenizer.settings import read_tokenizer_settings
from hybridtei.models.checkpoint.tokenizer.vocabularies import tokenizer_files
from hybridtei.models.families import SERVED
from hybridtei.models.text.reader import TextReader
from hybridtei.models.text.tokenizer import Prompts, Tokenizer
from hybridtei.outputs import Floats, HeadOutputs
from hybridtei.system import memory
from hybridtei.system.machine import read_bounded
from hybridtei.system.shape import explain

log = logging.getLogger(__name__)

FORMS = {
    Padding.NONE: "packed, without padding",
    Padding.ATTENTION: "packed, attention padded",
    Padding.ALL: "padded",
}
# Tokens of the longer text. In transformers' modules, length-dependent rotary embeddings change
# only in long texts. Graphs have known families, and each token costs 8 ms at the start of a model
# of 0.6B on two cores.
SELF_TEST_TOKENS, GRAPH_TEST_TOKENS = 512, 16
# Of the self-test's text, for each of its tokens
SAMPLE_CHARACTERS = 8
# Largest deviation of a state, relative to the largest state.
SELF_TEST_TOLERANCE = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5, "int8": 0.02, "fp8": 0.5}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, its backend, and the token budget of one pass on this hardware."""

    model: Model
    backend: Backend
    budget_tokens: int

    def facts(self) -> list[dict[str, Any]]:
        """The facts in each line of `summary`, for programs."""
        spec, backend = self.model.spec, self.backend
        return [
            {
                "model_type": spec.model_type,
                "kind": spec.role,
                "pooling": list(spec.pooling),
                "dense_width": spec.dense_width,
            },
            {"outputs": sorted(spec.heads)},
            {
                "backend": backend.name,
                "dtype": backend.dtype,
                "padding": backend.padding,
                "lanes": list(backend.lanes),
            },
            {
                "max_input_length": self.model.reader.max_input_length,
                "pass_tokens": self.budget_tokens,
            },
        ]

    def summary(self) -> list[str]:
        """The log lines of the model: model, outputs, backend and limits."""
        spec, backend, reader = self.model.spec, self.backend, self.model.reader
        form = FORMS[backend.padding]
        pooling = "splade" if spec.is_splade else "+".join(spec.pooling)
        embeds = (
            f"{pooling} pooling, dense width {spec.dense_width}"
            if not isinstance(spec.kind, Late)
            else "late interaction"
        )
        return [
            f"model    {spec.model_type}, "
            f"{embeds if spec.role == 'embedding' else f'{spec.role}, {len(spec.labels)} labels'}",
            f"outputs  {', '.join(sorted(spec.heads))}",
            f"backend  {backend.name}, {backend.dtype}, {form}, lanes: "
            f"{', '.join(sorted(backend.lanes, reverse=True))}",
            f"limits   {reader.max_input_length} tokens an input, {self.budget_tokens} a pass",
        ]


def load_model(config: ModelConfig, engine: EngineConfig, *, measures: bool = True) -> LoadedModel:
    """Find, read, check and warm up a model. `measures`: as for `Encoder.load`. Raises
    LoadError."""
    spec = find_model(config)
    # Reading a large vocabulary takes as long as the weights
    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(text_model, spec, engine)
        backend = open_backend(config, spec, bulk_niceness=engine.bulk_niceness)
        model = reading.result()
    if not measures:
        return LoadedModel(model, backend, min(engine.max_batch_tokens, backend.busy_tokens))
    parts = backend.backends if isinstance(backend, Routed) else (backend,)
    try:
        # A team would wait for the cores that open further sessions
        with threadpool_limits(limits=1, user_api="blas"):
            for part in parts:
                tokens = SELF_TEST_TOKENS if part.name == "torch" else GRAPH_TEST_TOKENS
                longest = min(tokens, part.spec.max_input_length, model.reader.max_input_length)
                _self_test(part, _sample_ids(model, longest))
        budget = min(_that_fit(backend, engine, model.reader.max_input_length), backend.busy_tokens)
    except BackendError as error:
        if spec.model_type in SERVED:
            raise LoadError(f"{spec.folder}: the first pass failed: {error}") from error
        log.warning("%s: the first pass failed: %s", spec.folder, error)
        raise _unserved(spec, "needs more than the ids of a text of any length") from error
    backend.free_unused()
    memory.trim()
    return LoadedModel(model, backend, budget)


def find_model(config: ModelConfig) -> ModelSpec:
    """Find the configured model and read its specification. Raises LoadError."""
    spec = _declared(config)
    return with_tanh_gelu(spec) if config.gelu == "tanh" else spec


def _declared(config: ModelConfig) -> ModelSpec:
    read = partial(
        read_spec,
        pooling=config.pooling,
        dense_path=config.dense_path,
        trusted=config.trust_remote_code,
    )
    if config.model_id == EMBEDDED_MODEL:
        folder, heads_file = embedded_model()
        return read(folder, heads_file=heads_file)
    find = partial(
        resolve,
        token=config.hf_token,
        cache=config.huggingface_hub_cache,
        offline=config.offline,
    )
    folder = find(config.model_id, revision=config.revision)
    check_links(folder)
    # For a stranger's file the hub is asked only if the user named the stranger's repository, and
    # at start
    is_asked = type(config) is ModelConfig and not Path(config.model_id).expanduser().is_dir()
    find_base = partial(
        hub_folder,
        token=config.hf_token,
        cache=config.huggingface_hub_cache,
        offline=config.offline or not is_asked,
    )
    return read(_with_base(folder, find_base))


def _with_base(folder: Path, find: Callable[..., Path]) -> Path:
    """Return the folder, joined with its base's if it holds only an adapter: a folder inside it or
    beside it, or a repository of the hub. Raises LoadError."""
    if not (folder / ADAPTER).exists() or has_readable(folder):
        return folder
    adapter = read_adapter(folder)
    name, revision = base_of(adapter), adapter.get("revision")
    if revision is not None and not isinstance(revision, str):
        raise adapter.wrong("revision", "a name")
    try:
        base = _beside(folder, name)
        if base is None:
            base = find(name, revision=revision)
        if not has_readable(base):
            raise MissingArtifact(f"{base}: holds no weights")
    except MissingArtifact as error:
        raise MissingArtifact(
            f"{adapter.file}: `base_model_name_or_path` is {name[:200]!r}, which is not here: "
            f"download it by `hf download`, or put its files into the adapter's folder ({error})"
        ) from error
    check_links(base)
    return joined(base, folder, name)


def _beside(folder: Path, name: str) -> Path | None:
    """Return the base's folder inside the adapter's or directly beside it; None: `name` is of the
    hub. Raises LoadError for a path that leads anywhere else."""
    home, steps = folder.resolve(), Path(name).parts
    if not Path(name).is_absolute() and not name.startswith("~"):
        for base in (home / name, home.parent / name):
            is_near = home in base.resolve().parents or base.resolve().parent == home.parent
            if is_near and base.resolve() != home and base.is_dir():
                return base
        if ".." not in steps:
            return None
    raise LoadError(
        f"{folder / ADAPTER}: `base_model_name_or_path` is {name[:200]!r}, which is no folder in "
        "the adapter's or directly beside it: copy the base's folder beside the adapter's and "
        "write its name there, or copy its files into the adapter's folder"
    )


def text_model(spec: ModelSpec, engine: EngineConfig) -> Model:
    """Return a model without its backend. Raises LoadError."""
    queries = text_model(spec.kind.of_queries, engine) if isinstance(spec.kind, Router) else None
    reader = text_reader(spec, engine)
    return Model(spec, reader, query_table(spec), queries, _table_reader(spec, engine, reader))


def _table_reader(spec: ModelSpec, engine: EngineConfig, reader: TextReader) -> TextReader | None:
    """Return the reader of queries that are looked up by a tokenizer of their own, or None."""
    folder = getattr(spec.sparse, "queries", None)
    if folder is None or not tokenizer_files(folder):
        return None
    words = Folder(folder).tokenizer_config
    settings = read_tokenizer_settings(words, spec.model_type, {"vocab_size": spec.vocab_size})
    tokenizer = Tokenizer.load(folder / "tokenizer.json", settings=settings)
    longest = min(words.count("model_max_length", UNSET_LENGTH), engine.max_batch_tokens)
    return replace(reader, tokenizer=tokenizer, max_input_length=longest)


def text_reader(spec: ModelSpec, engine: EngineConfig) -> TextReader:
    """Return a model's tokenizer with its limits and prompts. Raises LoadError."""
    name = engine.default_prompt_name
    if engine.use_default_prompt and engine.default_prompt is None and name is None:
        name = spec.default_prompt_name
    prompts = Prompts.configure(
        spec.prompts,
        default_prompt=engine.default_prompt,
        default_prompt_name=name,
        adapters=() if spec.adapters is None else spec.adapters.names,
        own=spec.default_prompt_name,
    )
    if not spec.kind.pools_prompts and prompts.named(prompts.own):
        raise LoadError(
            f"{spec.folder}: a prompt goes before every text, and {WITHOUT_PROMPT}: give "
            '--default-prompt ""'
        )
    tokenizer = Tokenizer.load(
        spec.folder / "tokenizer.json",
        has_token_types=spec.has_token_types,
        bare=spec.bare,
        settings=spec.tokenizer_settings,
    )
    return TextReader(
        tokenizer, prompts, _input_limit(spec, engine), spec.vocab_size, spec.kind.skipped_padding
    )


def _input_limit(spec: ModelSpec, engine: EngineConfig) -> int:
    if spec.max_input_length <= engine.max_batch_tokens:
        return spec.max_input_length
    if not engine.auto_truncate:
        raise LoadError(
            f"the model takes {spec.max_input_length} tokens, more than `max-batch-tokens` "
            f"({engine.max_batch_tokens}): raise that, or allow `auto-truncate`"
        )
    log.warning(
        "inputs are cut to max-batch-tokens (%d); the model takes more", engine.max_batch_tokens
    )
    return engine.max_batch_tokens


def _sample_ids(model: Model, count: int) -> NDArray[np.int64]:
    """The ids of a text, since made-up ids have smaller states; repeated if it is short."""
    text = " ".join(read_json(SAMPLES))[: SAMPLE_CHARACTERS * count]
    (raw,) = model.reader.tokenizer.encode([text])
    return np.resize(np.array(raw.ids, dtype=np.int64), count)


def _self_test(backend: Backend, ids: NDArray[np.int64]) -> None:
    """Run all outputs once, on a text of these ids and on its beginning. Raises LoadError if states
    overflow, or unless a short text has the same states alone and
    after a long text in one pass. A family that hides its layout from our attention, or depends on
    the longest text of a pass, fails here, at start. The long text uses the model's last adapter,
    the short one none."""
    spec = backend.spec
    heads = spec.heads if spec.is_splade else spec.heads | {Head.TOKENS}
    last_adapter = 0 if spec.adapters is None else len(spec.adapters.names)
    long = Encoding(ids % spec.vocab_size, adapter=last_adapter)
    short = Encoding(ids[:3] % spec.vocab_size)
    both = backend.forward(pack([long, short], heads, spec.positions), use_all_cores=True)
    together = _values(both, 1)
    alone = _values(backend.forward(pack([short], heads, spec.positions)), 0)
    if not all(np.isfinite(states).all() for states in (alone, together, _values(both, 0))):
        raise LoadError(
            f"{spec.folder}: self-test failed: states are infinite or NaN in {backend.dtype}; "
            "`--dtype bfloat16` and `float32` have a wider range than float16"
        )
    worst = float(np.abs(alone - together).max() / max(1.0, np.abs(alone).max()))
    # `not`, so that NaN fails too
    if not worst <= SELF_TEST_TOLERANCE[backend.dtype]:
        if spec.model_type not in SERVED:
            raise _unserved(
                spec,
                "lets a text see its padding or its neighbours, and changes its states by "
                f"{worst:.2g}",
            )
        raise LoadError(
            f"{spec.folder}: self-test failed: a text's states differ by {worst:.2g} between alone "
            "and together"
        )


def _unserved(spec: ModelSpec, why: str) -> UnsupportedArchitecture:
    """The error of a model that only transformers' modules could run, but not independently of a
    text's neighbours."""
    file = spec.folder / "config.json"
    return UnsupportedArchitecture(
        f"{file}: the family `{spec.model_type}` {why}; supported: {', '.join(SERVED)}"
    )


def _that_fit(backend: Backend, engine: EngineConfig, longest: int) -> int:
    """Return the token budget of a pass: the configured one, or less if the device lacks memory.
    Raises LoadError."""
    budget = backend.max_tokens(engine.max_batch_tokens, longest, engine.memory_fraction)
    if budget < engine.max_batch_tokens:
        log.warning(
            "a pass takes at most %d tokens: memory is short; max-batch-tokens is %d",
            budget,
            engine.max_batch_tokens,
        )
    return budget


def _values(outputs: HeadOutputs, row: int) -> Floats:
    if outputs.splade is not None:
        return outputs.splade.take([row]).to_dense()
    assert outputs.tokens is not None
    return outputs.tokens.row(row)


MAX_LIST_BYTES = 1_000_000
ALIAS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def read_models(path: Path, flags: ModelConfig) -> list[NamedModel]:
    """Read the models of a file. Raises LoadError, naming the file, the table and the key."""
    try:
        content = tomllib.loads(read_bounded(path, MAX_LIST_BYTES).decode())
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise LoadError(f"{path}: cannot be read as a list of models: {error}") from error
    tables = content.get("model")
    if not isinstance(tables, list) or not tables or set(content) != {"model"}:
        raise LoadError(f"{path}: should hold nothing but [[model]] tables, at least one")
    return distinct(
        [
            named_model(table, flags, f"{path}: model {number}")
            for number, table in enumerate(tables, 1)
        ]
    )


def named_model(table: Mapping[str, Any], flags: ModelConfig, where: str) -> NamedModel:
    """Return the model of one table, which overrides the flags. Raises LoadError, beginning with
    `where`."""
    unknown = sorted(set(table) - set(NamedModel.__struct_fields__))
    if unknown:
        raise LoadError(
            f"{where}: unknown key `{unknown[0]}`; known: {', '.join(NamedModel.__struct_fields__)}"
        )
    model_id = table.get("model_id")
    if not isinstance(model_id, str):
        raise LoadError(f"{where}: `model_id` should be a text")
    settings = {**msgspec.structs.asdict(flags), "alias": default_alias(model_id), **table}
    try:
        model = msgspec.convert(settings, NamedModel)
    except msgspec.ValidationError as error:
        raise LoadError(f"{where}: {explain(error, settings, NamedModel)}") from None
    if not ALIAS.fullmatch(model.alias):
        raise LoadError(
            f"{where}: alias {model.alias!r} should be 1 to 100 letters, digits, dots, dashes, "
            "underscores"
        )
    return model


def from_ids(model_ids: Sequence[str], flags: ModelConfig) -> list[NamedModel]:
    """Return the models of repeated flags. Raises LoadError."""
    return distinct(
        [named_model({"model_id": model_id}, flags, model_id) for model_id in model_ids]
    )


def distinct(models: Sequence[NamedModel]) -> list[NamedModel]:
    """Return the models. Raises LoadError if two share an alias."""
    seen: set[str] = set()
    for model in models:
        if model.alias in seen:
            raise LoadError(
                f"two models are called {model.alias!r}: give one of them another `alias`"
            )
        seen.add(model.alias)
    return [*models]


def default_alias(model_id: str) -> str:
    """Return the last part of a path or a hub id."""
    return model_id.rstrip("/").rpartition("/")[2]


def configured(
    config: ModelConfig, engine: EngineConfig, options: Mapping[str, Any]
) -> tuple[ModelConfig, EngineConfig]:
    """Return both configs with `options` applied. Raises TypeError for an unknown option,
    UsageError for a wrong value."""
    fields = {
        field.name: field
        for kind in (ModelConfig, EngineConfig)
        for field in msgspec.structs.fields(kind)
    }
    check_names("Encoder.load()", options, fields)
    for name, value in options.items():
        check_value(name, value, fields[name].type, UsageError)
    of_model = {
        name: value for name, value in options.items() if name in ModelConfig.__struct_fields__
    }
    of_engine = {name: value for name, value in options.items() if name not in of_model}
    return (
        msgspec.structs.replace(config, **of_model),
        msgspec.structs.replace(engine, **of_engine),
    )
