"""Finds a checkpoint's tensors for a graph without weights, under the graph's names, independent of
the runtime; and the parts of SPLADE's masked-language-model head in each family.

All names of a checkpoint may have a prefix that the graph's names lack, or the reverse. Any other
difference means another model, and is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hybridtei.errors import LoadError, UnsupportedArchitecture, WeightMismatch
from hybridtei.inference.backends.graph.writer import Graph
from hybridtei.inference.backends.heads import MlmLayers
from hybridtei.models.checkpoint.classifiers import LinearLayer, NormLayer
from hybridtei.models.checkpoint.layers import EXACT, TANH, activation_name
from hybridtei.models.checkpoint.spec import ModelSpec
from hybridtei.models.checkpoint.tensors import old_name
from hybridtei.models.checkpoint.weights import Weights, check_shape
from hybridtei.models.families import family_of, that_have
from hybridtei.models.families.family import MaskedHead, Setting
from hybridtei.models.families.settings import warn_once
from hybridtei.outputs import Floats

Shapes = Mapping[str, tuple[int, ...]]
# Name patterns of the trunk's weights: layers and tables. Poolers, heads, buffers and
# towers for other inputs than text may stay unused.
OF_TRUNK = re.compile(r"(^|\.)(layers?\.\d+|embeddings|embed_tokens|distance_embedding)\.")
UNUSED = re.compile(
    r"pooler|(^|\.)cls\.|lm_head|classifier|vocab_|predictions|position_ids$|inv_freq$|"
    r"^decoder\.|^encoder\.embed_tokens\.|(^|\.)(vision|audio)_tower\."
)


# Names of heads beside those
OF_HEAD = re.compile(
    r"(^|\.)(score|head|qa_outputs|seq_relationship|logit_scale|multi_modal_projector)(\.|$)|"
    r"^(dense|linear)\.(weight|bias)$"
)


def left_over(unused: Iterable[str], folder: Path) -> list[str]:
    """Return the trunk's unused tensors. If there are any, config.json describes another model.
    Warn of layers of no known name, such as a CRF."""
    names = sorted(name for name in unused if not UNUSED.search(name))
    of_trunk = [name for name in names if OF_TRUNK.search(name)]
    unknown = [name for name in names if not OF_TRUNK.search(name) and not OF_HEAD.search(name)]
    if unknown:
        warn_once(
            f"{folder}: the weights hold {len(unknown)} tensors that nothing reads, such as "
            f"{unknown[:5]}: if they are layers, this is another model"
        )
    return of_trunk


def graph_tensors(graph: Graph, weights: Weights) -> Mapping[str, Floats]:
    """The graph's tensors under the graph's names, widened at each access. Raises
    WeightMismatch."""
    return _Tensors(graph_keys(graph, weights), weights)


class _Tensors(Mapping[str, Floats]):
    def __init__(self, keys: Mapping[str, str], weights: Weights) -> None:
        self._keys, self._weights = keys, weights

    def __getitem__(self, name: str) -> Floats:
        return self._weights.float32(self._keys[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def graph_keys(graph: Graph, weights: Weights) -> dict[str, str]:
    """The checkpoint's spelling of each name in the graph, with shapes checked. Raises
    WeightMismatch."""
    keys = {name: weights.checked(name, shape) for name, shape in graph.weights.items()}
    check_names({**keys, **{name: weights.find(name) for name in graph.held}}, weights)
    return keys


def word_table(spec: ModelSpec, shapes: Shapes) -> str | None:
    """The name of the word embeddings, the only tensor with a row for each word, if the sparse head
    reads them; else None. Raises LoadError if none or several tensors have that shape."""
    if not (spec.is_splade or spec.reads_words):
        return None
    tables = [
        name for name, shape in shapes.items() if shape == (spec.vocab_size, spec.hidden_size)
    ]
    if not tables:
        raise UnsupportedArchitecture(
            f"{spec.folder / 'config.json'}: {spec.model_type} has no table of word embeddings "
            f"with {spec.vocab_size} rows of {spec.hidden_size} numbers, as sparse weights need"
        )
    if len(tables) != 1:
        raise LoadError(
            f"{spec.folder}: {len(tables)} tensors could be the word embeddings: {tables}"
        )
    return tables[0]


def check_names(key_of: Mapping[str, str | None], weights: Weights) -> None:
    """Raises WeightMismatch for another model: the graph's names have several prefixes, or weights
    of a trunk are left over."""
    prefixes = {_prefix(name, key) for name, key in key_of.items() if key is not None}
    if len(prefixes) > 1:
        raise WeightMismatch(
            f"{weights.folder}: the weights of the trunk lie under several prefixes: "
            f"{sorted(prefixes)}"
        )
    read = {key for key in key_of.values() if key is not None}
    unused = left_over(weights.names() - read, weights.folder)
    if unused:
        raise WeightMismatch(
            f"{weights.folder}: the weights hold what config.json does not: {unused[:5]}, "
            f"{len(unused)} in all"
        )


def _prefix(name: str, key: str) -> str:
    """The prefix that the checkpoint adds to a name, or after a minus the one that it removes."""
    if not key.endswith(name) and not name.endswith(key):
        name = old_name(name)
    if key.endswith(name):
        return key.removesuffix(name)
    return "-" + name.removesuffix(key)


def mlm_layers(spec: ModelSpec, weights: Weights, words: Floats) -> MlmLayers:
    """Read the head of a checkpoint. `words`: the table of word embeddings float32[v, h], which
    most heads share.

    Raises LoadError and its subclasses.
    """
    family = family_of(spec.model_type).masked
    if family is None:
        raise UnsupportedArchitecture(
            f"{spec.folder / 'config.json'}: the masked-language-model head of {spec.model_type} "
            f"is not supported for SPLADE; supported: {that_have('masked')}"
        )

    def optional(name: str) -> Floats | None:
        if weights.has(name) or weights.has(old_name(name)):
            return weights.array(name, width)
        return None

    width = (spec.hidden_size,)
    activation = activation_name(
        str(_setting(spec, family.activation)), spec.folder / "config.json"
    )
    if spec.tanh_gelu and activation == EXACT:
        activation = TANH
    dense = LinearLayer(
        weights.array(f"{family.dense}.weight", width * 2),
        optional(f"{family.dense}.bias"),
        activation,
    )
    epsilon = float(str(_setting(spec, family.epsilon)))
    norm = NormLayer(
        weights.array(f"{family.norm}.weight", width), optional(f"{family.norm}.bias"), epsilon
    )
    return MlmLayers((dense, norm), *_decoder(spec, weights, family, words))


def _setting(spec: ModelSpec, setting: Setting) -> Any:
    key, default = setting
    value = spec.config.get(key)
    return default if value is None else value


def _decoder(
    spec: ModelSpec, weights: Weights, family: MaskedHead, words: Floats
) -> tuple[Floats, Floats | None]:
    """(matrix, bias). If a checkpoint has a tensor twice, the decoder's own one counts, as in
    transformers."""
    tied = spec.config.get("tie_word_embeddings") is not False
    shape = (spec.vocab_size, spec.hidden_size)
    matrix, bias = words, f"{family.decoder}.bias"
    if not tied or weights.has(f"{family.decoder}.weight"):
        matrix = weights.array(f"{family.decoder}.weight", shape)
    check_shape(matrix.shape, shape, weights.folder, "word embeddings")
    if not _setting(spec, family.decoder_bias):
        return matrix, None
    if tied and not weights.has(bias):
        bias = family.bias
    return matrix, weights.array(bias, shape[:1])
