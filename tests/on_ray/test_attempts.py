"""A text that ends the process of whoever embeds it: it alone is left out. Deaths are exceptions here; no Ray is needed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from hybridtei.errors import BackendError
from hybridtei.on_ray.blocks import FATAL, MAX_TRIES, Attempts, embed_block
from hybridtei.outputs import Embeddings


class Death(BaseException):
    """Of a process."""


def engine(*fatal: str, bad: str = "bad"):
    def embed(texts: Sequence[str]) -> Embeddings:
        if set(texts) & set(fatal):
            raise Death
        if bad in texts:
            raise BackendError("the pass failed")
        return Embeddings(dense=np.array([[len(text)] for text in texts], dtype=np.float32))

    return embed


def until_ended(attempts: Attempts, embed, texts: Sequence[str]):
    """What a block becomes, given to one engine after the other, and how many died of it."""
    for deaths in range(MAX_TRIES):
        try:
            return *embed_block(attempts, (0, 3), embed, texts), deaths
        except Death:
            continue
    raise AssertionError("it kills them all")


def test_one_fatal_text_is_left_out_and_its_neighbours_are_embedded():
    found, reasons, deaths = until_ended(Attempts(), engine("dd"), ["a", "bad", "ccc", "dd", "eeee"])
    assert found.dense.tolist() == [[1], [3], [4]]
    assert reasons == [None, "the pass failed", None, FATAL, None]
    assert deaths == 3


def test_a_death_of_another_cause_costs_nothing():
    attempts = Attempts()
    assert attempts.begin((0, 3)) == (1, [])
    found, reasons, deaths = until_ended(attempts, engine(), ["a", "bb"])
    assert (found.dense.tolist(), reasons, deaths) == ([[1], [2]], [None, None], 0)
    assert attempts.begin((0, 3)) == (1, []), "it was forgotten at its end"


def test_a_block_of_nothing_else_ends_too():
    texts = [f"{i}" for i in range(50)]
    found, reasons, deaths = until_ended(Attempts(), engine(*texts), texts)
    assert (found.dense, deaths) == (None, MAX_TRIES - 1)
    assert all(FATAL in reason for reason in reasons)


def test_an_engine_that_fails_at_everything_is_not_the_texts_fault():
    with pytest.raises(BackendError):
        embed_block(Attempts(), (0, 0), engine(bad="a"), ["a", "a"])
