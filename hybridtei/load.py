"""Composition root: configuration + checkpoint -> a model ready to run. Alone names concrete backends, and late."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from hybridtei.backends.base import Backend
from hybridtei.backends.graphs import Graph, find_graph
from hybridtei.batch import Encoding, Head, pack
from hybridtei.checkpoint.embedded import embedded_model
from hybridtei.checkpoint.files import resolve
from hybridtei.checkpoint.spec import ModelSpec, read_spec
from hybridtei.checkpoint.weights import Weights
from hybridtei.config import EMBEDDED_MODEL, EngineConfig, ModelConfig
from hybridtei.cores import available_cores
from hybridtei.errors import BackendError, LoadError
from hybridtei.outputs import Floats, HeadOutputs
from hybridtei.tasks.embed import Model
from hybridtei.text.prompts import Prompts
from hybridtei.text.reader import TextReader
from hybridtei.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

NVIDIA = Path("/dev/nvidiactl")  # asked first, since importing torch only to ask for a device costs seconds

SELF_TEST_TOKENS = 512  # of the longer text; rotary embeddings that follow the length begin to do so late
SELF_TEST_TOLERANCE = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}  # relative to the largest state


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, the engine that runs it, and the token budget of one pass on this hardware."""

    model: Model
    backend: Backend
    budget_tokens: int

    def summary(self) -> list[str]:
        """What was chosen, for people."""
        spec, backend, reader = self.model.spec, self.backend, self.model.reader
        form = "padded" if backend.padded else "packed, without padding"
        pooling = "splade" if spec.is_splade else "+".join(spec.pooling)
        return [
            f"model    {spec.model_type}, {pooling} pooling, dense width {spec.dense_width}",
            f"outputs  {', '.join(sorted(spec.heads))}",
            f"backend  {backend.name}, {backend.dtype}, {form}, {backend.lanes} lane(s)",
            f"limits   {reader.max_input_length} tokens an input, {self.budget_tokens} a pass",
        ]


def load_model(config: ModelConfig, engine: EngineConfig, *, one_caller: bool = False) -> LoadedModel:
    """Find, read, check and warm up a model. `one_caller`: passes come one at a time, so each may use all processors.

    Raises LoadError.
    """
    spec = find_model(config)
    model = Model(spec, _reader(spec, engine))
    backend = _backend(config, spec, available_cores() if one_caller else 1)
    budget = min(engine.max_batch_tokens, max(backend.busy_tokens, model.reader.max_input_length))
    try:
        _self_test(backend, min(SELF_TEST_TOKENS, model.reader.max_input_length))
        _warm_up(backend, min(model.reader.max_input_length, budget))
    except BackendError as error:
        raise LoadError(f"{spec.folder}: the first pass failed: {error}") from error
    return LoadedModel(model, backend, budget)


def find_model(config: ModelConfig) -> ModelSpec:
    """What the configured model says of itself. Raises LoadError."""
    if config.model_id == EMBEDDED_MODEL:
        folder, heads_file = embedded_model()
        return read_spec(folder, pooling=config.pooling, dense_path=config.dense_path, heads_file=heads_file)
    folder = resolve(
        config.model_id,
        revision=config.revision,
        token=config.hf_token,
        cache=config.huggingface_hub_cache,
        offline=config.offline,
    )
    return read_spec(folder, pooling=config.pooling, dense_path=config.dense_path)


def _reader(spec: ModelSpec, engine: EngineConfig) -> TextReader:
    prompts = Prompts.configure(
        spec.prompts, default_prompt=engine.default_prompt, default_prompt_name=engine.default_prompt_name
    )
    tokenizer = Tokenizer.load(spec.folder / "tokenizer.json", has_token_types=spec.has_token_types)
    return TextReader(tokenizer, prompts, _input_limit(spec, engine), spec.vocab_size, spec.lowercase)


def _input_limit(spec: ModelSpec, engine: EngineConfig) -> int:
    if spec.max_input_length <= engine.max_batch_tokens:
        return spec.max_input_length
    if not engine.auto_truncate:
        raise LoadError(
            f"the model takes {spec.max_input_length} tokens, more than `max-batch-tokens` ({engine.max_batch_tokens}): "
            "raise that, or allow `auto-truncate`"
        )
    log.warning("inputs are cut to max-batch-tokens (%d); the model takes more", engine.max_batch_tokens)
    return engine.max_batch_tokens


def _backend(config: ModelConfig, spec: ModelSpec, threads: int) -> Backend:
    """ONNX Runtime where there is no NVIDIA device and the graph of the architecture is known, else torch.

    On a CPU it gives three times torch's rate for a single short text, a tenth more for long ones, and starts in a second.
    """
    wanted = config.backend
    why_not = _not_onnxruntime(config, spec)
    if wanted == "onnxruntime" and why_not is not None:
        raise LoadError(f"{spec.folder}: cannot run on ONNX Runtime: {why_not}")
    if wanted == "onnxruntime":
        return _onnx_backend(spec, threads)
    if wanted == "auto" and why_not is None and not NVIDIA.exists():
        try:
            return _onnx_backend(spec, threads)
        except LoadError as error:  # a checkpoint may fit a known architecture and name its tensors otherwise
            log.warning("ONNX Runtime cannot run this model, torch is tried: %s", error)
    return _torch_backend(config, spec)


def _not_onnxruntime(config: ModelConfig, spec: ModelSpec) -> str | None:
    """Why a model cannot run on ONNX Runtime, or None if it can."""
    if config.dtype not in (None, "float32"):
        return f"it runs float32 only, not {config.dtype}"
    if spec.is_splade:
        return "SPLADE is not served there yet"
    if not any(spec.folder.glob("model*.safetensors")):
        return "the weights are not in safetensors"
    if find_graph(spec) is None:
        return "no graph of this architecture is known: python -m hybridtei.backends.export MODEL makes one"
    return None


def _onnx_backend(spec: ModelSpec, threads: int) -> Backend:
    from hybridtei.backends.onnx_backend import OnnxBackend

    path = find_graph(spec)
    assert path is not None
    return OnnxBackend(spec, Graph.read(path), Weights.open(spec.folder), threads=threads)


def _torch_backend(config: ModelConfig, spec: ModelSpec) -> Backend:
    if find_spec("torch") is None or find_spec("transformers") is None:
        raise LoadError("this model needs PyTorch and transformers: pip install 'hybridtei[torch]'")
    import torch

    from hybridtei.backends.torch_backend import TorchBackend

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = config.dtype or ("float32" if device == "cpu" else "float16")
    return TorchBackend(spec, dtype=dtype, device=device, trust_remote_code=config.trust_remote_code)


def _self_test(backend: Backend, longest: int) -> None:
    """A short text and a long one together must come out as each alone: a family that hides its layout from our attention,
    or picks anything by the longest text of a pass, fails here, at start."""
    spec = backend.spec
    heads = frozenset({Head.SPARSE if spec.is_splade else Head.TOKENS})
    first = spec.positions.offset
    texts = [
        Encoding(np.arange(first, first + length, dtype=np.int64) % spec.vocab_size) for length in (min(3, longest), longest)
    ]
    together = backend.forward(pack(texts, heads, spec.positions))
    for row, text in enumerate(texts):
        alone = _values(backend.forward(pack([text], heads, spec.positions)), 0)
        worst = float(np.abs(alone - _values(together, row)).max() / max(1.0, np.abs(alone).max()))
        if not worst <= SELF_TEST_TOLERANCE[backend.dtype]:  # NaN fails too
            raise LoadError(
                f"{spec.folder}: self-test failed: a text's states differ by {worst:.2g} between alone and together"
            )


def _values(outputs: HeadOutputs, row: int) -> Floats:
    if outputs.splade is not None:
        return outputs.splade.take([row]).to_dense()
    assert outputs.tokens is not None
    return outputs.tokens.row(row)


def _warm_up(backend: Backend, tokens: int) -> None:
    spec = backend.spec
    longest = Encoding(np.full(tokens, min(spec.vocab_size - 1, spec.positions.offset), dtype=np.int64))
    backend.forward(pack([longest], spec.heads, spec.positions))
