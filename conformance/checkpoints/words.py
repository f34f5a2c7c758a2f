"""Tokenizers of about 500 pieces as hub repositories hold them: tokenizer.json, and
tokenizer_config.json with its class."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from conformance.small import tiny
from conformance.small.vocabulary import (
    OF_ROBERTA,
    WORDS,
    byte_level,
    merges,
    numbered,
    unigram,
    wordpiece,
)

LETTERS = "abcdefghijklmnopqrstuvwxyz"
OTHERS = "0123456789.,?!-'éèêüåÉ東京中文🙂👩"
FIRST = {
    "wordpiece": ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]", "[unused1]"),
    "unigram": ("<s>", "<pad>", "</s>", "<unk>", "[Q]", "[D]"),
    "roberta": ("<s>", "<pad>", "</s>", "<unk>", "<mask>"),
    "bytes": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "llama": ("<unk>", "<s>", "</s>"),
}
TYPED = ["input_ids", "token_type_ids", "attention_mask"]
UNTYPED = ["input_ids", "attention_mask"]
BERT = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
# kind -> (class that tokenizer_config.json names, its special tokens, other keys)
DECLARED: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "wordpiece": ("BertTokenizer", BERT, {"do_lower_case": True, "model_input_names": TYPED}),
    "cased": ("BertTokenizer", BERT, {"do_lower_case": False, "model_input_names": TYPED}),
    "unigram": ("XLMRobertaTokenizer", OF_ROBERTA, {}),
    "roberta": ("RobertaTokenizer", OF_ROBERTA, {"add_prefix_space": False}),
    "bytes": (
        "Qwen2Tokenizer",
        {"eos": "<|im_end|>", "pad": "<|endoftext|>"},
        {"add_prefix_space": False},
    ),
    "llama": (
        "PreTrainedTokenizerFast",
        {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "pad": "</s>"},
        {},
    ),
}


def write_tokenizer(folder: Path, kind: str, *, longest: int, types: bool = True) -> int:
    """Both files. `types`: the model takes token types. Returns the number of pieces."""
    raw = {"wordpiece": _wordpiece, "unigram": _unigram, "llama": _llama}.get(
        kind.replace("cased", "wordpiece"), _byte_level
    )(kind)
    of, names, more = DECLARED[kind]
    added = dict.fromkeys([*FIRST["wordpiece" if kind == "cased" else kind], *names.values()])
    raw.add_special_tokens([one for one in added if not one.startswith(("[unused", "[Q", "[D"))])
    raw.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": of,
        "model_max_length": longest,
        **{f"{name}_token": one for name, one in names.items()},
    }
    inputs = TYPED if types and kind in ("wordpiece", "cased") else UNTYPED
    tiny.write_json(
        folder / "tokenizer_config.json", {**config, **more, "model_input_names": inputs}
    )
    tiny.write_json(
        folder / "special_tokens_map.json", {f"{name}_token": one for name, one in names.items()}
    )
    return raw.get_vocab_size()


def _wordpiece(kind: str) -> Tokenizer:
    whole = [*WORDS, *(word.title() for word in WORDS), *LETTERS, *LETTERS.upper(), *OTHERS, "東京"]
    inner = (f"##{one}" for one in dict.fromkeys([*whole[-140:]]))
    return wordpiece([*FIRST["wordpiece"], *whole, *inner], lowercase=kind != "cased")


def _unigram(kind: str) -> Tokenizer:
    pieces = [(piece, 0.0) for piece in FIRST[kind]] + [(f"▁{word}", -3.0) for word in WORDS]
    pieces += [
        ("▁", -4.0),
        *((one, -8.0) for one in LETTERS + LETTERS.upper() + OTHERS),
        ("<mask>", 0.0),
    ]
    raw = unigram(pieces)
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    return raw


def _byte_level(kind: str) -> Tokenizer:
    raw = byte_level(FIRST[kind], merges("Ġ"))
    raw.post_processor = (
        processors.RobertaProcessing(
            ("</s>", 2), ("<s>", 0), trim_offsets=True, add_prefix_space=False
        )
        if kind == "roberta"
        else processors.TemplateProcessing(
            single="$A <|endoftext|>",
            pair="$A $B:1 <|endoftext|>:1",
            special_tokens=[("<|endoftext|>", 0)],
        )
    )
    return raw


def _llama(kind: str) -> Tokenizer:
    joined = merges("▁")
    pieces = [
        *FIRST[kind],
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *LETTERS,
        *(a + b for a, b in joined),
    ]
    raw = Tokenizer(
        models.BPE(numbered(pieces), joined, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    raw.post_processor = template(bos=True, eos=False)
    return raw


def template(*, bos: bool, eos: bool) -> Any:
    """Llama's post-processor."""
    one = (["<s>:0"] if bos else []) + ["$A:0"] + (["</s>:0"] if eos else [])
    two = [part.replace("$A:0", "$B:1").replace(":0", ":1") for part in one]
    return processors.TemplateProcessing(
        single=one, pair=[*one, *two], special_tokens=[("<s>", 1), ("</s>", 2)]
    )
