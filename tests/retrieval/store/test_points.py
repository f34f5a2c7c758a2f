import enum
import json
import math
import uuid
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from qdrant_client import models

from hybridtei.errors import InvalidPoint
from hybridtei.outputs import Embeddings
from hybridtei.retrieval.store.points import (
    MAX_MULTIVECTOR_FLOATS,
    batches,
    check_points,
    point_id,
    size_of,
    to_points,
    uuid_of,
)
from tests.retrieval.store.stores import ROW_WIDTH, WIDTH, embeddings, plan

ZEROS = [0.0] * WIDTH


def point(*, identity=1, payload=None, **vectors):
    """As users of qdrant-client make it."""
    return models.PointStruct.model_construct(id=identity, vector=vectors, payload=payload)


def sparse(indices, values):
    return models.SparseVector.model_construct(indices=indices, values=values)


def test_a_chunk_has_one_id_for_ever():
    assert point_id("a.txt", 3) == point_id("a.txt", 3) == "b363e2d5-58fb-5d82-9252-6fb64e3a6212"
    assert len({point_id("a", 1), point_id("a", 11), point_id("a1", 1), point_id("b", 1)}) == 4


def test_an_empty_sparse_vector_is_left_out():
    (kept,) = check_points([point(dense=ZEROS, sparse=sparse([], []))], plan())
    assert set(kept.vector) == {"dense"}


def test_counts_must_agree():
    with pytest.raises(ValueError, match="3 embeddings, 2 ids and 2 payloads"):
        to_points(embeddings(3), [1, 2])


BAD = [
    (point(identity=-1), "point -1: `id` should be between 0 and"),
    (point(identity=2**64), "`id` should be between"),
    (point(identity=True), "`id` is bool"),
    (point(identity="doc-7"), "neither an integer nor a UUID; `point_id`"),
    (
        models.PointStruct.model_construct(id=1, vector=[1.0], payload={}),
        "point 1: `vector` should map names",
    ),
    (point(other=[1.0]), "no vector `other`; it has `dense`, `multivector`, `sparse`"),
    (point(dense=[1.0, 2.0]), "`dense`: has 2 dimensions, the collection 16"),
    (point(dense=[ZEROS]), "`dense`: should be a list of numbers, has shape"),
    (point(dense=["a"] * WIDTH), "`dense`: should hold numbers"),
    (point(dense=[math.nan, *ZEROS[1:]]), "`dense`: number 0 is not finite"),
    (point(dense=[1e39, *ZEROS[1:]]), "not finite in float32"),
    (point(multivector=[]), "`multivector`: should be a list of vectors"),
    (point(multivector=np.zeros((0, ROW_WIDTH))), "`multivector`: is empty"),
    (point(multivector=[[1.0] * ROW_WIDTH, [1.0]]), "in rows of one width"),
    (point(multivector=[[1.0] * 7 + [math.nan]]), r"number \[0, 7\] is not finite"),
    (
        point(multivector=np.zeros((MAX_MULTIVECTOR_FLOATS // ROW_WIDTH, ROW_WIDTH))),
        "allowed are 131071 rows .fewer than 1048576",
    ),
    (point(sparse=[1.0, 2.0]), "`sparse`: should be a sparse vector"),
    (point(sparse=sparse([1, 2], [1.0])), "2 indices and 1 values"),
    (point(sparse=sparse([1, 1], [1.0, 2.0])), "index 1 is there 2 times"),
    (point(sparse=sparse([-1], [1.0])), "between 0 and 4294967295"),
    (point(sparse=sparse([2**70], [1.0])), "between 0 and 4294967295"),
    (point(sparse=sparse([1], [math.nan])), "`values`: number 0 is not finite"),
    (point(payload=[1]), "`payload` is list, should be an object"),
    (point(payload={1: 2}), "`payload` has the key 1"),
    (point(payload={"a": [1, {"b": math.nan}]}), r"`payload.a\[1\].b` is nan"),
    (point(payload={"a": {1, 2}}), "`payload.a` is builtins.set"),
    (point(payload={"a": 2**63}), "`payload.a` is 9223372036854775808"),
    (point(payload={"a": "\ud800"}), "not valid Unicode"),
]


@pytest.mark.parametrize(("bad", "message"), BAD)
def test_a_bad_point_is_named_with_its_field_and_limit(bad, message):
    with pytest.raises(InvalidPoint, match=message) as refused:
        check_points([point(identity=7, dense=ZEROS), bad], plan())
    assert str(refused.value).startswith(
        f"point {bad.id!r}" if isinstance(bad.id, str) else f"point {bad.id}"
    )


def test_a_payload_has_a_deepest_level():
    payload = {}
    for _ in range(200):
        payload = {"a": payload}
    with pytest.raises(InvalidPoint, match="deeper than 100"):
        check_points([point(payload=payload)], plan())


def test_what_is_good_is_kept():
    class Colour(enum.StrEnum):
        RED = "red"

    payload = MappingProxyType({"a": Colour.RED, "b": (1, np.float64(0.5)), "c": None, "d": True})
    identity = uuid.uuid4()
    most = np.zeros(((MAX_MULTIVECTOR_FLOATS - 1) // ROW_WIDTH, ROW_WIDTH), dtype=np.float32)
    (kept,) = check_points(
        [point(identity=str(identity).upper(), payload=payload, dense=ZEROS, multivector=most)],
        plan(),
    )
    assert kept.id == str(identity)
    assert kept.payload == {"a": "red", "b": [1, 0.5], "c": None, "d": True}
    assert [type(value) for value in (kept.payload["a"], kept.payload["b"][1])] == [str, float]
    assert kept.vector["multivector"].size == most.size
    check_points(
        [point(identity=0), point(identity=2**64 - 1, sparse=sparse([2**32 - 1, 0], [-1.0, 2.0]))],
        plan(),
    )


@given(
    st.lists(st.integers(-5, 2**32 + 5), max_size=6),
    st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), max_size=6),
)
def test_a_sparse_vector_passes_exactly_if_every_rule_holds(indices, values):
    holds = (
        len(indices) == len(values)
        and len(set(indices)) == len(indices)
        and all(0 <= index < 2**32 for index in indices)
        and all(math.isfinite(value) for value in values)
    )
    candidate = point(sparse=sparse(indices, values))
    if not holds:
        with pytest.raises(InvalidPoint, match="point 1, vector `sparse`"):
            check_points([candidate], plan())
        return
    (kept,) = check_points([candidate], plan())
    assert ("sparse" in kept.vector) == bool(indices)
    if indices:
        assert kept.vector["sparse"]["indices"].tolist() == indices
        assert kept.vector["sparse"]["values"].tolist() == values


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None)),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=3), JSON, max_size=3))
def test_a_payload_passes_exactly_if_it_is_json_of_64_bits(payload):
    if not is_json(payload):
        with pytest.raises(InvalidPoint, match="point 1: `payload"):
            check_points([point(payload=payload)], plan())
        return
    (kept,) = check_points([point(payload=payload)], plan())
    assert json.loads(json.dumps(kept.payload, allow_nan=False)) == payload


def is_json(payload):
    try:
        json.dumps(payload, allow_nan=False, ensure_ascii=False).encode()
    except ValueError:
        # Of which UnicodeEncodeError is one
        return False
    return all(-(2**63) <= number < 2**63 for number in integers(payload))


def integers(value):
    if isinstance(value, dict | list):
        items = value.values() if isinstance(value, dict) else value
        return [number for item in items for number in integers(item)]
    return [value] if type(value) is int else []


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 2000), st.integers(1, 7))
def test_batches_keep_order_and_budget(lengths, max_bytes, max_points):
    points = [
        point(identity=i, dense=[1.0] * length, payload={}) for i, length in enumerate(lengths)
    ]
    cut = list(batches(points, max_bytes, max_points))
    assert [made.id for batch in cut for made in batch] == list(range(len(lengths)))
    for batch in cut:
        assert 1 <= len(batch) <= max_points
        assert len(batch) == 1 or sum(size_of(made) for made in batch) <= max_bytes


def test_size_counts_numbers_and_payload():
    wide = Embeddings(dense=np.ones((1, 1024), dtype=np.float32))
    (bare,) = to_points(wide, [1])
    assert 4096 <= size_of(bare) <= 4300
    assert size_of(bare, bytes_per_number=20) - size_of(bare) == 16 * 1024
    (full,) = to_points(wide, [1], [{"text": "a" * 1000}])
    assert 1000 <= size_of(full) - size_of(bare) <= 1020


@given(st.uuids(), st.sampled_from(["{}", "{{{}}}", "urn:uuid:{}"]), st.booleans())
def test_a_uuid_in_any_form_is_one_id(identity, form, is_upper):
    text = form.format(str(identity).upper() if is_upper else identity.hex)
    assert uuid_of(text) == str(identity)
    assert uuid_of(text + "0") is uuid_of("paper") is None
