"""A checkpoint while it is read: a folder, one chain of its modules, and what the user says instead
of its files. Each fact is computed at first use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hybridtei.batch import Positions
from hybridtei.errors import LoadError, UnsupportedArchitecture
from hybridtei.models.checkpoint.files import JsonObject
from hybridtei.models.checkpoint.folder import Folder
from hybridtei.models.checkpoint.hub_layouts import is_native, translate
from hybridtei.models.checkpoint.peft import largest_rank, modules_of, own_folders, weights_of
from hybridtei.models.checkpoint.sizes import (
    KEYS,
    MAX_RANKS,
    Adapters,
    config_arguments,
    positions_of,
    read_adapters,
    read_hidden_size,
    read_padding_id,
    tokenizer_arguments,
    with_whole_sizes,
)
from hybridtei.models.checkpoint.tokenizer.vocabularies import around, class_name, named_tokens
from hybridtei.models.checkpoint.weights import Weights
from hybridtei.models.families import family_of
from hybridtei.models.families.family import Family

TRANSFORMERS = ("MLMTransformer", "Transformer")
# A table of token vectors
STATIC = "StaticEmbedding"
# (type, path)
Modules = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Flags:
    """What the user says instead of the files. `heads_file`: heads from another place. `trusted`:
    activations of Dense modules may be classes that are not torch's."""

    pooling: str | None = None
    dense_path: str | None = None
    heads_file: Path | None = None
    trusted: bool = False


NO_FLAGS = Flags()


@dataclass(frozen=True)
class Checkpoint:
    """A model's folder, read by one chain of its modules. `queries`: the table that replaces the
    model for queries; `default`: the route of texts whose type the request does not name."""

    root: Folder
    modules: Modules = ()
    flags: Flags = NO_FLAGS
    queries: Path | None = None
    default: str | None = None

    def module(self, *types: str) -> Folder | None:
        """Return the folder of the first module of one of these types, or None."""
        path = next((path for name, path in self.modules if name in types), None)
        return None if path is None else self.root.within(path)

    @cached_property
    def home(self) -> Folder:
        """The transformer's folder: `0_Transformer` in old checkpoints."""
        return self.module(*TRANSFORMERS, STATIC) or self.root

    @cached_property
    def settings(self) -> JsonObject:
        """sentence-transformers' settings of the transformer, which count only with modules."""
        return self.home.transformer if self.modules else JsonObject({}, self.home.path)

    @property
    def renders_messages(self) -> bool:
        """True if sentence-transformers renders texts by the chat template."""
        return self.settings.object("modality_config").get("message") is not None

    @cached_property
    def published(self) -> JsonObject:
        """config.json, with the keys that the transformer's settings replace."""
        config = self.home.object()
        arguments = config_arguments(self.settings)
        return with_whole_sizes(JsonObject({**config, **arguments}, config.file))

    @cached_property
    def config(self) -> JsonObject:
        """config.json with the keys that the family reads."""
        config = translate(self.published, self.published.file)
        return JsonObject({key: config[key] for key in config if key not in KEYS}, config.file)

    @cached_property
    def is_native(self) -> bool:
        """True if transformers' own class computes the model."""
        return is_native(self.published, translate(self.published, self.published.file))

    @cached_property
    def adapters(self) -> Adapters | None:
        """The adapters that config.json names, or those in folders of their own."""
        return read_adapters(self.published) or _side_by_side(self.home.path)

    @cached_property
    def words(self) -> JsonObject:
        """tokenizer_config.json, with the keys that the transformer's settings replace."""
        return tokenizer_arguments(self.settings, self.home.tokenizer_config)

    @cached_property
    def architectures(self) -> tuple[str, ...]:
        """The names of transformers' classes."""
        names = self.config.get("architectures") or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise self.config.wrong("architectures", "a list of names")
        return tuple(names)

    def is_a(self, ending: str) -> bool:
        """True if the name of a class ends so."""
        return any(name.endswith(ending) for name in self.architectures)

    @cached_property
    def model_type(self) -> str:
        """The model's family."""
        config = self.config
        model_type = config.get("model_type")
        if not isinstance(model_type, str) or not model_type:
            raise LoadError(
                f"{config.file}: lacks `model_type`, which should name the model's family, such as "
                "'bert'"
            )
        form = config.get("position_embedding_type")
        if family_of(model_type).is_absolute and form not in (None, "absolute"):
            raise UnsupportedArchitecture(
                f"{config.file}: `position_embedding_type` {form!r} of {model_type}; supported: "
                "'absolute'"
            )
        return model_type

    @property
    def family(self) -> Family:
        """What is known of the model's family."""
        return family_of(self.model_type)

    @cached_property
    def hidden_size(self) -> int:
        """The width of hidden states."""
        return read_hidden_size(self.config)

    @cached_property
    def padding_id(self) -> int:
        """The id of padding."""
        return read_padding_id(self.family, self.config)

    @cached_property
    def positions(self) -> Positions:
        """Where positions begin."""
        return positions_of(self.family, self.padding_id)


def removed_ids(home: Folder, settings: Mapping[str, Any]) -> frozenset[int]:
    """Return the ids without lexical weights: those of cls, sep, bos, eos, pad and unk that the
    tokenizer has, by `settings`, by its class or around texts."""
    tokens = named_tokens(class_name(home.object(optional=True), settings), settings)
    names = {token.content for key, token in tokens.items() if key != "mask_token"}
    try:
        added = {token["content"]: int(token["id"]) for token in home.added.added_tokens or []}
        surrounding = around(home.added.post_processor)
        ids = {**added, **surrounding}
        if not names <= ids.keys():
            ids = home.vocabulary | ids
        return frozenset(ids[name] for name in names & ids.keys()) | {*surrounding.values()}
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise LoadError(
            f"{home.path / 'tokenizer.json'}: `added_tokens` should list objects with `id` and "
            "`content`"
        ) from error


def _side_by_side(home: Path) -> Adapters | None:
    """Return the adapters in folders of their own, by the folders' names."""
    folders = own_folders(home)
    if not folders:
        return None
    rank, names = largest_rank(folders), [folder.name for folder in folders]
    if rank * len(names) > MAX_RANKS:
        raise LoadError(
            f"{home}: {len(names)} adapters of rank {rank} are more than {MAX_RANKS} ranks"
        )
    factors = [Weights.of_file(weights_of(folder)).names() for folder in folders]
    targets = frozenset[str]().union(*map(modules_of, factors))
    return Adapters(tuple(names), rank, 1.0, dict.fromkeys(names, ""), targets)
