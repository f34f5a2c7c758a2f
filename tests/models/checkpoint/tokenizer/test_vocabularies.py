"""Tokenizers built from the files of before `tokenizer.json`, against transformers; and what
refuses those that cannot be."""

import json
import zlib
from base64 import b85decode
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from conformance.small import tiny
from conformance.small.vocabulary import sentencepiece, tokenizer
from hybridtei.encoder import Encoder
from hybridtei.errors import LoadError, MissingArtifact
from hybridtei.models.checkpoint.spec import read_spec
from hybridtei.models.checkpoint.tokenizer import sentencepiece as pieces_of_files
from hybridtei.models.checkpoint.tokenizer.vocabularies import build, read_vocabulary
from hybridtei.models.fingerprint import fingerprint
from tests.near import near

# The tables of `normalization_rule_tsv` of sentencepiece 0.2.3 for: Ａ -> A, Ｂ -> B; tab, line,
# U+00A0 and U+3000 -> a space.
CHARSMAP = zlib.decompress(
    b85decode(
        "c-ke?b&wZC6ae788~6i<RFsks1?lb(L0T!1?ru0rX$~bsK><NZ;0}@QJi2p`ZcuvA0VSlRzMt;Qw{K_n?arIo-H<4RkR^m9NkVunafr0oxQx1_"
        "(INKD5H=-5hj{bRrliKsHclofDJe)!DpK+WuVY(CO&Z=J9cjrxdK@3#CNr6M=l>GIyJRIB@9{p_$w>}!lZ(9MAwT&jNC65{h@upsIK?PQ2})Cn"
        "vXr45A5fkT`G^Wsq9RqOOf{<VG1aNTC)A=Qb*N2UKBXR?(SZ6iq9ILaOf#C&g66cMC2eR;JKEBL_H?2nUFb|Vy3&L0^dyGf^rA0)_=3;rPd^4S"
        "fWZu6C_@+)xpcnbOGYr9QH*3XU-K>BFqScV&v%Sx96vCDNlauiKQfgmOlKN1_=#D}B%U~aW;VYthk49p0rOeJLYA<YWh`X{%UQ)r*07p&tYtk3"
        "Y-9tQ*~C`1u$^t}WCy$1#a{NXpM8<Fgs5;p{FQ?o<`73Y!f}pqk`tWf6lXcZdCu`07r4mpT;>v2xx#g>af912QQ=SV4{k<s)bN*hE3(Gl+~p4c"
        "aE}Mv=MfKi!ejpBDbIPvOJ4l<_sV<suK?``h%5"
    )
)
TEXTS = [
    "baka bemo",
    "Baka, ＡＢ",
    "  bona  7, duti ",
    "é bé",
    "bona\nbebo\u3000baka",
    "tab\tx ",
    "",
    "x <mask> [MASK] baka",
    "東京",
    "</s> baka [SEP] bebo",
    "<x>baka",
]
PAIRS = [("baka bebo", "bona")]
FAIRSEQ, T5, ALBERT = (
    ("<unk>", "<s>", "</s>"),
    ("<pad>", "</s>", "<unk>"),
    ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"),
)
DEBERTA, LLAMA, GEMMA = (
    ("[PAD]", "[CLS]", "[SEP]", "[UNK]"),
    ("<unk>", "<s>", "</s>"),
    ("<pad>", "<eos>", "<bos>", "<unk>"),
)
FILES = {
    "XLMRoberta": ("sentencepiece.bpe.model", {}, sentencepiece(FAIRSEQ, charsmap=CHARSMAP)),
    "Camembert": ("sentencepiece.bpe.model", {}, sentencepiece(FAIRSEQ, charsmap=CHARSMAP)),
    "T5": ("spiece.model", {"extra_ids": 3}, sentencepiece(T5, charsmap=CHARSMAP)),
    "Albert": ("spiece.model", {}, sentencepiece(ALBERT, charsmap=CHARSMAP)),
    "Albert, cased": (
        "spiece.model",
        {"do_lower_case": False, "keep_accents": True},
        sentencepiece(ALBERT),
    ),
    "DebertaV2": ("spm.model", {}, sentencepiece(DEBERTA, charsmap=CHARSMAP, unknown="[UNK]")),
    "DebertaV2, lower": (
        "spm.model",
        {"do_lower_case": True},
        sentencepiece(DEBERTA, charsmap=CHARSMAP, unknown="[UNK]"),
    ),
    "Llama": ("tokenizer.model", {}, sentencepiece(LLAMA, bpe=True)),
    "Llama, eos": (
        "tokenizer.model",
        {"add_bos_token": False, "add_eos_token": True},
        sentencepiece(LLAMA, bpe=True),
    ),
    "Llama, padded": ("tokenizer.model", {"pad_token": "[PAD]"}, sentencepiece(LLAMA, bpe=True)),
    "Gemma": ("tokenizer.model", {}, sentencepiece(GEMMA, bpe=True)),
    # Without a table of characters a tab is no blank
    "XLMRoberta, identity": ("sentencepiece.bpe.model", {}, sentencepiece(FAIRSEQ)),
    "T5, identity": ("spiece.model", {"extra_ids": 3}, sentencepiece(T5)),
    "DebertaV2, identity": ("spm.model", {}, sentencepiece(DEBERTA, unknown="[UNK]")),
}


def write_pieces(folder, name):
    """A folder with the SentencePiece file of `FILES`, and the class's name beside it."""
    file, settings, content = FILES[name]
    folder.mkdir(exist_ok=True)
    (folder / file).write_bytes(content)
    kind = {"tokenizer_class": f"{name.partition(',')[0]}Tokenizer", **settings}
    tiny.write_json(folder / "tokenizer_config.json", kind)
    return folder


def ids(folder):
    raw = build(folder)
    return [encoding.ids for encoding in raw.encode_batch([*TEXTS, *PAIRS])]


@pytest.mark.parametrize("name", FILES)
def test_a_sentencepiece_file_gives_the_ids_that_sentencepiece_gives(tmp_path, name):
    """The oracle: AutoTokenizer of transformers 4.57.6 over sentencepiece 0.2.3; recorded, since
    neither is installed."""
    recorded = json.loads(Path(__file__).with_name("sentencepiece_ids.json").read_text())
    assert ids(write_pieces(tmp_path, name)) == recorded[name]


SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<s>", "<pad>", "</s>", "<mask>"]
WORDPIECE = [*SPECIALS, "baka", "bemo", "b", "##e", "Ba", "##ka"]


@pytest.mark.parametrize(
    "settings",
    [
        {"tokenizer_class": "BertTokenizer"},
        {
            "tokenizer_class": "BertTokenizerFast",
            "do_lower_case": False,
            "tokenize_chinese_chars": False,
        },
        {
            "tokenizer_class": "BertTokenizer",
            "strip_accents": False,
            "cls_token": "<s>",
            "sep_token": {"__type": "AddedToken", "content": "</s>"},
        },
        {"tokenizer_class": "MPNetTokenizer"},
        {"tokenizer_class": "DistilBertTokenizer", "additional_special_tokens": ["<x>"]},
        {
            "tokenizer_class": "ElectraTokenizer",
            "added_tokens_decoder": {"15": {"content": "duti", "special": False}},
        },
    ],
)
def test_a_list_of_words_is_read_as_transformers_reads_it(tmp_path, settings):
    (tmp_path / "vocab.txt").write_text("\n".join(WORDPIECE) + "\n")
    tiny.write_json(tmp_path / "tokenizer_config.json", settings)
    assert_same(tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        {"tokenizer_class": "RobertaTokenizer"},
        {
            "tokenizer_class": "RobertaTokenizer",
            "add_prefix_space": True,
            "mask_token": {"__type": "AddedToken", "content": "<mask>", "lstrip": True},
        },
        {
            "tokenizer_class": "GPT2Tokenizer",
            **dict.fromkeys(("bos_token", "eos_token", "unk_token"), "</s>"),
        },
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "eos_token": "<x>",
            "pad_token": "<pad>",
            "unk_token": None,
        },
    ],
)
def test_merged_bytes_are_read_as_transformers_reads_them(tmp_path, settings):
    tokenizer("roberta").backend_tokenizer.model.save(str(tmp_path))
    tiny.write_json(tmp_path / "tokenizer_config.json", settings)
    assert_same(
        tmp_path, *(text for text in TEXTS if " <mask>" not in text or "mask_token" in settings)
    )


def assert_same(folder, *texts):
    oracle = AutoTokenizer.from_pretrained(folder)
    for text in texts or TEXTS:
        expected = oracle(text, return_token_type_ids=True, return_offsets_mapping=True)
        found = build(folder).encode(text)
        assert (found.ids, found.type_ids) == (expected["input_ids"], expected["token_type_ids"])
        assert found.offsets == expected["offset_mapping"]
    expected, found = oracle(*PAIRS[0], return_token_type_ids=True), build(folder).encode(*PAIRS[0])
    assert (found.ids, found.type_ids) == (expected["input_ids"], expected["token_type_ids"])


def test_files_of_before_tokenizer_config_are_read(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(WORDPIECE))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "special_tokens_map.json").write_text(
        '{"cls_token": "<s>", "additional_special_tokens": ["bemo"]}'
    )
    (tmp_path / "added_tokens.json").write_text('{"second": 16, "first": 15}')
    assert_same(tmp_path)
    assert read_vocabulary(tmp_path)["second"] == 16


def old_files(folder):
    """Replaces `tokenizer.json` of a tiny BERT by `vocab.txt`."""
    words = PreTrainedTokenizerFast.from_pretrained(folder).get_vocab()
    (folder / "vocab.txt").write_text("\n".join(sorted(words, key=words.__getitem__)) + "\n")
    (folder / "tokenizer.json").unlink()


def test_a_model_without_tokenizer_json_is_served_alike_and_told_apart_by_its_words(folder):
    texts = ["baka bemo, duti?", "Bona"]
    expected, removed = Encoder.load(folder).encode(texts).dense, read_spec(folder).removed_ids
    old_files(folder)
    assert read_spec(folder).removed_ids == removed != frozenset()
    near(Encoder.load(folder).encode(texts).dense, expected, 1e-6)
    first = fingerprint(read_spec(folder))
    (folder / "vocab.txt").write_text((folder / "vocab.txt").read_text().replace("baka", "kaba"))
    second = fingerprint(read_spec(folder))
    assert first["tokenizer"] != second["tokenizer"]
    assert first["weights"] == second["weights"]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (
            {"tokenizer_config.json": b'{"tokenizer_class": "BertJapaneseTokenizer"}'},
            "class 'BertJapanese'",
        ),
        (
            {"tokenizer_config.json": b'{"tokenizer_class": "LlamaTokenizer"}'},
            "expected are those of BPE",
        ),
        ({"tokenizer_config.json": b"{}"}, "class 'None'"),
        ({"added_tokens.json": b'{"duti": 77}'}, "'duti' has the id 86, stated is 77"),
        ({"spiece.model": b""}, "empty"),
        ({"spiece.model": sentencepiece(ALBERT)[:-20]}, "longer than what holds it"),
        ({"spiece.model": sentencepiece([*ALBERT, "x" * 300])}, "a piece of 300 characters"),
        ({"spiece.model": b"not a model"}, "cannot be built"),
        ({"spiece.model": b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"}, "64 bits"),
    ],
)
def test_what_cannot_be_built_is_refused_with_the_cure(tmp_path, changed, why):
    write_pieces(tmp_path, "Albert")
    for name, content in changed.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(LoadError, match=why) as caught:
        build(tmp_path)
    assert str(tmp_path) in str(caught.value)
    if why != "empty":
        assert str(caught.value).endswith("A folder with tokenizer.json is served")


def test_numbers_of_a_file_make_no_vocabulary_without_end(tmp_path, monkeypatch):
    """100 bytes of settings took as many tokens as they said, and pieces within one another as many
    merges as letters."""
    words = write_pieces(tmp_path / "t5", "T5")
    tiny.edit_json(words / "tokenizer_config.json", extra_ids=200_000)
    with pytest.raises(LoadError, match="`extra_ids` is 200000, more than 10000"):
        build(words)
    monkeypatch.setattr(pieces_of_files, "MAX_MERGES", 5, raising=False)
    with pytest.raises(LoadError, match="more than 5 merges"):
        build(write_pieces(tmp_path / "llama", "Llama"))


def test_a_folder_without_any_vocabulary_names_the_files(tmp_path):
    tiny.write_bert(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(
        MissingArtifact, match=r"tokenizer\.json: missing.*vocab\.txt.*sentencepiece\.bpe\.model"
    ):
        read_spec(tmp_path)


@pytest.mark.parametrize(
    "name", ["BertTokenizer", "LxmertTokenizer", "DPRContextEncoderTokenizer", None]
)
def test_a_word_may_end_in_a_blank_in_every_class_of_bert(tmp_path, name):
    (tmp_path / "vocab.txt").write_text("\n".join([*WORDPIECE, "duti ", "bona"]) + "\n")
    tiny.write_json(tmp_path / "config.json", {"model_type": "dpr"})
    tiny.write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": name})
    assert read_vocabulary(tmp_path)["bona"] == len(WORDPIECE) + 1
    assert build(tmp_path).encode("bona duti").ids[1:3] == [len(WORDPIECE) + 1, 1]


@pytest.mark.parametrize("line", ["#version: 0.2\n", ""])
@pytest.mark.parametrize("name", ["RobertaTokenizer", "Qwen2Tokenizer"])
def test_the_first_line_of_merges_is_dropped_as_transformers_4_drops_it(tmp_path, name, line):
    """Recorded with transformers 4.57.6: without a version RoBERTa's class loses its first merge,
    Qwen's does not."""
    tokenizer("roberta").backend_tokenizer.model.save(str(tmp_path))
    merges = (tmp_path / "merges.txt").read_text().partition("\n")[2]
    (tmp_path / "merges.txt").write_text(line + merges)
    tiny.write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": name})
    first = merges.partition("\n")[0].replace(" ", "")
    found = json.loads(build(tmp_path).to_str())["model"]["merges"]
    has_first = any("".join(merge) == first for merge in found)
    assert has_first == (bool(line) or name == "Qwen2Tokenizer")
