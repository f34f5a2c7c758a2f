"""The masked-language-model head on the host, for SPLADE: hidden rows -> the strongest logit of each word in each sequence.

The product with the word table is nearly all of it, and ONNX Runtime does it two to six times as fast as numpy for short
texts, in a session of its own: a session computes its whole graph, and other outputs must not pay for this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hybridtei.backends.graph.host import layer_norm, through
from hybridtei.backends.graph.onnx_session import open_sessions
from hybridtei.backends.graph.weights import old_name
from hybridtei.backends.graph.writer import Graph, product_graph
from hybridtei.batch import Offsets
from hybridtei.checkpoint.layers import EXACT, TANH, LinearLayer, activation_name
from hybridtei.checkpoint.spec import ModelSpec
from hybridtei.checkpoint.weights import Weights
from hybridtei.errors import UnsupportedArchitecture, WeightMismatch
from hybridtei.outputs import Floats, SparseVectors
from hybridtei.system.machine import available_cores

SLICE_TOKENS = 256  # logits of a slice at v = 30k: 31 MB
Setting = tuple[str, object]  # key of config.json, and transformers' default for it


@dataclass(frozen=True, slots=True)
class _Family:
    """Where a family keeps the parts of its head. `activation` and `epsilon` are settings, or values that no setting moves."""

    dense: str
    norm: str
    decoder: str
    bias: str
    activation: Setting | str
    epsilon: Setting | float
    decoder_bias: Setting | bool = True


_BERT = "cls.predictions"
_TRANSFORM = f"{_BERT}.transform"
_ROBERTA = _Family("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias", "gelu", ("layer_norm_eps", 1e-12))
FAMILIES: Mapping[str, _Family] = {
    "bert": _Family(
        f"{_TRANSFORM}.dense",
        f"{_TRANSFORM}.LayerNorm",
        f"{_BERT}.decoder",
        f"{_BERT}.bias",
        ("hidden_act", "gelu"),
        ("layer_norm_eps", 1e-12),
    ),
    "distilbert": _Family(
        "vocab_transform", "vocab_layer_norm", "vocab_projector", "vocab_projector.bias", ("activation", "gelu"), 1e-12
    ),
    "modernbert": _Family(
        "head.dense",
        "head.norm",
        "decoder",
        "decoder.bias",
        ("classifier_activation", "gelu"),
        ("norm_eps", 1e-5),
        ("decoder_bias", True),
    ),
    "nomic_bert": _Family(
        f"{_TRANSFORM}.dense",
        f"{_TRANSFORM}.layer_norm",
        f"{_BERT}.decoder",
        f"{_BERT}.bias",
        ("hidden_act", "silu"),
        ("layer_norm_eps", 1e-12),
    ),
    "deberta-v2": _Family(
        f"{_TRANSFORM}.dense",
        f"{_TRANSFORM}.LayerNorm",
        f"{_BERT}.decoder",
        f"{_BERT}.bias",
        ("hidden_act", "gelu"),
        ("layer_norm_eps", 1e-7),
    ),
    "gte": _Family("lm_head.dense", "lm_head.norm", "lm_head.decoder", "lm_head.bias", "gelu", ("layer_norm_eps", 1e-12)),
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert", "mpnet", "jina_embeddings_v3"), _ROBERTA),
}


@dataclass(frozen=True, slots=True, eq=False)
class MlmLayers:
    """A dense layer with its activation, a norm of `scale` and `shift`, and the product with `table` float32[v, h]."""

    dense: LinearLayer
    scale: Floats
    shift: Floats | None
    epsilon: float
    table: Floats
    bias: Floats | None

    @classmethod
    def read(cls, spec: ModelSpec, weights: Weights, words: Floats) -> MlmLayers:
        """The head of a checkpoint. `words`: its table of word embeddings, float32[v, h], which most heads share.

        Raises LoadError and its kinds.
        """
        family = FAMILIES.get(spec.model_type)
        if family is None:
            raise UnsupportedArchitecture(
                f"{spec.folder / 'config.json'}: the masked-language-model head of {spec.model_type} is not served for SPLADE; "
                f"served: {', '.join(sorted(FAMILIES))}"
            )
        own = _Part(spec, weights)
        width = (spec.hidden_size,)
        activation = activation_name(str(own.setting(family.activation)), spec.folder / "config.json")
        activation = TANH if spec.tanh_gelu and activation == EXACT else activation
        table, bias = own.decoder(family, words)
        return cls(
            LinearLayer(
                own.needed(f"{family.dense}.weight", width * 2), own.optional(f"{family.dense}.bias", width), activation
            ),
            own.needed(f"{family.norm}.weight", width),
            own.optional(f"{family.norm}.bias", width),
            float(str(own.setting(family.epsilon))),
            table,
            bias,
        )


class MlmHead:
    """The head at work: hidden rows in, a weight for each word out."""

    def __init__(self, spec: ModelSpec, weights: Weights, words: Floats, *, threads: int = 1, cache_gb: float = 0) -> None:
        """See `MlmLayers.read`."""
        self._layers = MlmLayers.read(spec, weights, words)
        graph = Graph(product_graph("rows", "matrix", "logits"), {"matrix": self._layers.table.shape})
        cores = available_cores()
        counts = [threads, *([cores] if threads < cores else [])]
        sessions = open_sessions(graph, {"matrix": self._layers.table}, weights, counts, cache_gb=cache_gb)
        self._session, self._all_cores = sessions[0], sessions[-1]

    def splade(self, hidden: Floats, cu_seqlens: Offsets, *, use_all_cores: bool = False) -> SparseVectors:
        """log(1 + relu(max over tokens of a logit)): float32[t, h] -> n rows of weights over the vocabulary."""
        strongest = self.strongest(hidden, cu_seqlens, use_all_cores=use_all_cores)
        return SparseVectors.from_dense(np.log1p(np.maximum(strongest, np.float32(0))))

    def strongest(self, hidden: Floats, cu_seqlens: Offsets, *, use_all_cores: bool = False) -> Floats:
        """Max over the tokens of a sequence: float32[t, h] -> float32[n, v]. The bias is the same for all, so added last."""
        session = self._all_cores if use_all_cores else self._session
        rows = self._transformed(hidden)
        best: Floats | None = None
        for start in range(0, len(rows), SLICE_TOKENS):
            logits = session.run("logits", {"rows": rows[start : start + SLICE_TOKENS]})
            if best is None:
                best = np.full((len(cu_seqlens) - 1, logits.shape[1]), -np.inf, dtype=np.float32)
            cuts = np.clip(cu_seqlens - start, 0, len(logits))
            for row in np.flatnonzero(np.diff(cuts)):
                np.maximum(best[row], logits[cuts[row] : cuts[row + 1]].max(0), out=best[row])
        assert best is not None
        return best if self._layers.bias is None else best + self._layers.bias

    def _transformed(self, hidden: Floats) -> Floats:
        x, layers = through(hidden, self._layers.dense), self._layers
        normed = layer_norm(x, layers.epsilon) * layers.scale
        return np.asarray(normed if layers.shift is None else normed + layers.shift, dtype=np.float32)


class _Part:
    """Reads settings and tensors of a head, by their exact names."""

    def __init__(self, spec: ModelSpec, weights: Weights) -> None:
        self._spec, self._weights, self._names = spec, weights, weights.names()

    def setting(self, wanted: object) -> object:
        if not isinstance(wanted, tuple):
            return wanted
        value = self._spec.config.get(wanted[0])
        return wanted[1] if value is None else value

    def optional(self, name: str, shape: tuple[int, ...]) -> Floats | None:
        return None if self._key(name) is None else self.needed(name, shape)

    def needed(self, name: str, shape: tuple[int, ...]) -> Floats:
        key = self._key(name)
        if key is None:
            raise WeightMismatch(f"{self._weights.folder}: the weights lack `{name}` of the masked-language-model head")
        found = self._weights.shape(key)
        if found != shape:
            raise WeightMismatch(f"{self._weights.folder}: `{key}` has shape {list(found)}, the model needs {list(shape)}")
        return self._weights.float32(key)

    def _key(self, name: str) -> str | None:
        """Exactly that name, or its old spelling: what merely ends alike may be another layer's."""
        return next((key for key in (name, old_name(name)) if key in self._names), None)

    def decoder(self, family: _Family, words: Floats) -> tuple[Floats, Floats | None]:
        """(matrix, bias). What a checkpoint holds twice counts as the decoder's own, as with transformers."""
        size, tied = self._spec.vocab_size, self._spec.config.get("tie_word_embeddings") is not False
        shape = (size, self._spec.hidden_size)
        shared = tied and f"{family.decoder}.weight" not in self._names
        matrix = words if shared else self.needed(f"{family.decoder}.weight", shape)
        if matrix.shape != shape:
            raise WeightMismatch(
                f"{self._weights.folder}: the word embeddings have shape {list(matrix.shape)}, not {list(shape)}"
            )
        if not self.setting(family.decoder_bias):
            return matrix, None
        own = f"{family.decoder}.bias"
        return matrix, self.needed(own if own in self._names or not tied else family.bias, (size,))
