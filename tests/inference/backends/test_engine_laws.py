"""Every engine in every precision against transformers in float32, a text at a time: a table of
what attention can be asked.

A cell is a kind of model (causal, window, bias, adapters and their combinations) and a kind of
batch (one text, a ragged one, one token, 1,500 tokens, tokens that no other attends to, a shared
prefix). Tolerances: `TOLERANCES` of conformance/families/oracle.py, by precision.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
import transformers

from conformance.families.oracle import (
    ENGINES_OF,
    TOLERANCES,
    max_difference,
    open_engine,
    unit_means,
)
from conformance.small import published, tiny, tolerances
from hybridtei.batch import Encoding, Head, pack
from hybridtei.models.checkpoint.spec import read_spec
from tests import jina
from tests.precisions import runs_here

LONG = 1500
POSITIONS = 2048
COMBINATIONS = [
    pytest.param(engine, dtype, id=f"{engine}-{dtype}")
    for dtype, engines in ENGINES_OF.items()
    for engine in engines
    if runs_here(engine, dtype)
]


def family(name, **settings):
    """A writer of a tiny checkpoint that takes long texts."""

    def write(folder):
        tiny.write_family(folder, name, max_position_embeddings=POSITIONS, **settings)
        return long(folder)

    return write


def long(folder):
    """The checkpoint, with a tokenizer that does not cut before its positions end."""
    tiny.edit_json(folder / "tokenizer_config.json", model_max_length=POSITIONS - 2)
    return folder


def alibi(folder):
    return long(published.write_jina(folder, max_position_embeddings=POSITIONS))


def t5(folder):
    return long(tiny.write_family(folder, "t5"))


def adapters(folder):
    """Jina embeddings v3, whose texts choose an adapter of low rank, here in turns."""
    jina.write(folder)
    tiny.configured(folder, max_position_embeddings=POSITIONS)
    tiny.edit_json(folder / "sentence_bert_config.json", max_seq_length=POSITIONS - 2)
    return long(folder)


# Kinds of models: plain, causal, with a window, both, with a bias by distance in a table, by
# products, and by a slope.
MODELS = {
    "plain": family("bert"),
    "rotary": family("nomic_bert"),
    "causal": family("qwen2"),
    "window": family("modernbert"),
    "causal window": family("mistral"),
    "two rotations": family("gemma3_text"),
    "bias": family("mpnet"),
    "unscaled bias": t5,
    "products of distances": family("deberta-v2"),
    "slopes": alibi,
    "adapters": adapters,
}
CAUSAL = ("causal", "causal window", "two rotations")
# transformers has no attention for these that gives zero to a token without keys, and none has a
# window.
EAGER = ("bias", "unscaled bias", "products of distances")


@dataclass(frozen=True)
class Batch:
    """Lengths of texts, of their ends that no token attends to, and of the prefix that all
    share."""

    lengths: Sequence[int]
    unseen: Sequence[int] = ()
    prefix: int = 0


BATCHES = {
    "one text": Batch([37]),
    "one token": Batch([1]),
    "ragged": Batch([3, 100, 1, 17, 64, 40]),
    "1,500 tokens among others": Batch([9, LONG, 130]),
    "unseen": Batch([32], [24]),
    # Further from the last key than the window: no key at all.
    "unseen beyond the window": Batch([64, 70, 33], [40, 0, 20]),
    "prefix": Batch([50, 41, 90], prefix=40),
    "long prefix": Batch([1400, 1310, 1350], prefix=1300),
}
# Not in transformers, or with another meaning there: torch in float32 is the oracle, a text at a
# time. tests/models/families
# holds that to a formula. DeBERTa's mask in transformers also hides keys from masked queries.
OWN = {(model, batch) for model in ("slopes", "adapters") for batch in BATCHES} | {
    ("products of distances", batch) for batch in BATCHES if "unseen" in batch
}
LAWS = [
    pytest.param(model, batch, id=f"{model}-{batch}")
    for model in MODELS
    for batch in BATCHES
    if "prefix" not in batch or model in CAUSAL
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint of a kind, written once."""

    @cache
    def made(name):
        return read_spec(MODELS[name](tmp_path_factory.mktemp("laws") / "model"), pooling="mean")

    return made


@pytest.fixture(scope="module")
def oracle(checkpoint):
    """Hidden states float32[t, h], computed a text at a time."""

    @cache
    def states(model, batch):
        texts = texts_of(checkpoint(model), BATCHES[batch])
        if (model, batch) in OWN:
            backend = opened(checkpoint(model), "torch", "float32")
            return np.concatenate([hidden(backend, [replace(text, shared=0)]) for text in texts])
        return by_transformers(checkpoint(model).folder, texts, is_eager=model in EAGER)

    return states


def by_transformers(folder, texts, *, is_eager):
    model = transformers.AutoModel.from_pretrained(
        folder, attn_implementation="eager" if is_eager else "sdpa", dtype=torch.float32
    ).eval()
    model = model.get_encoder() if model.config.is_encoder_decoder else model
    states = []
    for text in texts:
        ids = torch.tensor(text.input_ids)[None]
        mask = torch.ones_like(ids)
        mask[:, len(text) - text.unseen :] = 0
        with torch.no_grad():
            attention = {"attention_mask": mask} if text.unseen else {}
            positions = {} if is_eager else {"position_ids": torch.arange(len(text))[None]}
            found = model(input_ids=ids, **attention, **positions).last_hidden_state[0]
        states.append(found.numpy())
    return np.concatenate(states)


def texts_of(spec, batch):
    draw = np.random.default_rng(0)
    lowest = max(spec.positions.offset, 3)
    shared = draw.integers(lowest, spec.vocab_size, batch.prefix)
    unseen = batch.unseen or [0] * len(batch.lengths)
    choices = 1 if spec.adapters is None else 1 + len(spec.adapters.names)
    return [
        Encoding(
            np.concatenate([shared, draw.integers(lowest, spec.vocab_size, size - batch.prefix)]),
            unseen=hidden_tokens,
            shared=batch.prefix,
            adapter=number % choices,
        )
        for number, (size, hidden_tokens) in enumerate(zip(batch.lengths, unseen, strict=True))
    ]


def opened(spec, engine, dtype):
    return open_engine(engine, spec, dtype)


def hidden(backend, texts, prefix=0):
    heads = frozenset({Head.TOKENS})
    tokens = backend.forward(pack(texts, heads, backend.spec.positions, prefix)).tokens
    return tokens.values


@pytest.fixture(scope="module")
def backend(
    checkpoint,
):
    """An open backend; opening takes longer than a pass."""
    yield (opening := cache(lambda model, *how: opened(checkpoint(model), *how)))
    opening.cache_clear()


@pytest.mark.parametrize(("engine", "dtype"), COMBINATIONS)
@pytest.mark.parametrize(("model", "batch"), LAWS)
def test_states_are_transformers(backend, oracle, checkpoint, model, batch, engine, dtype):
    texts = texts_of(checkpoint(model), BATCHES[batch])
    expected = oracle(model, batch)
    found = hidden(backend(model, engine, dtype), texts, BATCHES[batch].prefix)
    tolerance = TOLERANCES[dtype]
    looser = tolerances.UNSCALED if model == "unscaled bias" else 1
    assert np.isfinite(found).all()
    apart = max_difference([found], expected) / float(np.abs(expected).max())
    assert apart <= looser * tolerance.hidden
    apart = max_difference([unit_means(found, texts)], unit_means(expected, texts))
    assert apart <= looser * tolerance.vectors
