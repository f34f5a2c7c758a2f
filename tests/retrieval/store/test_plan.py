"""A collection's plan: chosen once, read off the collection afterwards, and never changed by the way."""

from __future__ import annotations

from typing import Any

import pytest

from hybridtei.batch import Head
from hybridtei.errors import CollectionMismatch, InvalidInput
from hybridtei.retrieval.store.collection import check_fits, schema_from_dict, schema_to_dict
from hybridtei.retrieval.store.plan import PackedFormat, packed_format, plan_of, schema_for, settled, spread
from hybridtei.retrieval.store.query import CollectionPlan
from tests.retrieval.store.test_collection import spec  # noqa: F401

ALL = frozenset({Head.DENSE, Head.SPARSE, Head.MULTIVECTOR})
PLANS: list[dict[str, Any]] = [
    {},
    {"multivector_tokens": 32, "multivector_dtype": "int8", "multivector_dim": 16},
    {"multivector_tokens": 0, "multivector_dtype": "float", "datatype": "float16", "dense_dim": 8},
    {"quantization": "scalar", "on_disk": True, "on_disk_payload": True},
    {"quantization": "binary-2bit", "shards": 3, "replicas": 2},
]


@pytest.mark.parametrize("chosen", PLANS)
def test_a_plan_is_read_off_the_collection_that_it_made(spec: Any, chosen: dict[str, Any]) -> None:  # noqa: F811
    plan = settled(CollectionPlan(**chosen), None, ALL, "c")
    made = schema_from_dict(schema_to_dict(schema_for(spec, "org/model", plan)))
    there = plan_of(made)
    assert {name: getattr(there, name) for name in chosen if chosen[name]} == {name: one for name, one in chosen.items() if one}
    kept = settled(CollectionPlan(**chosen), made, ALL, "c")
    assert kept == there
    check_fits(made, schema_for(spec, "org/model", kept, is_there=True), "c")


def test_by_default_multivectors_are_bits_in_the_payload(spec: Any) -> None:  # noqa: F811
    made = schema_for(spec, "org/model", settled(CollectionPlan(), None, ALL, "c"))
    assert set(made.vectors) == {"dense"}
    assert packed_format(made) == PackedFormat("binary", 24)
    odd = schema_for(spec, "org/model", settled(CollectionPlan(multivector_dim=12), None, ALL, "c", width=24))
    assert packed_format(odd) == PackedFormat("int8", 12)
    alone = settled(CollectionPlan(), None, frozenset({Head.MULTIVECTOR}), "c")
    assert alone.multivector_dtype == "float"
    with pytest.raises(InvalidInput, match="only vectors"):
        settled(CollectionPlan(multivector_dtype="int8"), None, frozenset({Head.MULTIVECTOR}), "c")


def test_a_change_is_refused_with_the_difference(spec: Any) -> None:  # noqa: F811
    made = schema_for(spec, "org/model", settled(CollectionPlan(), None, ALL, "c"))
    chosen = CollectionPlan(multivector_tokens=32, dense_dim=8, quantization="scalar", on_disk=True)
    with pytest.raises(CollectionMismatch) as error:
        settled(chosen, made, ALL, "c")
    lines = str(error.value).splitlines()
    assert "hybridtei migrate c" in lines[0]
    assert lines[1:] == [
        "  dense_dim: there 32, asked for 8",
        "  multivector_tokens: there 64, asked for 32",
        "  quantization: there nothing, asked for scalar",
        "  on_disk: there nothing, asked for True",
    ]


def test_a_collection_of_a_wider_model_is_not_taken_for_ours(spec: Any) -> None:  # noqa: F811
    made = schema_for(spec, "org/model", settled(CollectionPlan(), None, ALL, "c"))
    fields = schema_to_dict(made)
    fields["vectors"]["dense"]["size"] = 64
    wider = schema_from_dict(fields)
    with pytest.raises(CollectionMismatch, match="size: there 64, wanted 32"):
        check_fits(wider, schema_for(spec, "org/model", settled(CollectionPlan(), wider, ALL, "c"), is_there=True), "c")


def test_a_cluster_gets_copies_unless_flags_say_otherwise() -> None:
    assert spread(CollectionPlan(), 1) == CollectionPlan()
    assert spread(CollectionPlan(), 3) == CollectionPlan(shards=3, replicas=2)
    assert spread(CollectionPlan(shards=6, replicas=1), 3) == CollectionPlan(shards=6, replicas=1)
