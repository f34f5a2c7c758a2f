"""Late-interaction checkpoints: how they mark, widen and cut queries and documents, and which tokens they do not score.

Three layouts say the same things in other words: Stanford's ColBERT (`artifact.metadata`), PyLate's (keys in
config_sentence_transformers.json) and that of sentence-transformers 6 (keys of its Transformer module, MultiVectorMask).

PyLate's markers are token ids put behind the first token, not text, even where they look like text ("[Q] ").
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridtei.checkpoint.files import inside, positive, read_object
from hybridtei.checkpoint.modules import Modules
from hybridtei.errors import LoadError, UnsupportedArchitecture

PYLATE_KEYS = ("query_prefix", "document_prefix", "do_query_expansion", "attend_to_expansion_tokens", "skiplist_words")
STANFORD = "HF_ColBERT"
QUERY_LENGTH, DOCUMENT_LENGTH = 32, 180  # where a legacy checkpoint is silent


@dataclass(frozen=True, slots=True)
class Expansion:
    """A query is widened to `length` tokens with `token_id`; `fixed`: and cut to it. `attend`: the others see these, too."""

    length: int
    token_id: int
    fixed: bool = True
    attend: bool = False


@dataclass(frozen=True, slots=True)
class Side:
    """How one kind of text is read: a marker behind the first token, at most `length` tokens, ids that are not scored."""

    marker: int | None = None
    text: str = ""
    length: int | None = None
    expansion: Expansion | None = None
    skipped: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class LateInteraction:
    """Of a model whose only vectors are its tokens'."""

    query: Side
    document: Side


def is_late(sentence: Mapping[str, Any], architectures: tuple[str, ...]) -> bool:
    """Whether a checkpoint says that it is one. `sentence`: config_sentence_transformers.json."""
    named = sentence.get("model_type") in ("ColBERT", "MultiVectorEncoder")
    return named or STANFORD in architectures or any(key in sentence for key in PYLATE_KEYS)


def read_late(
    folder: Path,
    modules: Modules,
    *,
    sentence: Mapping[str, Any],
    transformer: Mapping[str, Any],
    tokenizer: Mapping[str, Any],
    vocabulary: Mapping[str, int],
    stanford: bool,
) -> LateInteraction:
    """`transformer` and `tokenizer`: sentence_bert_config.json and tokenizer_config.json. Raises LoadError, naming the file."""
    words = _Words(folder, tokenizer, vocabulary)
    if stanford:
        return _stanford(folder, words)
    if sentence.get("model_type") != "MultiVectorEncoder":
        return _pylate(folder / "config_sentence_transformers.json", sentence, words)
    mask = next((path for name, path in modules if name == "MultiVectorMask"), None)
    masked = {} if mask is None else read_object(inside(folder, mask) / "config.json")
    if masked.get("keep_only_token_ids"):
        raise UnsupportedArchitecture(f"{folder / str(mask)}: `keep_only_token_ids` is not served")
    skipped = words.ids(masked.get("skiplist_words") or [])
    tasks = masked.get("skiplist_tasks") or ["document"]
    tasks = [tasks] if isinstance(tasks, str) else tasks
    file = folder / "sentence_bert_config.json"
    prompts = sentence.get("prompts") or {}
    return LateInteraction(
        Side(
            text=prompts.get("query") or "",
            length=_length(transformer, "query_length", file),
            expansion=_expansion(transformer.get("query_expansion"), file, words),
            skipped=skipped if "query" in tasks else frozenset(),
        ),
        Side(
            text=prompts.get("document") or "",
            length=_length(transformer, "document_length", file),
            skipped=skipped if "document" in tasks else frozenset(),
        ),
    )


def _pylate(file: Path, sentence: Mapping[str, Any], words: _Words) -> LateInteraction:
    length = _length(sentence, "query_length", file) or QUERY_LENGTH
    attend = bool(sentence.get("attend_to_expansion_tokens") or sentence.get("attend_to_mask_tokens"))
    widened = sentence.get("do_query_expansion") is not False
    listed = sentence.get("skiplist_words")
    return LateInteraction(
        words.marked(
            sentence.get("query_prefix", "[Q] "),
            length=length,
            expansion=Expansion(length, words.filler(None, file), attend=attend) if widened else None,
        ),
        words.marked(
            sentence.get("document_prefix", "[D] "),
            length=_length(sentence, "document_length", file) or DOCUMENT_LENGTH,
            skipped=words.ids(string.punctuation if listed is None else listed),
        ),
    )


def _stanford(folder: Path, words: _Words) -> LateInteraction:
    file = folder / "artifact.metadata"
    told = read_object(file, optional=True)
    length = _length(told, "query_maxlen", file) or QUERY_LENGTH
    expansion = Expansion(length, words.filler(None, file), attend=bool(told.get("attend_to_mask_tokens")))
    skipped = words.ids(string.punctuation) if told.get("mask_punctuation", True) else frozenset[int]()
    cut = _length(told, "doc_maxlen", file) or DOCUMENT_LENGTH
    return LateInteraction(
        words.marked(told.get("query_token_id") or "[unused0]", length=length, expansion=expansion),
        words.marked(told.get("doc_token_id") or "[unused1]", length=cut, skipped=skipped),
    )


def _length(settings: Mapping[str, Any], key: str, file: Path) -> int | None:
    return None if settings.get(key) is None else positive(settings, key, file)


def _expansion(settings: Any, file: Path, words: _Words) -> Expansion | None:
    if settings is None:
        return None
    if not isinstance(settings, dict) or settings.get("strategy") not in ("fixed", "min"):
        raise UnsupportedArchitecture(f"{file}: `query_expansion` {settings!r}; served: strategy 'fixed' or 'min'")
    return Expansion(
        positive(settings, "length", file),
        words.filler(settings.get("token"), file),
        fixed=settings["strategy"] == "fixed",
        attend=bool(settings.get("attend")),
    )


@dataclass(frozen=True, slots=True)
class _Words:
    folder: Path
    tokenizer: Mapping[str, Any]
    vocabulary: Mapping[str, int]

    def ids(self, words: Any) -> frozenset[int]:
        """Of those that are one token; the others, and the unknown one, are left."""
        return frozenset(self.vocabulary[word] for word in words if word in self.vocabulary)

    def filler(self, token: str | None, file: Path) -> int:
        """What queries are widened with: the token that is named, the mask, or the end."""
        names = [token] if token is not None else [self._named("mask_token"), self._named("eos_token")]
        found = next((self.vocabulary[name] for name in names if name is not None and name in self.vocabulary), None)
        if found is None:
            raise LoadError(f"{file}: queries are to be widened with one of {names}, which the vocabulary lacks")
        return found

    def marked(self, prefix: str | None, **settings: Any) -> Side:
        """A prefix that is one token, perhaps with a space behind it, is a marker; any other is text."""
        prefix = prefix or ""
        for name in (prefix, *prefix.split(None, 1)[:1]):
            if name in self.vocabulary:
                return Side(marker=self.vocabulary[name], text=prefix.removeprefix(name).lstrip(), **settings)
        return Side(text=prefix, **settings)

    def _named(self, key: str) -> str | None:
        value = self.tokenizer.get(key)
        content = value.get("content") if isinstance(value, dict) else value
        return content if isinstance(content, str) else None
