"""Late-interaction checkpoints: the marking, expansion and truncation of queries and documents, and
the tokens left unscored.

Three layouts have the same settings: Stanford's ColBERT (`artifact.metadata`), PyLate's (keys in
config_sentence_transformers.json) and sentence-transformers 6's (keys of its Transformer module,
MultiVectorMask).

PyLate's markers are token ids inserted after the first token, not text, even if they look like text
("[Q] ").
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from hybridtei.errors import LoadError, UnsupportedArchitecture
from hybridtei.models.checkpoint.checkpoint import Checkpoint
from hybridtei.models.checkpoint.files import JsonObject
from hybridtei.models.checkpoint.folder import Folder
from hybridtei.models.checkpoint.tokenizer.vocabularies import token_text

PYLATE_KEYS = (
    "query_prefix",
    "document_prefix",
    "do_query_expansion",
    "attend_to_expansion_tokens",
    "skiplist_words",
)
STANFORD = "HF_ColBERT"
# Defaults of legacy checkpoints
QUERY_LENGTH, DOCUMENT_LENGTH = 32, 180


@dataclass(frozen=True, slots=True)
class Expansion:
    """Expand a query to `length` tokens with `token_id`. `fixed`: also truncate it. `attend`: the
    query attends to them."""

    length: int
    token_id: int
    fixed: bool = True
    attend: bool = False


@dataclass(frozen=True, slots=True)
class TokenPooling:
    """Merge every `factor` token vectors of a text into one, except the first `protected`
    vectors."""

    factor: float
    protected: int = 1
    normalize: bool = True


@dataclass(frozen=True, slots=True)
class Side:
    """How queries or documents are read: the marker after the first token, the length, the unscored
    ids, the merging. `is_unit`: token vectors have length 1."""

    marker: int | None = None
    text: str = ""
    length: int | None = None
    expansion: Expansion | None = None
    skipped: frozenset[int] = frozenset()
    pooling: TokenPooling | None = None
    is_unit: bool = True


USUAL = Side()


def is_late(folder: Folder) -> bool:
    """True if a checkpoint declares late interaction."""
    sentence, names = folder.sentence, folder.object(optional=True).get("architectures")
    is_named = sentence.get("model_type") in ("ColBERT", "MultiVectorEncoder")
    is_stanford = isinstance(names, list) and STANFORD in names
    # Notes of a model that pools have no meaning
    pools = (folder.path / "1_Pooling").exists()
    return is_named or is_stanford or (not pools and any(key in sentence for key in PYLATE_KEYS))


def read_late(checkpoint: Checkpoint) -> tuple[Side, Side]:
    """Return the sides of queries and of documents. Raises LoadError, naming the file."""
    folder, sentence = checkpoint.root, checkpoint.root.sentence
    transformer = checkpoint.home.transformer
    words = _Words(checkpoint.words, checkpoint.home.vocabulary)
    if STANFORD in checkpoint.architectures:
        return _stanford(folder, words)
    if sentence.get("model_type") != "MultiVectorEncoder":
        return _pylate(sentence, words)
    masking = checkpoint.module("MultiVectorMask")
    mask: Mapping[str, Any] = {} if masking is None else masking.object()
    if mask.get("keep_only_token_ids"):
        raise UnsupportedArchitecture(f"{masking}: `keep_only_token_ids` is not supported")
    skipped = words.ids(mask.get("skiplist_words") or [])
    tasks = _tasks(mask.get("skiplist_tasks"))
    prompts, is_unit = sentence.get("prompts") or {}, checkpoint.module("Normalize") is not None
    pooling, pooled = _token_pooling(checkpoint)
    return (
        Side(
            text=prompts.get("query") or "",
            length=transformer.count_if_any("query_length"),
            expansion=_expansion(transformer, words),
            skipped=skipped if "query" in tasks else frozenset(),
            pooling=pooling if "query" in pooled else None,
            is_unit=is_unit,
        ),
        Side(
            text=prompts.get("document") or "",
            length=transformer.count_if_any("document_length"),
            skipped=skipped if "document" in tasks else frozenset(),
            pooling=pooling if "document" in pooled else None,
            is_unit=is_unit,
        ),
    )


def _token_pooling(checkpoint: Checkpoint) -> tuple[TokenPooling | None, Sequence[str]]:
    """Return the declared HierarchicalTokenPooling, and the sides that it merges. Raises
    LoadError."""
    module = checkpoint.module("HierarchicalTokenPooling")
    if module is None:
        return None, ()
    settings = module.object()
    file = settings.file
    factor, protected = settings.get("pool_factor", 1.0), settings.get("num_protected_tokens", 1)
    if not isinstance(factor, int | float) or not 1 <= factor < inf:
        raise LoadError(f"{file}: `pool_factor` is {factor!r}, should be a number of at least 1")
    if not isinstance(protected, int) or protected < 0:
        raise LoadError(
            f"{file}: `num_protected_tokens` is {protected!r}, should be a whole number of at "
            "least 0"
        )
    # sentence-transformers' default
    normalize = bool(settings.get("normalize_embeddings", False))
    return TokenPooling(float(factor), protected, normalize), _tasks(settings.get("tasks"))


def _tasks(names: Any) -> Sequence[str]:
    """The sides of a setting: several, one, or by default documents."""
    return [names] if isinstance(names, str) else names or ["document"]


def _pylate(sentence: JsonObject, words: _Words) -> tuple[Side, Side]:
    length = sentence.count("query_length", QUERY_LENGTH)
    attend = bool(
        sentence.get("attend_to_expansion_tokens") or sentence.get("attend_to_mask_tokens")
    )
    expansion = None
    if sentence.get("do_query_expansion") is not False:
        expansion = Expansion(length, words.filler(None, sentence.file), attend=attend)
    skiplist = sentence.get("skiplist_words")
    if skiplist is None:
        skiplist = string.punctuation
    prompts = sentence.object("prompts")
    return (
        words.marked(
            sentence.get("query_prefix", "[Q] "),
            prompts.get("query"),
            length=length,
            expansion=expansion,
        ),
        words.marked(
            sentence.get("document_prefix", "[D] "),
            prompts.get("document"),
            length=sentence.count("document_length", DOCUMENT_LENGTH),
            skipped=words.ids(skiplist),
        ),
    )


def _stanford(folder: Folder, words: _Words) -> tuple[Side, Side]:
    settings = folder.object("artifact.metadata", optional=True)
    length = settings.count("query_maxlen", QUERY_LENGTH)
    expansion = Expansion(
        length,
        words.filler(None, settings.file),
        attend=bool(settings.get("attend_to_mask_tokens")),
    )
    skipped = words.ids(string.punctuation)
    if not settings.get("mask_punctuation", True):
        skipped = frozenset()
    cut = settings.count("doc_maxlen", DOCUMENT_LENGTH)
    markers = [
        settings.get("query_token_id") or "[unused0]",
        settings.get("doc_token_id") or "[unused1]",
    ]
    for marker in markers:
        if marker not in words.vocabulary:
            raise LoadError(
                f"{settings.file}: the marker `{marker}` should be a token of the vocabulary"
            )
    return (
        words.marked(markers[0], length=length, expansion=expansion),
        words.marked(markers[1], length=cut, skipped=skipped),
    )


def _expansion(transformer: JsonObject, words: _Words) -> Expansion | None:
    if transformer.get("query_expansion") is None:
        return None
    settings = transformer.object("query_expansion")
    if settings.get("strategy") not in ("fixed", "min"):
        raise UnsupportedArchitecture(
            f"{settings.file}: `query_expansion` {dict(settings)!r}; supported: strategy 'fixed' "
            "or 'min'"
        )
    return Expansion(
        settings.count("length"),
        words.filler(settings.get("token"), settings.file),
        fixed=settings["strategy"] == "fixed",
        attend=bool(settings.get("attend")),
    )


@dataclass(frozen=True, slots=True)
class _Words:
    tokenizer: Mapping[str, Any]
    vocabulary: Mapping[str, int]

    def ids(self, words: Any) -> frozenset[int]:
        """Return the ids of the words that are a single token."""
        return frozenset(self.vocabulary[word] for word in words if word in self.vocabulary)

    def filler(self, token: str | None, file: Path) -> int:
        """Return the id that expands queries: `token`'s, else the mask's, else the end of
        sequence's."""
        names = [token_text(self.tokenizer.get(key)) for key in ("mask_token", "eos_token")]
        if token is not None:
            names = [token]
        for name in names:
            if name is not None and name in self.vocabulary:
                return self.vocabulary[name]
        raise LoadError(
            f"{file}: queries should be expanded with one of {names}, which the vocabulary lacks"
        )

    def marked(self, prefix: str | None, prompt: str | None = None, **settings: Any) -> Side:
        """Return a side. Its prefix is a marker if it is a single token (a space may follow), and
        text otherwise. The prompt goes before the text."""
        prefix = prefix or ""
        prompt = (prompt or "").removeprefix(prefix)
        for name in (prefix, *prefix.split(None, 1)[:1]):
            if name in self.vocabulary:
                return Side(
                    marker=self.vocabulary[name],
                    text=prefix.removeprefix(name).lstrip() + prompt,
                    **settings,
                )
        return Side(text=prefix + prompt, **settings)
