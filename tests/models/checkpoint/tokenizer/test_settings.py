"""Texts are read as transformers reads them: settings of tokenizer_config.json come before
tokenizer.json."""

import json

import pytest
from tokenizers import Tokenizer as RawTokenizer
from transformers import AutoTokenizer

from conformance.small import tiny, vocabulary
from hybridtei.config import EngineConfig
from hybridtei.errors import LoadError
from hybridtei.inference.load import text_reader
from hybridtei.models.checkpoint.folder import Folder
from hybridtei.models.checkpoint.spec import read_spec
from hybridtei.models.fingerprint import fingerprint
from tests.sampled import paired

TEXTS = [
    "baka bake",
    "BAKA Bake",
    "bákè",
    " baka",
    "東baka京",
    "ba</s>ka [SEP] <mask>",
    " ".join(["baka"] * 60 + ["dura"] * 90),
]
# Changes of (tokenizer_config.json, tokenizer.json) of a WordPiece model.
WORDPIECE = {
    "cased files, class that lowers": ({}, {"lowercase": False}),
    "told not to lower": ({"do_lower_case": False}, {"lowercase": True}),
    "accents stay": ({"strip_accents": False}, {}),
    "accents go": (
        {"strip_accents": True, "do_lower_case": False},
        {"lowercase": False, "strip_accents": False},
    ),
    "Chinese is not split": ({"tokenize_chinese_chars": False}, {}),
    "special tokens are text": ({"split_special_tokens": True}, {}),
    "cut on the left": ({"truncation_side": "left"}, {}),
}


def reader(folder):
    return text_reader(read_spec(folder, pooling="mean"), EngineConfig())


def ids(folder, texts=TEXTS):
    return [
        one.input_ids.tolist()
        for one in reader(folder).read(texts, truncate=True, allow_empty=True)
    ]


def theirs(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [
        tokenizer(text, truncation=True, max_length=vocabulary.LONGEST).input_ids for text in TEXTS
    ]


def model(folder, model_type, **written):
    """A family, with these settings of its tokenizer."""
    tiny.write_family(folder, model_type)
    tiny.edit_json(folder / "tokenizer_config.json", **written)
    return folder


def rewrite(folder, edit):
    """Change the description of the tokenizer."""
    described = json.loads((folder / "tokenizer.json").read_text())
    edit(described)
    tiny.write_json(folder / "tokenizer.json", described)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        *paired([*WORDPIECE], ["BertTokenizer", None]),
        *paired([*WORDPIECE], ["PreTrainedTokenizerFast", "BertTokenizerFast"]),
    ],
)
def test_a_wordpiece_model_reads_as_transformers_does(tmp_path, change, name):
    written, normalizer = WORDPIECE[change]
    folder = model(tmp_path, "bert", **written, tokenizer_class=... if name is None else name)
    rewrite(folder, lambda described: described["normalizer"].update(normalizer))
    assert ids(folder) == theirs(folder)


@pytest.mark.parametrize(("written", "there"), [(True, False), (False, True), (..., True)])
def test_a_byte_level_model_has_a_space_before_texts_as_told(tmp_path, written, there):
    settings = {"tokenizer_class": "RobertaTokenizer", "add_prefix_space": written}
    folder = model(tmp_path, "roberta", **settings)
    rewrite(folder, lambda described: described["pre_tokenizer"].update(add_prefix_space=there))
    assert ids(folder) == theirs(folder)


def test_truncation_of_tokenizer_json_on_the_left_is_followed(tmp_path):
    folder = tiny.write_family(tmp_path, "bert")
    raw = RawTokenizer.from_file(str(folder / "tokenizer.json"))
    raw.enable_truncation(vocabulary.LONGEST, direction="left")
    raw.save(str(folder / "tokenizer.json"))
    assert ids(folder) == theirs(folder)
    asked = reader(folder).read(TEXTS[-1:], truncate=True, direction="right")
    assert asked[0].input_ids.tolist() != theirs(folder)[-1]


# Ids of "baka", of the pair ("baka", "bake") and of "" by transformers 4.57.6, of any template in
# tokenizer.json. Version 5
# drops the two keys, and with them the end that e5-mistral's vectors are pooled from.
RECORDED = [
    ({"add_eos_token": True}, [[0, 277, 2], [0, 277, 2, 0, 278, 2], [0, 2]]),
    ({"add_bos_token": False}, [[277], [277, 278], []]),
    ({"add_bos_token": False, "add_eos_token": True}, [[277, 2], [277, 2, 278, 2], [2]]),
    ({"add_bos_token": True, "add_eos_token": True}, [[0, 277, 2], [0, 277, 2, 0, 278, 2], [0, 2]]),
]
# Of tokenizer.json: no key, or a class that does not read them
WRITTEN = [
    [0, 277, 2],
    [0, 277, 2, 2, 278, 2],
    [0, 2],
]


@pytest.mark.parametrize(
    ("keys", "recorded", "name"),
    [
        (*one, name)
        for one, name in zip(
            RECORDED,
            ["LlamaTokenizer", "LlamaTokenizerFast", "GemmaTokenizerFast"] * 2,
            strict=False,
        )
    ],
)
def test_begin_and_end_follow_the_publishers_keys(
    tmp_path,
    caplog,
    name,
    keys,
    recorded,
):
    folder = model(tmp_path, "roberta", tokenizer_class=name, **keys)
    with caplog.at_level("INFO"):
        tokenizer = reader(folder).tokenizer
    assert [raw.ids for raw in tokenizer.encode(["baka", ("baka", "bake"), ""])] == recorded
    assert ("add_eos_token" in caplog.text) == (recorded[2] != WRITTEN[2])


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("LlamaTokenizer", {}),
        ("PreTrainedTokenizerFast", {"add_bos_token": False, "add_eos_token": False}),
    ],
)
def test_without_the_keys_or_the_class_the_template_of_the_file_counts(tmp_path, name, keys):
    folder = model(tmp_path, "roberta", tokenizer_class=name, **keys)
    assert [
        raw.ids for raw in reader(folder).tokenizer.encode(["baka", ("baka", "bake"), ""])
    ] == WRITTEN


ENDS = {"tokenizer_class": "LlamaTokenizer", "add_eos_token": True}


def test_a_token_that_the_vocabulary_lacks_is_named(tmp_path):
    folder = model(tmp_path, "roberta", **ENDS, eos_token="<none>")
    with pytest.raises(LoadError, match="cannot add the token '<none>'"):
        reader(folder)


@pytest.mark.parametrize("token", ["$A", "$", "a b", "b:1"])
def test_a_token_that_a_template_would_read_otherwise_is_refused(tmp_path, token):
    folder = model(tmp_path, "roberta", **ENDS, eos_token=token)

    def add(described):
        first, *_ = described["added_tokens"]
        described["added_tokens"].append({**first, "id": 600, "content": token})

    rewrite(folder, add)
    with pytest.raises(LoadError, match="cannot add the token"):
        reader(folder)


@pytest.mark.parametrize(
    "name",
    ["modeling_qwen.Qwen2Model", "Alibaba-NLP/gte-Qwen2-1.5B-instruct--modeling_qwen.Qwen2Model"],
)
def test_gte_qwen2_ends_each_text(tmp_path, name):
    folder = tiny.configured(tiny.write_family(tmp_path, "qwen2"), auto_map={"AutoModel": name})
    end = RawTokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("<|endoftext|>")
    assert [one[-1] for one in ids(folder, ["baka", "bake dura", ""])] == [end] * 3
    assert len(ids(folder, [""])[0]) == 1
    # A cut text too
    assert ids(folder)[-1][-1] == end
    tiny.configured(folder, auto_map=...)
    assert ids(folder, ["baka"])[0][-1] != end


def test_only_models_that_are_read_otherwise_than_before_have_another_fingerprint(
    tmp_path,
):
    folder = model(tmp_path, "bert", tokenizer_class="BertTokenizer")

    def reading():
        return fingerprint(read_spec(folder, pooling="mean")).get("reading")

    assert reading() is None
    tiny.write_json(folder / "sentence_bert_config.json", {"max_seq_length": 100})
    assert reading() is None
    found = []
    for change in ({"model_max_length": 64}, {"do_lower_case": False}, {"truncation_side": "left"}):
        tiny.edit_json(folder / "tokenizer_config.json", **change)
        found.append(reading())
    prompts = {"prompts": {"query": "q: "}, "default_prompt_name": "query"}
    tiny.write_json(folder / "config_sentence_transformers.json", prompts)
    found.append(reading())
    assert None not in found
    assert len({*found}) == len(found)


def token(content, **flags):
    return {"content": content, "lstrip": False, "normalized": False, "rstrip": False, **flags}


NEW = ["x <baka> y<DURA>baka", "<baka>", "<DURA>", "baka<baka>dura", *TEXTS[:3]]
ADDED = {
    "with ids": {
        "added_tokens_decoder": {
            "0": token("<baka>", special=False),
            "1": token("<DURA>", special=True),
        }
    },
    "without ids": {"additional_special_tokens": ["<baka>", "<DURA>"]},
    "a list and named ones": {
        "additional_special_tokens": ["<baka>"],
        "extra_special_tokens": {"image_token": "<DURA>"},
    },
    "two lists": {"additional_special_tokens": ["<baka>"], "extra_special_tokens": ["<DURA>"]},
    "both lists": {
        "extra_special_tokens": ["<DURA>"],
        "added_tokens_decoder": {"0": token("<baka>", special=True, single_word=True)},
    },
    "in added_tokens.json": {},
}


@pytest.mark.parametrize("rows", [0, 2])
@pytest.mark.parametrize("name", ADDED)
def test_tokens_that_other_files_add_are_tokens_if_the_model_has_rows_for_them(
    tmp_path, name, rows
):
    folder = tiny.write_family(tmp_path, "bert")
    first = RawTokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    tiny.configured(folder, vocab_size=first + rows)
    written = dict(ADDED[name])
    if "added_tokens_decoder" in written:
        added = written["added_tokens_decoder"]
        written["added_tokens_decoder"] = {str(int(i) + first): added[i] for i in added}
    if not written:
        tiny.write_json(folder / "added_tokens.json", {"<DURA>": first + 1, "<baka>": first})
    tiny.edit_json(folder / "tokenizer_config.json", **written)
    oracle = AutoTokenizer.from_pretrained(folder)
    expected = [oracle(text).input_ids for text in NEW]
    assert max(map(max, expected)) > first - 1
    if rows:
        assert ids(folder, NEW) == expected
        assert Folder(folder).vocabulary["<DURA>"] >= first
    else:
        assert max(map(max, ids(folder, NEW))) < first
        assert "<DURA>" not in Folder(folder).vocabulary


def test_the_lists_of_two_files_are_joined(tmp_path):
    folder = model(tmp_path, "bert", additional_special_tokens=["<baka>"])
    tiny.write_json(
        folder / "special_tokens_map.json", {"additional_special_tokens": [token("<DURA>")]}
    )
    first = RawTokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    tiny.configured(folder, vocab_size=first + 2)
    vocabulary = Folder(folder).vocabulary
    assert {vocabulary["<baka>"], vocabulary["<DURA>"]} == {first, first + 1}
