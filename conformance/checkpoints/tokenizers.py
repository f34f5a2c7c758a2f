"""Variants of tokenizer files, prompts and lengths."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from conformance.checkpoints.build import (
    Case,
    Step,
    bert,
    case,
    chain,
    config,
    edit,
    json_of,
    raw_words,
    read,
    remove,
    rewritten,
    sbert,
    words,
    write,
)
from conformance.checkpoints.words import UNTYPED, template
from conformance.small import tiny
from conformance.small.vocabulary import sentencepiece

ST = "config_sentence_transformers.json"
TEI = "TEI puts the family's template around a text if tokenizer.json has no template"


def wordpieces(folder: Path) -> None:
    """vocab.txt of a WordPiece."""
    vocabulary = read(folder, "tokenizer.json")["model"]["vocab"]
    (folder / "vocab.txt").write_text(
        "\n".join(sorted(vocabulary, key=vocabulary.__getitem__)) + "\n", encoding="utf-8"
    )


def merges(folder: Path) -> None:
    """vocab.json and merges.txt of a byte-level BPE."""
    model = read(folder, "tokenizer.json")["model"]
    tiny.write_json(folder / "vocab.json", model["vocab"])
    lines = [one if isinstance(one, str) else " ".join(one) for one in model["merges"]]
    (folder / "merges.txt").write_text(
        "\n".join(["#version: 0.2", *lines]) + "\n", encoding="utf-8"
    )


def old_merges(folder: Path) -> None:
    model = read(folder, "tokenizer.json")["model"]
    raw_words(model={**model, "merges": [" ".join(one) for one in model["merges"]]})(folder)


def old_metaspace(folder: Path) -> None:
    old = {"type": "Metaspace", "replacement": "▁", "str_rep": "▁", "add_prefix_space": True}
    raw_words(
        pre_tokenizer={"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, old]}
    )(folder)


def processed(post_processor: Any) -> Step:
    def step(folder: Path) -> None:
        path = str(folder / "tokenizer.json")
        raw = Tokenizer.from_file(path)
        raw.post_processor = post_processor
        raw.save(path)

    return step


def llama_template(bos: bool, eos: bool) -> Step:
    return processed(template(bos=bos, eos=eos))


def llamas(of: str) -> dict[str, Case]:
    """tokenizer.json with and without BOS and EOS, and the keys of tokenizer_config.json, which a
    class of its own follows."""
    found = {}
    for json in ("10", "11", "01"):
        for keys in ("", "11", "10", "00"):
            named = {
                f"add_{name}_token": on == "1"
                for name, on in zip(("bos", "eos"), keys, strict=False)
            }
            mended = json if of == "PreTrainedTokenizerFast" or not keys else keys
            plain = (
                llama_template(mended[0] == "1", mended[1] == "1"),
                words(tokenizer_class="PreTrainedTokenizerFast"),
            )
            steps = (
                llama_template(json[0] == "1", json[1] == "1"),
                words(tokenizer_class=of, **named),
            )
            found[f"llama-json{json}-config{keys}"] = case("llama", *steps, oracle=plain)
    return found


def tokenizers() -> dict[str, Case]:
    limits = {
        "huge": 1e30,
        "hugeint": 10**30,
        "int64": 2**63 - 1,
        "16": 16,
        "above-positions": 512,
        "null": None,
    }
    truncation = {"direction": "Right", "max_length": 64, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": "BatchLongest",
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "[PAD]",
    }
    last = chain("Pooling", pooling_mode_lasttoken=True)
    bare = raw_words(post_processor=None)
    no_pad = (words(pad_token=...), remove("special_tokens_map.json"))
    return {
        "vocab-txt-only": bert(wordpieces, remove("tokenizer.json")),
        "vocab-merges-only": case("roberta", merges, remove("tokenizer.json")),
        "sentencepiece-only": case(
            "xlmr",
            write("sentencepiece.bpe.model", sentencepiece(("<unk>", "<s>", "</s>"))),
            remove("tokenizer.json"),
            settings={"vocab_size": 600},
        ),
        "config-lower-json-cased": case("bert-cased", words(do_lower_case=True)),
        "config-cased-json-lower": bert(words(do_lower_case=False)),
        "config-strip-accents-false": bert(words(strip_accents=False)),
        "config-no-chinese": bert(words(tokenize_chinese_chars=False)),
        "sbert-lower": case("bert-cased", sbert(do_lower_case=True)),
        "sbert-lower-roberta": case("roberta", sbert(do_lower_case=True)),
        "json-truncation-padding": bert(raw_words(truncation=truncation, padding=padding)),
        "json-truncation-left": bert(raw_words(truncation={**truncation, "direction": "Left"})),
        "truncation-side-left": bert(words(truncation_side="left")),
        "padding-side-left-lasttoken": case("qwen3", words(padding_side="left"), last),
        "no-tokenizer-config": bert(remove("tokenizer_config.json", "special_tokens_map.json")),
        **{
            f"class-{of}": bert(words(tokenizer_class=of))
            for of in ("BertTokenizerFast", "PreTrainedTokenizerFast")
        },
        "legacy-files": bert(wordpieces, json_of("added_tokens.json", {})),
        "embedding-larger": bert(settings={"vocab_size": 640}),
        **{
            f"mml-{name}-nosbert": bert(words(model_max_length=limit))
            for name, limit in limits.items()
        },
        **{
            f"mml-{name}-sbert128": bert(words(model_max_length=limit), sbert())
            for name, limit in limits.items()
        },
        "sbert-null-length": bert(sbert(max_seq_length=None)),
        "sbert-512-over-positions": bert(sbert(max_seq_length=512), oracle=(sbert(),)),
        "sbert-8": bert(sbert(max_seq_length=8)),
        "max-len-key": bert(words(max_len=64)),
        "qwen-add-eos-in-config": case("qwen3", words(add_eos_token=True)),
        "qwen-add-eos-class-slow": case(
            "qwen3", words(add_eos_token=True, tokenizer_class="Qwen2Tokenizer")
        ),
        **llamas("PreTrainedTokenizerFast"),
        "bert-no-postprocessor": bert(bare, by_design=TEI, first=1),
        "roberta-no-postprocessor": case("roberta", bare, by_design=TEI),
        "fast-no-postprocessor": case("llama", bare),
        "roberta-add-prefix-space": case("roberta", words(add_prefix_space=True)),
        "pad-is-eos": case("qwen3", words(eos_token="<|endoftext|>")),
        "decoder-no-pad": case("llama", *no_pad, config(pad_token_id=None)),
        "pad-minus-one": case("llama", *no_pad, config(pad_token_id=-1)),
        "model-input-names-no-types": bert(words(model_input_names=UNTYPED)),
        "split-special": bert(words(split_special_tokens=True)),
        "old-json-metaspace": case("xlmr", old_metaspace),
        "old-json-merges-strings": case("roberta", old_merges),
        "byte-order-mark": bert(
            rewritten(
                lambda folder: [
                    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
                    for file in folder.rglob("*.json")
                ]
            ),
        ),
    }


def hidden_state(layer: int) -> Step:
    """sentence_bert_config.json of sentence-transformers 6 whose output is another than the last
    state."""
    output = {"text": {"method": "forward", "method_output_name": ["hidden_states", layer]}}
    loaded = {"config_kwargs": {"output_hidden_states": True}}
    return sbert(
        transformer_task="feature-extraction",
        modality_config=output,
        module_output_name="token_embeddings",
        **loaded,
    )


def prompts() -> dict[str, Case]:
    both = {"query": "baka: ", "document": "lolo: "}
    sides = [{"input_type": "query"}, {"input_type": "document"}]
    return {
        "prompt-named": bert(
            edit(ST, prompts=both), inputs=[{}, *({"prompt_name": name} for name in both)]
        ),
        "prompt-default-name": bert(edit(ST, prompts=both, default_prompt_name="query")),
        "prompt-passage-only": bert(
            edit(ST, prompts={"query": "baka: ", "passage": "lolo: "}),
            inputs=sides,
            oracle=(edit(ST, prompts=both),),
        ),
        "prompt-corpus-only": bert(
            edit(ST, prompts={"query": "baka: ", "corpus": "lolo: "}),
            inputs=sides,
            oracle=(edit(ST, prompts=both),),
        ),
        "prompt-s2p": bert(
            edit(ST, prompts={"s2p_query": "baka: "}), inputs=[{"prompt_name": "s2p_query"}]
        ),
        "prompt-unknown-default": bert(edit(ST, prompts=both, default_prompt_name="nope")),
        "prompt-null-value": bert(edit(ST, prompts={"query": None})),
        "st6-qwen3-prompts": case("qwen3", edit(ST, prompts=both), inputs=sides),
        "st6-hidden-state-1-clean": bert(hidden_state(1)),
        "length-modernbert-sbert-above-config": case(
            "modernbert", words(model_max_length=128), sbert(max_seq_length=256)
        ),
        "length-qwen3-sbert-above-config": case(
            "qwen3", words(model_max_length=512), sbert(max_seq_length=256)
        ),
        "length-bert-no-lengths-at-all": bert(words(model_max_length=...)),
        "x-decoder-no-pad-hf": case(
            "llama",
            words(pad_token=...),
            remove("special_tokens_map.json"),
            oracle=(words(pad_token="</s>"),),
        ),
        "x-roberta-no-lengths-hf": case(
            "roberta", words(model_max_length=...), oracle=(words(model_max_length=128),)
        ),
    }


TOKENIZERS = {
    **{f"tok-{name}": one for name, one in tokenizers().items()},
    **{f"author-{name}": one for name, one in llamas("LlamaTokenizerFast").items()},
    **prompts(),
}
