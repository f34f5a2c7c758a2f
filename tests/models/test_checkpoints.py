"""Checkpoints of `conformance.checkpoints`: served as their oracle computes them, or refused by
every engine with the cure."""

import pytest

from conformance.checkpoints import judge
from conformance.checkpoints.__main__ import BACKENDS, CASES, run
from tests.sampled import sampled

QUICK = (
    "fam-bert",
    "cls3-modernbert-biases",
    "h-multi-label",
    "late-pylate",
    "late-stanford-attend",
    "pool-mean",
    "pool-dense-Tanh",
    "prompt-named",
    "splade-plain-distilbert",
    "tag-bert",
    "tok-sbert-8",
    "w-bin",
)
RIGHT = (
    *QUICK,
    "cfg-bert-arch-seqcls-with-modules",
    "cfg-bert-arch-tokencls-with-modules",
    "cfg-modernbert-local-null",
    "cfg-modernbert-old-config-thetas",
    "cfg-mpnet-pad-0",
    "cfg-qwen2-window-old",
    "cfg-qwen2-window-old-none",
    "cfg-qwen3-window-old",
    "cfg-rope-gemma-old",
    "cfg-rope-partial-llama",
    "cfg-rope-partial-llama-top",
    "cfg-ropeold-llama-linear-type",
    "cfg-ropeold-qwen3-default-type",
    "ce-bert",
    "ce-modernbert",
    "ce-modernbert-mean",
    "ce-eurobert-bos",
    "ce-eurobert-mean",
    "cls3-eurobert-late",
    "cls3-gte",
    "h-ce-no-type-ids",
    "h-ce-prefix-none",
    "h-ce-sbert-config",
    "h-id2label-int-labels",
    "h-regression-3",
    "late-pylate-attend",
    "late-pylate-noexpansion",
    "late-pylate-nomarker-words",
    "late-pylate-skiplist-empty",
    "late-stanford-noartifact",
    "pool-cls",
    "pool-dense-GELUActivation",
    "pool-dense-GELUActivation-trusted",
    "pool-dropout-around",
    "pool-mean+max",
    "pool-new-names",
    "pool-normalize-twice",
    "pool-raw-dense-two",
    "static-model2vec-no-modules",
    "tok-byte-order-mark",
    "tok-sbert-lower-roberta",
    "w-bf16",
    "w-fp16",
)
REFUSED = (
    "w-consolidated",
    "w-lora-beside-base",
    "w-lora-only",
    "w-none",
    "w-only-flax",
    "w-only-gguf",
    "w-only-tf",
    "w-quant-awq",
    "w-quant-bert-bnb",
    "w-quant-bitsandbytes",
    "w-quant-compressed",
    "w-quant-fp8",
    "w-quant-gptq",
    "w-quant-hqq",
    "w-quant-torchao",
    "w-variant-fp16-name",
)


def verdicts(name, folder, *engines):
    return [row["verdict"] for row in run(name, CASES[name], folder, engines)]


@pytest.mark.parametrize("name", sampled(RIGHT, QUICK))
def test_a_checkpoint_is_served_as_its_oracle_computes_it(tmp_path, name):
    assert verdicts(name, tmp_path, "ort") == [judge.RIGHT]


@pytest.mark.parametrize("name", REFUSED)
def test_a_checkpoint_that_no_engine_serves_is_refused_with_the_cure(tmp_path, name):
    assert verdicts(name, tmp_path, *BACKENDS) == [judge.CLEAR] * len(BACKENDS)
