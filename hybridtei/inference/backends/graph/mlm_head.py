"""The masked-language-model head of SPLADE: its parts in each family, and its product on the host.

The product with the word table is nearly all of the work. For short texts ONNX Runtime computes it two to six times as fast as
numpy. It has its own session: a session always computes its whole graph, and other outputs do not need this product.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from hybridtei.errors import UnsupportedArchitecture, WeightMismatch
from hybridtei.inference.backends.graph.onnx_session import open_sessions, there
from hybridtei.inference.backends.graph.writer import Graph, product_graph
from hybridtei.inference.backends.heads import MlmLayers, Product
from hybridtei.inference.backends.weights import old_name
from hybridtei.models.checkpoint.classifiers import LinearLayer, NormLayer
from hybridtei.models.checkpoint.layers import EXACT, TANH, activation_name
from hybridtei.models.checkpoint.spec import ModelSpec
from hybridtei.models.checkpoint.weights import Weights, check_shape
from hybridtei.outputs import Floats
from hybridtei.system.machine import available_cores

Setting = tuple[str, Any]  # key of config.json and transformers' default; without a key the value is fixed


class _Family(NamedTuple):
    """The names of a family's head parts."""

    dense: str
    norm: str
    decoder: str
    bias: str
    activation: Setting
    epsilon: Setting = ("layer_norm_eps", 1e-12)
    decoder_bias: Setting = ("", True)


def _bert(norm: str, activation: str = "gelu", epsilon: float = 1e-12) -> _Family:
    names = ("transform.dense", f"transform.{norm}", "decoder", "bias")
    dense, norm, decoder, bias = (f"cls.predictions.{name}" for name in names)
    return _Family(dense, norm, decoder, bias, ("hidden_act", activation), ("layer_norm_eps", epsilon))


def _roberta(norm: str = "layer_norm") -> _Family:
    return _Family("lm_head.dense", f"lm_head.{norm}", "lm_head.decoder", "lm_head.bias", ("", "gelu"))


FAMILIES: Mapping[str, _Family] = {
    "bert": _bert("LayerNorm"),
    "nomic_bert": _bert("layer_norm", "silu"),
    "deberta-v2": _bert("LayerNorm", epsilon=1e-7),
    "gte": _roberta("norm"),
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert", "mpnet", "jina_embeddings_v3"), _roberta()),
    "distilbert": _Family(
        "vocab_transform", "vocab_layer_norm", "vocab_projector", "vocab_projector.bias", ("activation", "gelu"), ("", 1e-12)
    ),
    "modernbert": _Family(
        *("head.dense", "head.norm", "decoder", "decoder.bias"),
        ("classifier_activation", "gelu"),
        ("norm_eps", 1e-5),
        ("decoder_bias", True),
    ),
}


def mlm_layers(spec: ModelSpec, weights: Weights, words: Floats) -> MlmLayers:
    """Read the head of a checkpoint. `words`: the table of word embeddings float32[v, h], which most heads share.

    Raises LoadError and its subclasses.
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
    weight, bias = own.needed(f"{family.dense}.weight", width * 2), own.optional(f"{family.dense}.bias", width)
    scale, shift = own.needed(f"{family.norm}.weight", width), own.optional(f"{family.norm}.bias", width)
    norm = NormLayer(scale, shift, float(str(own.setting(family.epsilon))))
    return MlmLayers((LinearLayer(weight, bias, activation), norm), *own.decoder(family, words))


class MlmHead:
    """The layers of the head, and sessions for its product."""

    def __init__(self, spec: ModelSpec, weights: Weights, words: Floats, *, threads: int = 1, cache_gb: float = 0) -> None:
        self.layers = mlm_layers(spec, weights, words)
        graph = Graph(product_graph("rows", "matrix", "logits"), {"matrix": self.layers.table.shape})
        cores = available_cores()
        counts = [threads, *([cores] if threads < cores else [])]
        self._openings = open_sessions(graph, {"matrix": self.layers.table}, weights, counts, cache_gb=cache_gb)

    def product(self, *, use_all_cores: bool) -> Product:
        """A function that multiplies float32[t, h] by the table."""
        session = there(self._openings[-1 if use_all_cores else 0]) or there(self._openings[0])
        assert session is not None
        return lambda rows: session.run("logits", {"rows": rows})


class _Part:
    """Reads settings and tensors of a head by exact name."""

    def __init__(self, spec: ModelSpec, weights: Weights) -> None:
        self._spec, self._weights, self._names = spec, weights, weights.names()

    def setting(self, wanted: Setting) -> Any:
        value = self._spec.config.get(wanted[0])
        return wanted[1] if value is None else value

    def optional(self, name: str, shape: tuple[int, ...]) -> Floats | None:
        return None if self._key(name) is None else self.needed(name, shape)

    def needed(self, name: str, shape: tuple[int, ...]) -> Floats:
        key = self._key(name)
        if key is None:
            raise WeightMismatch(f"{self._weights.folder}: the weights lack `{name}` of the masked-language-model head")
        check_shape(self._weights.shape(key), shape, self._weights.folder, key)
        return self._weights.float32(key)

    def _key(self, name: str) -> str | None:
        """Find exactly this name or its old spelling: a name with the same end may belong to another layer."""
        return next((key for key in (name, old_name(name)) if key in self._names), None)

    def decoder(self, family: _Family, words: Floats) -> tuple[Floats, Floats | None]:
        """(matrix, bias). If a checkpoint has a tensor twice, the decoder's own one counts, as in transformers."""
        size, tied = self._spec.vocab_size, self._spec.config.get("tie_word_embeddings") is not False
        shape = (size, self._spec.hidden_size)
        shared = tied and f"{family.decoder}.weight" not in self._names
        matrix = words if shared else self.needed(f"{family.decoder}.weight", shape)
        check_shape(matrix.shape, shape, self._weights.folder, "word embeddings")
        if not self.setting(family.decoder_bias):
            return matrix, None
        own = f"{family.decoder}.bias"
        return matrix, self.needed(own if own in self._names or not tied else family.bias, (size,))
