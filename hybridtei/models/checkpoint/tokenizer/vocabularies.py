"""A checkpoint's tokenizer: from `tokenizer.json`, or built from older vocabulary files.

`CLASSES` are built as transformers converts them (`convert_slow_tokenizer.py` of 4.57, and the
classes of 5.23), with their normalisers and special tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, cast

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as RawTokenizer

from hybridtei.errors import LoadError, MissingArtifact
from hybridtei.models.checkpoint.files import (
    JsonObject,
    facts_of,
    read_json,
    read_object,
    require,
)
from hybridtei.models.checkpoint.tokenizer.sentencepiece import SENTENCEPIECE, Built, bpe, unigram
from hybridtei.models.families import family_of

TOKENIZER, SETTINGS = (
    "tokenizer.json",
    ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
)
WORDS, VOCABULARY, MERGES = "vocab.txt", "vocab.json", "merges.txt"
FILES = (WORDS, VOCABULARY, MERGES, *SENTENCEPIECE)
# Lists of special tokens without keys of their own
MORE = ("extra_special_tokens", "additional_special_tokens")
# Of a vocabulary file; 5 MB in the largest public model
MAX_BYTES = 64_000_000

Settings = Mapping[str, Any]


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the files that determine a folder's token ids: `tokenizer.json`, or the files to build
    it from, or none."""
    if (folder / TOKENIZER).is_file():
        return [folder / TOKENIZER]
    files = [folder / name for name in FILES if (folder / name).is_file()]
    return files and [*files, *(folder / name for name in SETTINGS if (folder / name).is_file())]


def tokenizer_sha256(folder: Path) -> str | None:
    """Return the hash of the tokenizer's file, or of the files that it is built from; None without
    any. Equal hashes mean equal token ids, the dimensions of sparse vectors."""
    hashes = [_sha256(path, facts_of(path)) for path in tokenizer_files(folder)]
    if len(hashes) > 1:
        return hashlib.sha256(json.dumps(hashes, separators=(",", ":")).encode()).hexdigest()
    return hashes[0] if hashes else None


@lru_cache(maxsize=64)
def _sha256(path: Path, facts: tuple[int, ...]) -> str:
    """`facts`: another file of this path is read again."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_raw(folder: Path) -> RawTokenizer:
    """Return a folder's tokenizer. Raises LoadError, or the library's exception if `tokenizer.json`
    is not a tokenizer."""
    file = folder / TOKENIZER
    if not file.is_file():
        return build(folder)
    return RawTokenizer.from_str(file.read_text(encoding="utf-8-sig"))


def read_tokenizer(folder: Path) -> dict[str, Any]:
    """Return a folder's `tokenizer.json`, existing or built. Raises MissingArtifact or LoadError,
    naming the file."""
    file = folder / TOKENIZER
    if file.is_file():
        return read_object(require(file))
    return dict(json.loads(build(folder).to_str()))


@dataclass
class Added:
    """What tokenizer.json adds to its vocabulary, and puts around texts."""

    added_tokens: Any = None
    post_processor: Any = None


def read_added(folder: Path) -> Added:
    """Return these parts of `read_tokenizer`, in a fifth of the time for a large vocabulary."""
    file = folder / TOKENIZER
    if not file.is_file():
        built = read_tokenizer(folder)
        return Added(built.get("added_tokens"), built.get("post_processor"))

    def decode(text: str) -> Added:
        # Not above: a GPU's machine that runs conformance.load.gpu may lack it
        import msgspec

        try:
            return msgspec.json.decode(text, type=Added)
        except msgspec.DecodeError as error:
            raise ValueError(error) from error

    return cast(Added, read_json(require(file), decode))


def read_vocabulary(folder: Path) -> dict[str, int]:
    """Return the id of every token of a folder's tokenizer, added tokens included. Raises
    LoadError, naming the file."""
    settings = read_tokenizer(folder)
    try:
        vocab = settings["model"]["vocab"]
        # Unigram has a list of pieces and their scores.
        if isinstance(vocab, list):
            vocab = {entry[0]: place for place, entry in enumerate(vocab)}
        words = dict(vocab)
        added = {token["content"]: token["id"] for token in settings.get("added_tokens") or []}
    except (KeyError, TypeError, IndexError, ValueError) as error:
        file = folder / TOKENIZER
        raise LoadError(
            f"{file}: its `model` should hold a `vocab`, and `added_tokens` a `content` and `id` "
            "each"
        ) from error
    return {**words, **added}


def around(processor: Any) -> dict[str, int]:
    """Return the ids of the tokens that a post-processor puts around texts."""
    if not isinstance(processor, dict):
        return {}
    ids = dict[str, int]()
    for part in processor.get("processors") or ():
        ids.update(around(part))
    for entry in (processor.get("special_tokens") or {}).values():
        ids.update(zip(entry["tokens"], entry["ids"], strict=True))
    for key in ("cls", "sep"):
        if processor.get(key):
            ids[processor[key][0]] = processor[key][1]
    return ids


def token_text(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def build(folder: Path) -> RawTokenizer:
    """Return the tokenizer of a folder without `tokenizer.json`. Raises MissingArtifact or
    LoadError, naming the remedy."""
    files = [path for path in (*tokenizer_files(folder), folder / "config.json") if path.is_file()]
    return RawTokenizer.from_str(_built(folder, *map(facts_of, files)))


# Cached as text, since callers change their tokenizer; Gemma's merges take seconds
@lru_cache(4)
def _built(folder: Path, *_: tuple[int, ...]) -> str:
    files = [name for name in FILES if (folder / name).is_file()]
    if not files:
        raise MissingArtifact(
            f"{folder / TOKENIZER}: missing, and so is each file to build it from: "
            f"{', '.join(FILES)}"
        )
    settings = tokenizer_config(folder)
    name = class_name(read_object(folder / "config.json", optional=True), settings)
    try:
        if name not in CLASSES:
            raise ValueError(f"of the class {name!r}; built are {', '.join(CLASSES)}")
        for file in files:
            if require(folder / file).stat().st_size > MAX_BYTES:
                raise ValueError(f"{file} is larger than {MAX_BYTES} bytes")
        raw = _assembled(folder, name, settings)
    except (MissingArtifact, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        # The library raises bare Exceptions, and panics, for other files
        raise LoadError(
            f"{folder / TOKENIZER}: missing, and cannot be built from {', '.join(files)}: {error}. "
            f"A folder with {TOKENIZER} is served"
        ) from error
    return str(raw.to_str())


def tokenizer_config(folder: Path) -> JsonObject:
    """Return tokenizer_config.json. Without `added_tokens_decoder`, the object of
    special_tokens_map.json overrides it, the lists of both count, and added_tokens.json has the
    ids."""
    settings = read_object(folder / "tokenizer_config.json", optional=True)
    if "added_tokens_decoder" in settings:
        return settings
    file, values = folder / "special_tokens_map.json", dict(settings)
    tokens = read_json(file) if file.is_file() else None
    if isinstance(tokens, dict):
        values.update(tokens)
        for key in MORE:
            lists = [part for part in (settings.get(key), tokens.get(key)) if part]
            if len(lists) == 2 and all(isinstance(part, list) for part in lists):
                values[key] = [*lists[0], *lists[1]]
    ids = read_object(folder / "added_tokens.json", optional=True)
    specials = {token.content for token in special_tokens(values)}
    flags = {text: text in specials for text in ids}
    values["added_tokens_decoder"] = {
        ids[text]: {"content": text, "special": flag, "normalized": not flag}
        for text, flag in flags.items()
    }
    return JsonObject(values, settings.file)


def class_name(config: Settings, settings: Settings) -> str:
    """Return the class that the files name or the model's type implies: a key of CLASSES, or an
    unknown name. `config`: config.json; `settings`: tokenizer_config.json."""
    named = str(settings.get("tokenizer_class") or config.get("tokenizer_class") or "")
    if named in ("", "PreTrainedTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend"):
        model_type = str(config.get("model_type"))
        return family_of(model_type).tokenizer or model_type
    return class_key(named.removesuffix("Fast").removesuffix("Tokenizer"))


def class_key(name: str) -> str:
    """Return the key of CLASSES that builds a class of this name, or the name."""
    return next((key for key, kind in CLASSES.items() if name in (key, *kind.also)), name)


def named_tokens(name: str, settings: Settings) -> dict[str, AddedToken]:
    """Return the special tokens by key: those of `settings`, else the defaults of the class
    `name`."""
    named = dict(CLASSES[name].specials) if name in CLASSES else {}
    named.update((key, value) for key, value in settings.items() if key in ROBERTA)
    return {key: _token(value) for key, value in named.items() if token_text(value)}


def special_tokens(settings: Settings) -> list[AddedToken]:
    """Return the special tokens that the files name, with and without a key of their own. The
    older list counts unless the newer one is a list too."""
    extra, older = (settings.get(key) or () for key in MORE)
    more = extra or older
    if isinstance(extra, dict):
        more = [*extra.values(), *older]
    return [*named_tokens("", settings).values(), *map(_token, filter(token_text, more))]


def _assembled(folder: Path, name: str, settings: Settings) -> RawTokenizer:
    kind, declared = CLASSES[name], declared_tokens(settings)
    raw, marked = kind.read(folder, settings, {i: token.content for i, token in declared.items()})
    specials = named_tokens(name, settings)
    masks = [token for token in specials.values() if token.lstrip]
    tokens = {
        token.content: token
        for token in (
            *marked,
            *masks,
            *declared.values(),
        )
    }
    for token in (*specials.values(), *special_tokens(settings)):
        tokens.setdefault(token.content, token)
    # A token missing from the vocabulary gets the next id
    raw.add_tokens([*tokens.values()])
    for i, token in declared.items():
        if raw.token_to_id(token.content) != i:
            raise ValueError(
                f"the token {token.content!r} has the id {raw.token_to_id(token.content)}, stated "
                f"is {i}"
            )
    contents = {key.removesuffix("_token"): token.content for key, token in specials.items()}
    _put_around(raw, kind, settings, contents)
    return raw


def _put_around(
    raw: RawTokenizer, kind: TokenizerClass, settings: Settings, contents: Mapping[str, str]
) -> None:
    """Let the class's special tokens, by key in `contents`, surround texts."""
    first, second = kind.form or _flagged(settings, contents, starts=kind.starts)
    ids = {
        content: raw.token_to_id(content) or 0
        for key, content in contents.items()
        if "{" + key + "}" in first + second
    }
    if kind.trims:
        sides = [(contents[key], ids[contents[key]]) for key in ("sep", "cls")]
        raw.post_processor = processors.RobertaProcessing(
            sides[0],
            sides[1],
            trim_offsets=bool(settings.get("trim_offsets", True)),
            add_prefix_space=bool(settings.get("add_prefix_space")),
        )
    elif ids:
        parts = [[part.format(**contents) for part in form.split()] for form in (first, second)]
        raw.post_processor = processors.TemplateProcessing(
            single=parts[0], pair=[*parts[0], *parts[1]], special_tokens=[*ids.items()]
        )


def _flagged(settings: Settings, contents: Mapping[str, str], *, starts: bool) -> tuple[str, str]:
    """Return the templates from `add_bos_token` (default: `starts`) and `add_eos_token`."""
    first, second = ["$A"], ["$B:1"]
    if settings.get("add_bos_token", starts) and "bos" in contents:
        first.insert(0, "{bos}")
        second.insert(0, "{bos}:1")
    if settings.get("add_eos_token") and "eos" in contents:
        first.append("{eos}")
        second.append("{eos}:1")
    return " ".join(first), " ".join(second)


def declared_tokens(settings: Settings) -> dict[int, AddedToken]:
    """Return the tokens that the files add with their ids, in order."""
    added = settings.get("added_tokens_decoder") or {}
    return {i: _token(value) for i, value in sorted((int(i), value) for i, value in added.items())}


FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def _token(value: Any) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=True, normalized=False, lstrip=value == "<mask>")
    flags = {key: value[key] is True for key in FLAGS if key in value}
    return AddedToken(value["content"], **{"special": True, **flags})


def _words(
    folder: Path, settings: Settings, _: Mapping[int, str], *, unknown: str = "[UNK]"
) -> Built:
    unk = settings.get("unk_token") or unknown
    # A word may end in a blank
    lines = require(folder / WORDS).read_text(encoding="utf-8").removesuffix("\n").split("\n")
    words = {line: i for i, line in enumerate(lines)}
    raw = RawTokenizer(models.WordPiece(words, unk_token=_token(unk).content))
    raw.normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=bool(settings.get("tokenize_chinese_chars", True)),
        strip_accents=settings.get("strip_accents"),
        lowercase=bool(settings.get("do_lower_case", True)),
    )
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return raw, []


def _byte_level(
    folder: Path,
    settings: Settings,
    _: Mapping[int, str],
    *,
    split: str | None = None,
    composed: bool = False,
) -> Built:
    vocab = read_object(require(folder / VOCABULARY))
    lines = require(folder / MERGES).read_text(encoding="utf-8").split("\n")
    # The first line states a version; all classes but Qwen's drop it, and the last, in any case
    if split is None or lines[0].startswith("#version:"):
        lines = lines[1:-1]
    merges = [(first, last) for first, _, last in (line.strip().partition(" ") for line in lines)]
    raw = RawTokenizer(
        models.BPE(
            dict(vocab),
            [merge for merge in merges if merge[1]],
            continuing_subword_prefix="",
            end_of_word_suffix="",
            fuse_unk=False,
        )
    )
    bytes_of = pre_tokenizers.ByteLevel(
        add_prefix_space=bool(settings.get("add_prefix_space")), use_regex=split is None
    )
    words = [] if split is None else [pre_tokenizers.Split(Regex(split), behavior="isolated")]
    raw.pre_tokenizer = pre_tokenizers.Sequence([*words, bytes_of]) if words else bytes_of
    raw.decoder = decoders.ByteLevel()
    if composed:
        raw.normalizer = normalizers.NFC()
    return raw, []


BERT = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}
ENDS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
ROBERTA = {
    **ENDS,
    "sep_token": "</s>",
    "pad_token": "<pad>",
    "cls_token": "<s>",
    "mask_token": "<mask>",
}
ALBERT = {
    "bos_token": "[CLS]",
    "eos_token": "[SEP]",
    **BERT,
    "unk_token": "<unk>",
    "pad_token": "<pad>",
    "mask_token": {"content": "[MASK]", "lstrip": True, "normalized": False},
}
T5 = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
GEMMA = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
GPT2 = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
QWEN2 = dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>")
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Classes that are BERT's under other names
BERT_NAMES = [
    "ConvBert",
    "DPRContextEncoder",
    "DPRQuestionEncoder",
    "DPRReader",
    "DistilBert",
    "Electra",
    "LayoutLM",
    "Lxmert",
    "MobileBert",
    "Realm",
    "RetriBert",
    "Splinter",
    "SqueezeBert",
]
TYPED, PLAIN = ("{cls} $A {sep}", "$B:1 {sep}:1"), ("{cls} $A {sep}", "{sep} $B {sep}")


@dataclass(frozen=True, slots=True)
class TokenizerClass:
    """A tokenizer class of transformers: its files, default special tokens, and the templates of a
    text and of a pair's second text. `also`: other classes built the same way.
    `form` None: flags decide bos and eos; `starts` is bos's default. `trims`: a token's place
    excludes the space before a word."""

    read: Callable[[Path, Settings, Mapping[int, str]], Built]
    specials: Mapping[str, Any]
    also: tuple[str, ...] = ()
    form: tuple[str, str] | None = TYPED
    starts: bool = False
    trims: bool = False


CLASSES: Mapping[str, TokenizerClass] = {
    "Bert": TokenizerClass(
        _words,
        BERT,
        tuple(BERT_NAMES),
    ),
    "MPNet": TokenizerClass(_words, {**ROBERTA, "unk_token": "[UNK]"}, form=PLAIN, trims=True),
    "Roberta": TokenizerClass(
        _byte_level,
        ROBERTA,
        ("Longformer",),
        PLAIN,
        trims=True,
    ),
    "Deberta": TokenizerClass(_byte_level, {"bos_token": "[CLS]", "eos_token": "[SEP]", **BERT}),
    "ModernBert": TokenizerClass(
        partial(_byte_level, composed=True), BERT, form=("{cls} $A {sep}", "$B {sep}")
    ),
    "GPT2": TokenizerClass(_byte_level, GPT2, form=None),
    "Qwen2": TokenizerClass(
        partial(_byte_level, split=QWEN2_SPLIT, composed=True), QWEN2, form=None
    ),
    "XLMRoberta": TokenizerClass(partial(unigram, form="XLMRoberta"), ROBERTA, form=PLAIN),
    "Camembert": TokenizerClass(partial(unigram, form="Camembert"), ROBERTA, form=PLAIN),
    "T5": TokenizerClass(partial(unigram, form="T5"), T5, ("MT5",), ("$A {eos}", "$B {eos}")),
    "Albert": TokenizerClass(partial(unigram, form="Albert"), ALBERT),
    "DebertaV2": TokenizerClass(
        partial(unigram, form="DebertaV2"),
        {"bos_token": "[CLS]", "eos_token": "[SEP]", **BERT},
    ),
    "Llama": TokenizerClass(partial(bpe, prefix=True), ENDS, form=None, starts=True),
    "Gemma": TokenizerClass(partial(bpe, prefix=False), GEMMA, form=None, starts=True),
}
