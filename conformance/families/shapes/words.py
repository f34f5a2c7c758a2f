"""Tokenizers of the true size and kind whose pieces are drawn: tokenizer.json as the makers of a
checkpoint write it."""

import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from conformance.small.vocabulary import unigram, wordpiece

LETTERS = "abcdefghijklmnopqrstuvwxyz"
XLM_ROBERTA = ("<s>", "<pad>", "</s>", "<unk>")
BERT = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
QWEN = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
# Merges of the words by which language models judge
WORDS = (("y", "e"), ("ye", "s"), ("n", "o"))


def write_tokenizer(folder: Path, kind: str, size: int) -> None:
    """Write tokenizer.json of exactly `size` pieces. `kind`: a key of KINDS."""
    tokenizer = KINDS[kind](size)
    if tokenizer.get_vocab_size() != size:
        raise ValueError(f"{kind}: {tokenizer.get_vocab_size()} pieces, wanted {size}")
    tokenizer.save(str(folder / "tokenizer.json"))


def _pieces(count: int, taken: set[str], *, letters: int) -> Iterator[str]:
    """Distinct random pieces of 2 to `letters` letters that are not in `taken`."""
    draw = random.Random(0)
    seen = set(taken)
    while count:
        piece = "".join(draw.choices(LETTERS, k=draw.randint(2, letters)))
        if piece not in seen:
            seen.add(piece)
            count -= 1
            yield piece


def _unigram(size: int) -> Tokenizer:
    """A Unigram tokenizer like XLM-RoBERTa's."""
    fixed = [*XLM_ROBERTA, "▁", *LETTERS, "."]
    drawn = [f"▁{piece}" for piece in _pieces(size - len(fixed) - 1, set(), letters=8)]
    scores = [(piece, 0.0) for piece in XLM_ROBERTA] + [
        (piece, -10.0) for piece in fixed[len(XLM_ROBERTA) :]
    ]
    scores += [(piece, -4.0 - 8.0 * place / size) for place, piece in enumerate(drawn)] + [
        ("<mask>", 0.0)
    ]
    tokenizer = unigram(scores)
    tokenizer.add_special_tokens([*XLM_ROBERTA, "<mask>"])
    return tokenizer


def _wordpiece(size: int) -> Tokenizer:
    """A WordPiece tokenizer like BERT's."""
    fixed = [*BERT, ".", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    words = [*_pieces(size - len(fixed), set(LETTERS), letters=7)]
    pieces = [
        *fixed,
        *(f"##{word}" if place % 4 == 0 else word for place, word in enumerate(words)),
    ]
    tokenizer = wordpiece(pieces)
    tokenizer.add_special_tokens([*BERT])
    return tokenizer


def _bytes(size: int) -> Tokenizer:
    """A byte-level BPE tokenizer like Qwen's, with the end-of-text token after each text."""
    draw = random.Random(0)
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    mergeable = [*LETTERS, "Ġ"]
    merges: list[tuple[str, str]] = []

    def merge(left: str, right: str) -> None:
        if left + right not in vocabulary:
            vocabulary[left + right] = len(vocabulary)
            merges.append((left, right))
            if len(left + right) < 8:
                mergeable.append(left + right)

    for pair in WORDS:
        merge(*pair)
    while len(vocabulary) < size - len(QWEN):
        right = draw.choice(mergeable)
        # A space begins a piece
        if not right.startswith("Ġ"):
            merge(draw.choice(mergeable), right)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*QWEN])
    end = QWEN[-1]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", pair=f"$A $B {end}", special_tokens=[(end, tokenizer.token_to_id(end))]
    )
    return tokenizer


KINDS = {"unigram": _unigram, "wordpiece": _wordpiece, "bytes": _bytes}
