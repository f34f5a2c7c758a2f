"""Finds a checkpoint's tensors for a graph without weights, under the graph's names, independent of the runtime.

All names of a checkpoint may have one prefix more, or one less, than the graph's. Any other difference means another model, and
is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hybridtei.errors import LoadError, UnsupportedArchitecture, WeightMismatch
from hybridtei.inference.backends.graph.writer import Graph
from hybridtei.models.checkpoint.spec import ModelSpec
from hybridtei.models.checkpoint.weights import Weights, check_shape, left_over
from hybridtei.outputs import Floats

Shapes = Mapping[str, tuple[int, ...]]


def graph_tensors(graph: Graph, weights: Weights) -> Mapping[str, Floats]:
    """The graph's tensors under the graph's names, widened at each access. Raises WeightMismatch."""
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
    """The checkpoint's spelling of each name in the graph, with shapes checked. Raises WeightMismatch."""
    keys = {name: checked_key(weights, name, shape) for name, shape in graph.weights.items()}
    check_names({**keys, **{name: find_tensor(weights, name) for name in graph.held}}, weights)
    return keys


def find_tensor(weights: Weights, name: str) -> str | None:
    """The checkpoint's spelling of a tensor's name. Old BERTs have gamma and beta."""
    return weights.find(name) or weights.find(old_name(name))


def old_name(name: str) -> str:
    """A norm's parameter name in checkpoints converted from TensorFlow."""
    return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")


def word_table(spec: ModelSpec, shapes: Shapes) -> str | None:
    """The name of the word embeddings if the sparse head reads them, else None. Raises LoadError."""
    read = spec.is_splade or (spec.sparse is not None and "embedding" in spec.sparse.inputs)
    return _one_word_table(spec, shapes) if read else None


def _one_word_table(spec: ModelSpec, shapes: Shapes) -> str:
    """The name of the only tensor with a row for each word. Raises LoadError if none or several have that shape."""
    tables = [name for name, shape in shapes.items() if shape == (spec.vocab_size, spec.hidden_size)]
    if not tables:
        wanted = f"{spec.vocab_size} rows of {spec.hidden_size} numbers, as sparse weights need"
        raise UnsupportedArchitecture(
            f"{spec.folder / 'config.json'}: {spec.model_type} has no table of word embeddings with {wanted}"
        )
    if len(tables) != 1:
        raise LoadError(f"{spec.folder}: {len(tables)} tensors could be the word embeddings: {tables}")
    return tables[0]


def check_names(key_of: Mapping[str, str | None], weights: Weights) -> None:
    """Raises WeightMismatch for another model: the graph's names have several prefixes, or weights of a trunk are left over."""
    shifts = {_shift(name, key) for name, key in key_of.items() if key is not None}
    if len(shifts) > 1:
        raise WeightMismatch(f"{weights.folder}: the weights of the trunk lie under several prefixes: {sorted(shifts)}")
    left = left_over(weights.names() - {key for key in key_of.values() if key is not None})
    if left:
        raise WeightMismatch(f"{weights.folder}: the weights hold what config.json does not: {left[:5]}, {len(left)} in all")


def _shift(name: str, key: str) -> str:
    """The prefix that the checkpoint adds to a name or removes from it."""
    name = name if key.endswith(name) or name.endswith(key) else old_name(name)
    return key.removesuffix(name) if key.endswith(name) else "-" + name.removesuffix(key)


def checked_key(weights: Weights, name: str, shape: tuple[int, ...]) -> str:
    """The checkpoint's spelling of a tensor's name. Raises WeightMismatch if it is missing or has another shape."""
    key = find_tensor(weights, name)
    if key is None:
        raise WeightMismatch(f"{weights.folder}: the weights lack `{name}`, which the model needs")
    check_shape(weights.shape(key), shape, weights.folder, key)
    return key
