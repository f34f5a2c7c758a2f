"""Converts a SentencePiece file to a tokenizer as transformers does: Unigram or BPE, with the
file's normaliser.

The file is protobuf (`sentencepiece_model.proto`). This module reads its pieces, its type and its
normaliser's tables.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

SENTENCEPIECE = (
    "sentencepiece.bpe.model",
    "spiece.model",
    "spm.model",
    "tokenizer.model",
    "sentencepiece.model",
)
# Characters; 31 in the longest piece of a public model
MAX_PIECE = 256
# Of a BPE (Gemma has 580,604); of T5 (files have 100 to 300)
MAX_MERGES, MAX_EXTRA_IDS = (4_000_000, 10_000)
# And of tokens that the file marks as unsplittable
Built = tuple[RawTokenizer, list[AddedToken]]
# Types of pieces and of a model in sentencepiece_model.proto
NORMAL, CONTROL, USER_DEFINED, BPE = (1, 3, 4, 2)


@dataclass(frozen=True, slots=True)
class _Pieces:
    """The contents of a SentencePiece file: (piece, score) by id, the pieces' types, and the
    normaliser's tables."""

    scores: list[tuple[str, float]]
    types: list[int]
    unknown: int
    is_bpe: bool
    charsmap: bytes

    @property
    def normalizers(self) -> list[Any]:
        return [normalizers.Precompiled(self.charsmap)] if self.charsmap else []

    @property
    def marked(self) -> list[AddedToken]:
        return [
            AddedToken(piece, special=kind == CONTROL, normalized=False)
            for (piece, _), kind in zip(self.scores, self.types, strict=True)
            if kind in (CONTROL, USER_DEFINED)
        ]


def _fields(content: bytes) -> Iterator[tuple[int, Any]]:
    # Imports msgspec, which a GPU's machine that runs conformance.load.gpu may lack
    from hybridtei.system.frames import message_fields

    for number, value in message_fields(content, 0, len(content)):
        yield number, content[value] if isinstance(value, slice) else value


def _read_pieces(folder: Path, names: Mapping[int, str]) -> _Pieces:
    file = next(folder / name for name in SENTENCEPIECE if (folder / name).is_file())
    scores, types, trained, tables = (
        list[tuple[str, float]](),
        list[int](),
        dict[int, Any](),
        dict[int, Any](),
    )
    for number, value in _fields(file.read_bytes()):
        if number == 1:
            piece = dict(_fields(value))
            text = piece[1].decode()
            if len(text) > MAX_PIECE:
                raise ValueError(f"a piece of {len(text)} characters, longer than {MAX_PIECE}")
            scores.append((text, struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0))
            types.append(piece.get(3, NORMAL))
        elif number in (2, 3):
            (trained if number == 2 else tables).update(_fields(value))
    texts = {piece for piece, _ in scores}
    for i, name in names.items():
        # A reserved piece
        if i < len(scores) and name not in texts and types[i] in (CONTROL, USER_DEFINED):
            scores[i] = (name, scores[i][1])
    if trained.get(3, 1) not in (1, BPE):
        raise ValueError("its pieces are words or characters, neither of Unigram nor of BPE")
    return _Pieces(scores, types, trained.get(40, 0), trained.get(3, 1) == BPE, tables.get(2, b""))


def unigram(
    folder: Path, settings: Mapping[str, Any], names: Mapping[int, str], *, form: str
) -> Built:
    """Source: XLMRobertaConverter, CamembertConverter, T5Converter, AlbertConverter,
    DebertaV2Converter of transformers 4.57."""

    pieces = _read_pieces(folder, names)
    if pieces.is_bpe:
        raise ValueError("its pieces are of BPE, expected are those of Unigram")
    scores, unknown = _scores(pieces, settings, form), pieces.unknown
    if form in ("XLMRoberta", "Camembert"):
        unknown = 3
    raw = RawTokenizer(models.Unigram(scores, unk_id=unknown))
    raw.normalizer = _normalizer(pieces, settings, form)
    scheme = "always" if settings.get("add_prefix_space", True) else "never"
    words: list[Any] = [pre_tokenizers.Metaspace(prepend_scheme=scheme)]
    if form == "DebertaV2" and settings.get("split_by_punct"):
        words.insert(0, pre_tokenizers.Punctuation("isolated"))
    raw.pre_tokenizer = pre_tokenizers.Sequence(words)
    raw.decoder = decoders.Metaspace(prepend_scheme=scheme)
    extra = [
        AddedToken(text, special=True, normalized=False)
        for text, _ in scores
        if form == "T5" and text.startswith("<extra_id_")
    ]
    return raw, [*pieces.marked, *extra]


def _scores(
    pieces: _Pieces,
    settings: Mapping[str, Any],
    form: str,
) -> list[tuple[str, float]]:
    """Return the pieces by id. fairseq's ids: four special tokens, then the file's pieces."""
    scores = pieces.scores
    if form == "XLMRoberta":
        first = [(text, 0.0) for text in ("<s>", "<pad>", "</s>", "<unk>")]
        return [
            *first,
            *scores[3:],
            ("<mask>", 0.0),
        ]
    if form == "Camembert":
        first = [(text, 0.0) for text in ("<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>")]
        return [
            *first,
            ("<unk>NOTUSED", -100.0),
            *scores[1:],
            ("<mask>", 0.0),
        ]
    if form == "T5":
        count = int(settings.get("extra_ids", 100))
        if count > MAX_EXTRA_IDS:
            raise ValueError(f"`extra_ids` is {count}, more than {MAX_EXTRA_IDS}")
        return scores + [(f"<extra_id_{i}>", 0.0) for i in reversed(range(count))]
    if form == "Albert":
        # A number does not keep the comma
        return [
            (text, score - 100 * (text[-1:] == "," and text[-2:-1].isdigit()))
            for text, score in scores
        ]
    return scores


def _normalizer(
    pieces: _Pieces,
    settings: Mapping[str, Any],
    form: str,
) -> Any:
    before = list[Any]()
    after = [
        normalizers.Strip(left=False),
        normalizers.Replace(Regex(" {2,}"), "▁"),
    ]
    if form in ("Albert", "DebertaV2"):
        after = [normalizers.Replace(Regex(" {2,}"), " ")]
    if form == "Albert":
        before += [
            normalizers.Replace("``", '"'),
            normalizers.Replace("''", '"'),
        ]
    if form == "Albert" and not settings.get("keep_accents"):
        before += [normalizers.NFKD(), normalizers.StripAccents()]
    if form in ("Albert", "DebertaV2") and settings.get("do_lower_case", form == "Albert"):
        before.append(normalizers.Lowercase())
    # ALBERT keeps a blank at the end
    if form == "DebertaV2":
        before.append(normalizers.Strip())
    return normalizers.Sequence([*before, *pieces.normalizers, *after])


def bpe(
    folder: Path, settings: Mapping[str, Any], names: Mapping[int, str], *, prefix: bool
) -> Built:
    """Source: LlamaConverter and GemmaConverter (`prefix`: a space goes before a text)."""
    pieces = _read_pieces(folder, names)
    if not pieces.is_bpe:
        raise ValueError("its pieces are of Unigram, expected are those of BPE")
    vocab = {text: i for i, (text, _) in enumerate(pieces.scores)}
    if not prefix and "\t" not in vocab and "<0x09>" in vocab:
        vocab["\t"] = vocab.pop("<0x09>")
    unk = pieces.scores[pieces.unknown][0]
    raw = RawTokenizer(
        models.BPE(vocab, _merges(pieces, vocab), unk_token=unk, fuse_unk=True, byte_fallback=True)
    )
    prefix, legacy = (
        prefix and settings.get("add_prefix_space") is not False,
        settings.get("legacy") is not False,
    )
    if prefix and not legacy:
        raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        first = [normalizers.Prepend("▁")] if prefix else []
        raw.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return raw, pieces.marked


def _merges(pieces: _Pieces, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return every pair of pieces that forms a piece, the highest score first. Raises ValueError
    beyond MAX_MERGES."""
    merges = list(
        islice(
            (
                (score, at, len(text) - at, -vocab[text[:at]], -vocab[text[at:]], text)
                for (text, score), kind in zip(pieces.scores, pieces.types, strict=True)
                if kind in (NORMAL, USER_DEFINED)
                for at in range(1, len(text))
                if text[:at] in vocab and text[at:] in vocab
            ),
            MAX_MERGES + 1,
        )
    )
    if len(merges) > MAX_MERGES:
        raise ValueError(f"its pieces make more than {MAX_MERGES} merges")
    return [(text[:at], text[at:]) for _, at, _, _, _, text in sorted(merges, reverse=True)]
