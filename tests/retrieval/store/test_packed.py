"""Multi-vectors as bytes of the payload: what a point and a collection say of them; `search/test_maxsim.py` ranks by them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hybridtei.batch import Ragged
from hybridtei.errors import InvalidPoint
from hybridtei.inference.tasks.pooling import MultivectorBudget, budgeted
from hybridtei.outputs import Embeddings
from hybridtei.retrieval.store.base import CollectionSchema, Stored
from hybridtei.retrieval.store.collection import heads_of
from hybridtei.retrieval.store.plan import DTYPE, PACKED, WIDTH, packed_format, without_packed
from hybridtei.retrieval.store.points import check_points, fit_to_schema, point_id, to_points
from tests.retrieval.store.stores import ROW_WIDTH, embeddings, plan

COUNT = 30
IDS = [point_id("a", i) if i % 3 else i for i in range(COUNT)]


def schema(dtype: str) -> CollectionSchema:
    whole = plan()
    vectors = {name: params for name, params in whole.vectors.items() if name != "multivector"}
    return CollectionSchema(vectors, whole.sparse, {DTYPE: dtype, WIDTH: ROW_WIDTH})


def packed(dtype: str) -> Embeddings:
    full = embeddings(COUNT)
    assert full.multivector is not None
    return Embeddings(full.dense, full.sparse, budgeted(full.multivector, MultivectorBudget(dtype=dtype)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("A" * 1_400_000, "allowed are 131071 rows"),
        ("not base64", "bytes in base64"),
        (["AA=="], "is list"),
        ("AAAA", None),
    ],
)
def test_bytes_of_a_point_have_a_bound(value: Any, message: str | None) -> None:
    point = Stored(1, {PACKED: value}, {})
    if message is None:
        assert check_points([point], schema("binary"))
    else:
        with pytest.raises(InvalidPoint, match=rf"payload\.{PACKED}.*{message}"):
            check_points([point], schema("binary"))
    assert check_points([point], plan())[0].payload == {PACKED: value}  # somebody's own key


def test_a_key_of_that_name_is_refused() -> None:
    with pytest.raises(InvalidPoint, match=f"payload.{PACKED}.*rename"):
        to_points(packed("binary"), IDS, [{PACKED: "mine"}] * COUNT)


def test_of_a_collection_its_outputs_and_widths() -> None:
    kept = schema("binary")
    assert heads_of(kept) == {"dense", "sparse", "multivector"}
    assert packed_format(plan()) is None
    assert packed_format(plan(**{WIDTH: 8})) is None  # metadata of somebody else
    assert without_packed({"text": "a", PACKED: "AA=="}) == {"text": "a"}
    wide = Embeddings(multivector=Ragged(np.zeros((3, 4), np.uint8), np.array([0, 3])))
    fitted = fit_to_schema(wide, kept).multivector
    assert fitted is not None
    assert fitted.values.shape == (3, ROW_WIDTH // 8)
