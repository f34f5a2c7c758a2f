"""Words, texts of them, and tokenizers of every kind that know these words whole and their
letters."""

import random
import struct
from typing import Literal

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hybridtei.system.frames import nested, varint

ENDS = ("ka", "ke", "lo", "lu", "mi", "mo", "na", "pe", "ra", "ti")
WORDS = [start + end for start in ("ba", "be", "bo", "bu", "da", "du") for end in ENDS]
# Tokens, special tokens included, in every tiny model
LONGEST = 128
OF_ROBERTA = {
    "bos": "<s>",
    "eos": "</s>",
    "pad": "<pad>",
    "unk": "<unk>",
    "cls": "<s>",
    "sep": "</s>",
    "mask": "<mask>",
}
Kind = Literal["wordpiece", "unigram", "roberta", "bytes"]


def texts(count, *, seed=0, most=100):
    """Texts of very different lengths, 1 to `most` words."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=int(most ** draw.random()))) for _ in range(count)]


def tokenizer(kind):
    """A tokenizer that knows WORDS whole and their letters, of the given kind."""
    if kind == "wordpiece":
        return _wordpiece()
    if kind == "unigram":
        return _unigram()
    return _byte_level(specials=kind == "roberta")


def wordpiece(pieces, *, lowercase=True):
    """BERT's tokenizer of these pieces, of which [CLS] and [SEP] are the third and the fourth."""
    raw = Tokenizer(models.WordPiece(numbered(pieces), unk_token="[UNK]"))
    raw.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    raw.decoder = decoders.WordPiece()
    raw.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return raw


def unigram(pieces):
    """XLM-RoBERTa's tokenizer of pieces with their scores, which begin with <s>, <pad>, </s> and
    <unk>."""
    raw = Tokenizer(models.Unigram(pieces, unk_id=3))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Metaspace()
    raw.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    return raw


def byte_level(first, merges):
    """A byte-level BPE without a post-processor; `first`: its special pieces."""
    pieces = [*first, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    raw = Tokenizer(models.BPE(numbered(pieces), merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return raw


def merges(space):
    """Those that make WORDS, alone and behind `space`."""
    ends = {(word[0], word[1]) for word in WORDS} | {(word[2], word[3]) for word in WORDS}
    return [
        *sorted(ends),
        *((word[:2], word[2:]) for word in WORDS),
        *((space, word) for word in WORDS),
    ]


def numbered(pieces):
    """Pieces and their ids; one that comes again has its first."""
    return {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}


def _wordpiece():
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    letters = sorted({letter for word in WORDS for letter in word} | set("?.,"))
    raw = wordpiece([*pieces, *letters, *(f"##{letter}" for letter in letters)])
    return _fast(raw, pad="[PAD]", unk="[UNK]", cls="[CLS]", sep="[SEP]", mask="[MASK]")


def _unigram():
    letters = sorted({letter for word in WORDS for letter in word})
    pieces = [(piece, 0.0) for piece in ("<s>", "<pad>", "</s>", "<unk>")]
    pieces += (
        [(f"▁{word}", -3.0) for word in WORDS]
        + [("▁", -4.0)]
        + [(letter, -8.0) for letter in letters]
    )
    return _fast(unigram([*pieces, ("<mask>", 0.0)]), **OF_ROBERTA)


def _byte_level(*, specials):
    first = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"] if specials else ["<|endoftext|>"]
    raw = byte_level(first, merges("Ġ"))
    if not specials:
        raw.post_processor = processors.ByteLevel(trim_offsets=False)
        return _fast(raw, pad="<|endoftext|>", eos="<|endoftext|>")
    raw.post_processor = processors.RobertaProcessing(
        ("</s>", 2), ("<s>", 0), add_prefix_space=False
    )
    return _fast(raw, **OF_ROBERTA)


def _fast(raw, **names):
    special = {f"{name}_token": content for name, content in names.items()}
    return PreTrainedTokenizerFast(tokenizer_object=raw, model_max_length=LONGEST, **special)


# Types of pieces
SPECIALS = {
    "<unk>": 2,
    "<s>": 3,
    "</s>": 3,
    "<pad>": 3,
    "[CLS]": 3,
    "[SEP]": 3,
    "[MASK]": 3,
    "<x>": 4,
}


def sentencepiece(first, *, bpe=False, charsmap=b"", unknown="<unk>"):
    """A SentencePiece file of WORDS and their letters, as its trainer writes one; `first`: its
    special pieces, in order."""
    letters = sorted({letter for word in WORDS for letter in word} | set("ABé,7"))
    if bpe:
        joined = dict.fromkeys(
            [
                *(word[:2] for word in WORDS),
                *(word[2:] for word in WORDS),
                *WORDS,
                *(f"▁{w}" for w in WORDS),
            ]
        )
        pieces = [
            *((f"<0x{byte:02X}>", 6, 0.0) for byte in range(256)),
            *((one, 1, -i) for i, one in enumerate([*joined, "▁", *letters])),
        ]
    else:
        pieces = [
            *((f"▁{word}", 1, -3.0) for word in WORDS),
            ("▁", 1, -4.0),
            *((one, 1, -8.0) for one in letters),
            ("7,", 1, -2.0),
        ]
    specials = [(name, 2 if name == unknown else SPECIALS.get(name, 3), 0.0) for name in first]
    body = b"".join(
        nested(
            1,
            nested(1, text.encode())
            + b"\x15"
            + struct.pack("<f", score)
            + varint(3 << 3)
            + varint(kind),
        )
        for text, kind, score in [*specials, *pieces]
    )
    ids = {40: unknown, 41: "<s>", 42: "</s>", 43: "<pad>"}
    trained = varint(3 << 3) + varint(2 if bpe else 1) + varint(35 << 3) + varint(int(bpe))
    for field, name in ids.items():
        trained += varint(field << 3) + varint(first.index(name) if name in first else 2**64 - 1)
    trained += nested(45, unknown.encode())
    # Gemma's texts begin without one
    first_space = int(not bpe or "<bos>" not in first)
    keeps = (
        varint(3 << 3)
        + varint(first_space)
        + varint(4 << 3)
        + varint(int(not bpe))
        + varint(5 << 3)
        + varint(1)
    )
    return body + nested(2, trained) + nested(3, nested(2, charsmap) + keeps)
