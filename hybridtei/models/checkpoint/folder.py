"""A model's folder as an object: each of its files is read once, at first use."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from hybridtei.models.checkpoint.files import JsonObject, inside, read_object
from hybridtei.models.checkpoint.tokenizer.settings import with_added
from hybridtei.models.checkpoint.tokenizer.vocabularies import (
    Added,
    read_added,
    read_vocabulary,
    tokenizer_config,
)
from hybridtei.models.checkpoint.weights import Weights, has_weights

# sentence-transformers' settings of a transformer; the first existing file counts
TRANSFORMER_FILES = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
)
SENTENCE_FILE = "config_sentence_transformers.json"


class Folder:
    """A folder of a checkpoint: the model's, its transformer's or a module's. Its files raise
    MissingArtifact or LoadError, naming the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._objects: dict[str, JsonObject] = {}
        self._inner: dict[str, Folder] = {}

    def __str__(self) -> str:
        return str(self.path)

    def object(self, name: str = "config.json", *, optional: bool = False) -> JsonObject:
        """Return the object in a JSON file; {} of a missing optional one."""
        if name not in self._objects:
            read = read_object(self.path / name, optional=optional)
            if optional and not read:
                return read
            self._objects[name] = read
        return self._objects[name]

    def within(self, relative: str) -> Folder:
        """Return a folder in this one, by the path that a file gave. Raises LoadError if it leaves
        this folder."""
        path = inside(self.path, relative)
        return self if path == self.path else self._inner.setdefault(relative, Folder(path))

    @cached_property
    def sentence(self) -> JsonObject:
        """sentence-transformers' settings of the model."""
        return self.object(SENTENCE_FILE, optional=True)

    @cached_property
    def transformer(self) -> JsonObject:
        """sentence-transformers' settings of the transformer in this folder."""
        names = [name for name in TRANSFORMER_FILES if (self.path / name).exists()]
        return self.object((names or TRANSFORMER_FILES)[0], optional=True)

    @cached_property
    def tokenizer_config(self) -> JsonObject:
        """tokenizer_config.json, with special_tokens_map.json."""
        return tokenizer_config(self.path)

    @cached_property
    def added(self) -> Added:
        """The tokens of the tokenizer that are added to the vocabulary or put around texts."""
        return read_added(self.path)

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """The id of every token."""
        rows = self.object(optional=True).count_if_any("vocab_size") or 0
        return with_added(read_vocabulary(self.path), self.tokenizer_config, rows)

    @cached_property
    def weights(self) -> Weights | None:
        """The weights, or None if there are none that can be read here."""
        return Weights.open(self.path) if has_weights(self.path) else None
