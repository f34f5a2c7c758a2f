"""Settings of tokenizer_config.json that override tokenizer.json.

transformers applies them depending on the tokenizer's class; `PreTrainedTokenizerFast` and
`TokenizersBackend` use tokenizer.json unchanged. `add_bos_token` and `add_eos_token` follow
transformers 4.57, which rebuilds the template of Llama's and Gemma's classes. Version 5 ignores the
two keys, so models like e5-mistral lose the token that they pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.normalizers import BertNormalizer, Lowercase
from tokenizers.normalizers import Sequence as Normalizers
from tokenizers.pre_tokenizers import ByteLevel, Metaspace
from tokenizers.pre_tokenizers import Sequence as PreTokenizers
from tokenizers.processors import Sequence as Processors
from tokenizers.processors import TemplateProcessing

from hybridtei.errors import LoadError
from hybridtei.models.checkpoint.files import JsonObject
from hybridtei.models.checkpoint.tokenizer.vocabularies import (
    BERT_NAMES,
    CLASSES,
    class_key,
    declared_tokens,
    named_tokens,
    special_tokens,
    token_text,
)
from hybridtei.models.families import family_of
from hybridtei.models.families.settings import warn_once

Side = Literal["left", "right"]

# Defaults of keys that tokenizer_config.json lacks, by class, without the ending "Fast".
BERT_CLASSES = frozenset(
    f"{name}Tokenizer" for name in ("Bert", "Funnel", "LayoutLMv2", "MPNet", *BERT_NAMES)
)
BYTE_LEVEL_CLASSES = frozenset(
    f"{name}Tokenizer" for name in ("Bart", "GPT2", "LED", "Longformer", "Roberta")
)
# Classes that make their template from the two keys -> (begin token, end token, default of
# `add_bos_token`).
TEMPLATE_CLASSES = {
    "CodeLlamaTokenizer": ("<s>", "</s>", True),
    "CohereTokenizer": ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", True),
    "GPTNeoXTokenizer": ("<|endoftext|>", "<|endoftext|>", False),
    "GemmaTokenizer": ("<bos>", "<eos>", True),
    "LlamaTokenizer": ("<s>", "</s>", True),
}
# Of them the one that ignores tokenizer.json's template without the keys too.
MAKES_ITS_TEMPLATE = "GPTNeoXTokenizer"
# These use tokenizer.json alone.
AS_WRITTEN = frozenset({"PreTrainedTokenizer", "TokenizersBackend"})
KNOWN = AS_WRITTEN | {f"{name}Tokenizer" for name in CLASSES} | {*TEMPLATE_CLASSES}
# The class of repositories whose tokenizer appends an end token, as TEI does
GTE_QWEN2 = "modeling_qwen.Qwen2Model"
GTE_QWEN2_END = "<|endoftext|>"


@dataclass(frozen=True, slots=True)
class TokenizerSettings:
    """Settings that override tokenizer.json. None: keep that file's.

    `bert`: (lowercase, strip accents, split Chinese characters) of a BERT normaliser. `template`:
    the tokens before and after each text. `end`: the token to append to texts if the tokenizer
    appends none. `truncation_side`: the side that is cut.
    `lowercase`: lowercase texts first, except special tokens. `byte_level`: the class makes no
    Metaspace. `specials`: tokens that are never split. `added`: tokens that the files add with ids.
    A token that the vocabulary lacks is added if the model has `rows` for it.
    """

    bert: tuple[bool, bool | None, bool] | None = None
    add_prefix_space: bool | None = None
    split_special_tokens: bool = False
    template: tuple[str | None, str | None] | None = None
    end: str | None = None
    truncation_side: Side | None = None
    lowercase: bool = False
    byte_level: bool = False
    specials: tuple[AddedToken, ...] = ()
    added: tuple[AddedToken, ...] = ()
    rows: int = 0


UNCHANGED = TokenizerSettings()


def read_tokenizer_settings(
    written: JsonObject, model_type: str, config: Mapping[str, Any], *, lowercase: bool = False
) -> TokenizerSettings:
    """Return the settings. `written`: tokenizer_config.json; `config`: the published config.json;
    `lowercase`: sentence-transformers' `do_lower_case`. Raises LoadError, naming the key."""
    kind = written.get("tokenizer_class") or config.get("tokenizer_class")
    name = str(kind or f"{family_of(model_type).tokenizer}Tokenizer").removesuffix("Fast")
    if "AutoTokenizer" in written.object("auto_map") and name not in KNOWN:
        warn_once(
            f"{written.file}: the code of the tokenizer {name!r} is not run: tokenizer.json is "
            "read as it is"
        )
    side = written.get("truncation_side")
    if side not in (None, "left", "right"):
        raise written.wrong("truncation_side", "'left' or 'right'")
    space, bert = None, None
    if name not in AS_WRITTEN:
        space = written.flag("add_prefix_space", False if name in BYTE_LEVEL_CLASSES else None)
    if name in BERT_CLASSES:
        small = written.flag("do_lower_case", True)
        chinese = written.flag("tokenize_chinese_chars", True)
        bert = bool(small), written.flag("strip_accents"), bool(chinese)
    end, classes = None, config.get("auto_map")
    name_of_code = str(classes.get("AutoModel")) if isinstance(classes, dict) else ""
    if model_type == "qwen2" and name_of_code.rpartition("--")[2] == GTE_QWEN2:
        end = token_text(written.get("eos_token")) or GTE_QWEN2_END
    split = bool(written.flag("split_special_tokens", False))
    template = _template(written, name)
    byte_level = name in BYTE_LEVEL_CLASSES
    key = class_key(name.removesuffix("Tokenizer"))
    specials = (*named_tokens(key, written).values(), *special_tokens(written))
    return TokenizerSettings(
        bert,
        space,
        split,
        template,
        end,
        side,
        lowercase,
        byte_level,
        specials,
        tuple(declared_tokens(written).values()),
        config.get("vocab_size") or 0,
    )


def apply_settings(raw: RawTokenizer, settings: TokenizerSettings, file: Path) -> list[str]:
    """Apply the settings to `raw`; return the names of the keys that changed it. Raises LoadError,
    naming `file`."""
    changed = []
    if settings.bert is not None:
        for part in _parts(raw.normalizer, Normalizers):
            if isinstance(part, BertNormalizer):
                changed += _set_bert(part, settings.bert)
    if settings.lowercase:
        parts = [*filter(None, _parts(raw.normalizer, Normalizers))]
        raw.normalizer = Normalizers([Lowercase(), *parts])
    if settings.add_prefix_space is not None:
        changed += _set_prefix_space(raw.pre_tokenizer, settings)
    changed += _add_tokens(raw, settings)
    if settings.split_special_tokens:
        raw.encode_special_tokens = True
        changed.append("split_special_tokens")
    if settings.template is not None:
        before = raw.encode("").ids
        raw.post_processor = _processor(raw, *settings.template, file)
        changed += ["add_bos_token", "add_eos_token"] if raw.encode("").ids != before else []
    if (
        settings.end is not None
        and (end := raw.token_to_id(settings.end)) is not None
        and raw.encode("").ids[-1:] != [end]
    ):
        template = _processor(raw, None, settings.end, file)
        raw.post_processor = (
            template if raw.post_processor is None else Processors([raw.post_processor, template])
        )
        changed.append(f"{settings.end} appended, as {GTE_QWEN2} needs")
    return changed


def with_added(ids: dict[str, int], settings: Mapping[str, Any], rows: int) -> dict[str, int]:
    """Return the ids of tokens with those that the files add, unless the model has too few `rows`
    for them."""
    tokens = (*declared_tokens(settings).values(), *special_tokens(settings))
    contents = dict.fromkeys(token.content for token in tokens if token.content not in ids)
    first = max(ids.values(), default=-1) + 1
    return ids | {text: i for i, text in enumerate(contents, first) if i < rows}


def _add_tokens(raw: RawTokenizer, settings: TokenizerSettings) -> list[str]:
    """Add the tokens that tokenizer.json lacks, as long as the model has rows for them."""
    before, changed = raw.get_added_tokens_decoder(), list[str]()
    marked = {token.content for token in (*before.values(), *settings.added)}
    unmarked = [token for token in settings.specials if token.content not in marked]
    for token in (*settings.added, *unmarked):
        added = raw.get_added_tokens_decoder()
        following = max(raw.get_vocab_size(with_added_tokens=False), max(added, default=-1) + 1)
        place = raw.token_to_id(token.content)
        if place is None and following < settings.rows:
            changed.append(token.content)
        elif place is None or added.get(place) == token:
            continue
        elif token in settings.added:
            changed.append(token.content)
        elif "special tokens" not in changed:
            changed.append("special tokens")
        raw.add_tokens([token])
    return changed


def truncation_side(raw: RawTokenizer, settings: TokenizerSettings) -> Side:
    """Return the side that is cut: from the settings, else from `raw`, which has tokenizer.json's
    truncation, else right."""
    return settings.truncation_side or (
        "left" if (raw.truncation or {}).get("direction") == "left" else "right"
    )


def _template(written: JsonObject, name: str) -> tuple[str | None, str | None] | None:
    """Return the tokens around a text if a key says so, or the class always makes its template. A
    flag that is null is false, and a token to add that is null leaves tokenizer.json's template."""
    keys = written.keys() & {"add_bos_token", "add_eos_token"}
    if name not in TEMPLATE_CLASSES or not (keys or name == MAKES_ITS_TEMPLATE):
        return None
    bos, eos, has_bos = TEMPLATE_CLASSES[name]
    first, last = None, None
    if written.flag("add_bos_token", has_bos and "add_bos_token" not in keys):
        first = token_text(written.get("bos_token", bos))
        if first is None:
            return None
    if written.flag("add_eos_token", False):
        last = token_text(written.get("eos_token", eos))
        if last is None:
            return None
    return first, last


def _set_bert(normalizer: BertNormalizer, values: tuple[bool, bool | None, bool]) -> list[str]:
    keys = {
        "do_lower_case": "lowercase",
        "strip_accents": "strip_accents",
        "tokenize_chinese_chars": "handle_chinese_chars",
    }
    changed = []
    for (key, attribute), value in zip(keys.items(), values, strict=True):
        if getattr(normalizer, attribute) != value:
            setattr(normalizer, attribute, value)
            changed.append(key)
    return changed


def _set_prefix_space(whole: object, settings: TokenizerSettings) -> list[str]:
    """Change a ByteLevel that is the whole pre-tokenizer, as transformers 4 does. A Metaspace is
    of other classes."""
    prefix_space, changed = bool(settings.add_prefix_space), list[str]()
    if isinstance(whole, ByteLevel) and whole.add_prefix_space != prefix_space:
        whole.add_prefix_space = prefix_space
        changed = ["add_prefix_space"]
    for part in _parts(whole, PreTokenizers):
        if settings.byte_level:
            break
        if isinstance(part, Metaspace) and (part.prepend_scheme != "never") != prefix_space:
            part.prepend_scheme = "always" if prefix_space else "never"
            changed = ["add_prefix_space"]
    return changed


def _processor(
    raw: RawTokenizer, first: str | None, last: str | None, file: Path
) -> TemplateProcessing:
    """Return the template that transformers 4.57's `update_post_processor` makes."""
    tokens = [token for token in (first, last) if token is not None]
    wrong = [
        token
        for token in tokens
        if raw.token_to_id(token) is None or token[:1] == "$" or {" ", ":"} & {*token}
    ]
    if wrong:
        raise LoadError(
            f"{file}: `add_bos_token` or `add_eos_token` cannot add the token {wrong[0]!r}: it "
            "should be in the vocabulary, not begin with $, and hold no space and no colon"
        )

    def side(name: str, type_id: int) -> str:
        parts = (first, name, last)
        return " ".join(f"{part}:{type_id}" for part in parts if part is not None)

    ids = [(token, raw.token_to_id(token)) for token in tokens]
    return TemplateProcessing(
        single=side("$A", 0), pair=f"{side('$A', 0)} {side('$B', 1)}", special_tokens=ids
    )


def _parts(component: Any, kind: Any) -> list[Any]:
    """Return the parts of a sequence of normalisers or pre-tokenisers, or a list of the single
    one."""
    return [*component] if isinstance(component, kind) else [component]
