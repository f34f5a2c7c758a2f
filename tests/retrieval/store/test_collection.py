"""Schemas and plans of collections: made for a model, compared field by field, chosen once and
never changed by the way."""

import hashlib
from dataclasses import replace
from typing import get_args

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridtei.batch import Head, Positions
from hybridtei.errors import CollectionMismatch, InvalidInput, MissingArtifact
from hybridtei.models.checkpoint.heads import MultivectorHead, SparseHead
from hybridtei.models.checkpoint.kinds import Embedding
from hybridtei.models.checkpoint.spec import ModelSpec
from hybridtei.models.fingerprint import fingerprint
from hybridtei.retrieval.store.base import CollectionSchema
from hybridtei.retrieval.store.collection import (
    check_fits,
    check_name,
    check_searchable,
    schema_to_dict,
)
from hybridtei.retrieval.store.plan import (
    FINGERPRINT,
    PackedFormat,
    kept,
    layout_of,
    new_schema,
    packed_format,
    plan_of,
    schema_for,
    settled,
    spread,
)
from hybridtei.retrieval.store.query import CollectionPlan, Datatype, Quantization
from tests.retrieval.store.stores import asked, plan

# Multi-vectors as Qdrant's vectors
FLOATS = {"multivector_tokens": 0, "multivector_dtype": "float"}
TOKENIZER = b'{"model": {"type": "WordLevel", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]"}}'


@pytest.fixture
def spec(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(TOKENIZER)
    return ModelSpec(
        folder=tmp_path,
        model_type="bert",
        architectures=("BertModel",),
        hidden_size=32,
        vocab_size=100,
        max_input_length=64,
        positions=Positions(),
        kind=Embedding(
            pooling=("mean",),
            width=32,
            sparse=SparseHead("linear", idf=True),
            multivector=MultivectorHead(tmp_path, 24),
        ),
    )


def test_every_output_has_its_vector(spec):
    plan = schema_for(spec, "org/model", **FLOATS)
    assert {name: (params.size, params.distance) for name, params in plan.vectors.items()} == {
        "dense": (32, "Cosine"),
        "multivector": (24, "Cosine"),
    }
    multivector = plan.vectors["multivector"]
    assert multivector.multivector_config == {"comparator": "max_sim"}
    assert (multivector.hnsw_config, multivector.on_disk) == ({"m": 0, "payload_m": 0}, True)
    assert plan.vectors["dense"].hnsw_config is None
    assert plan.metadata == {
        "model_id": "org/model",
        "tokenizer_sha256": hashlib.sha256(TOKENIZER).hexdigest(),
        "model_fingerprint": fingerprint(spec)["model"],
    }


def test_idf_is_for_heads_that_profit(spec):
    def modifier(*, idf, **settings):
        kind = replace(spec.kind, sparse=SparseHead("linear", idf=idf))
        return schema_for(replace(spec, kind=kind), "m", **settings).sparse["sparse"].modifier

    assert modifier(idf=True) == "idf"
    assert modifier(idf=False) is None
    assert modifier(idf=False, sparse_idf=True) == "idf"
    assert modifier(idf=True, sparse_idf=False) is None


def test_only_wanted_heads_and_widths_are_kept(spec):
    plan = schema_for(spec, "m", heads=frozenset({Head.DENSE, Head.TOKENS}), dense_dim=16)
    assert (set(plan.vectors), set(plan.sparse)) == ({"dense"}, set())
    assert plan.vectors["dense"].size == 16
    assert schema_for(spec, "m", multivector_dim=8, **FLOATS).vectors["multivector"].size == 8
    with pytest.raises(
        InvalidInput, match="`dense_dim` is 33, should be between 1 and the model's 32"
    ):
        schema_for(spec, "m", dense_dim=33)
    with pytest.raises(InvalidInput, match="makes no vectors for a collection"):
        schema_for(spec, "m", heads=frozenset({Head.SCORES}))


def test_a_lone_multivector_is_indexed(spec):
    alone = schema_for(spec, "m", heads=frozenset({Head.MULTIVECTOR}))
    assert alone.vectors["multivector"].hnsw_config is None


def test_an_unknown_quantisation_is_named(spec):
    with pytest.raises(InvalidInput, match="`quantization` is 'int3'"):
        schema_for(spec, "m", quantization="int3")


def test_without_a_tokenizer_there_is_no_label(spec):
    (spec.folder / "tokenizer.json").unlink()
    with pytest.raises(MissingArtifact, match=r"tokenizer\.json"):
        schema_for(replace(spec), "m")


def test_every_difference_is_shown(spec):
    there, wanted = (
        schema_for(spec, "one"),
        schema_for(spec, "other", dense_dim=16, sparse_idf=False),
    )
    with pytest.raises(CollectionMismatch) as refused:
        check_fits(there, wanted, "docs")
    assert str(refused.value).splitlines() == [
        "collection 'docs' is laid out for something else:",
        "  vector dense, size: there 32, wanted 16",
        "  sparse vector sparse, modifier: there idf, wanted none",
        "  metadata model_id: there one, wanted other",
    ]


def test_a_model_of_other_files_is_refused_with_the_command_that_helps(spec):
    bare, wanted = new_schema(spec, "m", CollectionPlan(), None), schema_for(spec, "m")
    # Of a release that kept no fingerprint
    check_fits(bare, wanted)
    check_fits(wanted, bare)
    check_fits(wanted, wanted)
    old = replace(bare, metadata={**bare.metadata, FINGERPRINT: "old"})
    with pytest.raises(CollectionMismatch) as refused:
        check_fits(old, wanted, "docs")
    difference, command = str(refused.value).splitlines()[1:]
    assert (
        difference
        == f"  metadata model_fingerprint: there old, wanted {fingerprint(spec)['model']}"
    )
    assert "`hybridtei migrate docs`" in command
    # Whoever has not read the files compares nothing
    check_searchable(old, spec, "m", "docs")
    with pytest.raises(CollectionMismatch, match="hybridtei migrate docs"):
        check_searchable(old, spec, "m", "docs", fingerprint="new")


def test_what_is_missing_is_shown_and_more_is_welcome(spec):
    whole = schema_for(spec, "m", **FLOATS)
    part = schema_for(spec, "m", heads=frozenset({Head.DENSE}))
    check_fits(whole, part)
    with pytest.raises(
        CollectionMismatch, match="vector multivector, size: there nothing, wanted 24"
    ):
        check_fits(part, whole)


def test_tuning_is_no_difference(spec):
    tuned = schema_for(spec, "m", quantization="binary", on_disk=True, shards=6, replicas=2)
    assert tuned != schema_for(spec, "m")
    check_fits(tuned, schema_for(spec, "m"))


def test_an_unlabelled_collection_is_taken_only_on_demand(spec):
    wanted = schema_for(spec, "m")
    bare = replace(wanted, metadata={"made_by": "others"})
    with pytest.raises(CollectionMismatch, match="metadata model_id: there nothing, wanted m"):
        check_fits(bare, wanted)
    check_fits(bare, wanted, unlabelled=True)
    with pytest.raises(CollectionMismatch, match="model_id"):
        check_fits(schema_for(spec, "other"), wanted, unlabelled=True)


CONTROLS = ("a\nb", "a\x1b[2J", "a\x7f", "a\x85")


@pytest.mark.parametrize(
    "name",
    [*CONTROLS, "a/b", "", "a" * 201, "ä" * 101, "a:b", "a\0", "..", ".hidden", "a\\b", "\ud800<"],
)
def test_a_name_that_some_store_refuses(name):
    with pytest.raises(InvalidInput, match=r"name|dot"):
        check_name(name)


@pytest.mark.parametrize("kind", ["memory", "embedded"])
def test_a_name_that_all_take(kind, tmp_path):
    names = {"docs", "a-b_c.d", "ä ö", "a" * 200}
    with asked(kind, tmp_path) as given:
        for name in names:
            check_name(name)
            given.run(given.store.create(name, plan()))
        assert {*given.run(given.store.collections())} == names


ALL = frozenset({Head.DENSE, Head.SPARSE, Head.MULTIVECTOR})
PLANS = st.fixed_dictionaries(
    {},
    optional={
        "dense_dim": st.integers(1, 32),
        "multivector_dim": st.integers(1, 24),
        "multivector_tokens": st.integers(0, 64),
        "multivector_dtype": st.sampled_from(["float", "int8", "binary"]),
        "datatype": st.sampled_from(get_args(Datatype)),
        "quantization": st.sampled_from(get_args(Quantization)),
        "on_disk": st.booleans(),
        "on_disk_payload": st.booleans(),
        "shards": st.integers(1, 3),
        "replicas": st.integers(1, 3),
        "index": st.just(("page:integer",)),
    },
)
HEADS = st.sets(st.sampled_from([Head.DENSE, Head.SPARSE, Head.MULTIVECTOR]), min_size=1)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(PLANS, HEADS.map(frozenset))
def test_a_plan_is_read_off_the_collection_that_it_made(spec, chosen, heads):
    def make():
        plan = settled(CollectionPlan(**chosen), heads, 24)
        return schema_for(spec, "org/model", plan, heads=heads)

    numbers, width = chosen.get("multivector_dtype", "float"), chosen.get("multivector_dim", 24)
    is_alone = heads == {Head.MULTIVECTOR}
    if (is_alone and numbers != "float") or (
        Head.MULTIVECTOR in heads and numbers == "binary" and width % 8
    ):
        with pytest.raises(InvalidInput, match="multivector_d"):
            make()
        return
    schema = make()
    made = msgspec.convert(schema_to_dict(schema), CollectionSchema)
    there = plan_of(made)
    told = {"shards", "replicas", "on_disk_payload", "index"}
    if Head.DENSE in heads:
        told |= {"dense_dim", "datatype", "quantization", "on_disk"}
    if Head.MULTIVECTOR in heads:
        told |= {"multivector_dim", "multivector_tokens", "multivector_dtype"}
    for name in told & chosen.keys():
        assert (getattr(there, name) or None) == (chosen[name] or None)
    kept_fields = {name: one for name, one in chosen.items() if name in told}
    assert kept(CollectionPlan(**kept_fields), made, "c") == there
    assert all(
        one.quantization_config is None for name, one in made.vectors.items() if name != "dense"
    )
    check_fits(made, layout_of(spec, "org/model", there, heads, is_there=True), "c")


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("dense_dim", 8),
        ("multivector_dim", 8),
        ("multivector_tokens", 7),
        ("multivector_dtype", "int8"),
        ("datatype", "float16"),
        ("quantization", "scalar"),
        ("on_disk", True),
        ("on_disk_payload", True),
        ("shards", 2),
        ("replicas", 2),
    ],
)
def test_another_plan_is_refused_by_the_names_of_its_fields(spec, field, other):
    made = schema_for(spec, "org/model")
    with pytest.raises(CollectionMismatch, match=rf"  {field}: there \w+, asked for {other}$"):
        kept(CollectionPlan(**{field: other}), made, "c")


def test_by_default_multivectors_are_bits_in_the_payload(spec):
    made = schema_for(spec, "org/model")
    assert set(made.vectors) == {"dense"}
    assert packed_format(made) == PackedFormat("binary", 24)
    odd = schema_for(spec, "org/model", multivector_dim=12)
    assert packed_format(odd) == PackedFormat("int8", 12)
    alone = settled(CollectionPlan(), frozenset({Head.MULTIVECTOR}))
    assert alone.multivector_dtype == "float"
    with pytest.raises(InvalidInput, match="only vectors"):
        settled(CollectionPlan(multivector_dtype="int8"), frozenset({Head.MULTIVECTOR}))


def test_a_change_is_refused_with_the_difference(spec):
    made = schema_for(spec, "org/model")
    chosen = CollectionPlan(multivector_tokens=32, dense_dim=8, quantization="scalar", on_disk=True)
    with pytest.raises(CollectionMismatch) as error:
        kept(chosen, made, "c")
    lines = str(error.value).splitlines()
    assert "hybridtei migrate c" in lines[0]
    assert lines[1:] == [
        "  dense_dim: there 32, asked for 8",
        "  multivector_tokens: there 64, asked for 32",
        "  quantization: there nothing, asked for scalar",
        "  on_disk: there nothing, asked for True",
    ]


def test_a_cluster_gets_copies_unless_flags_say_otherwise():
    assert spread(CollectionPlan(), 1) == CollectionPlan()
    assert spread(CollectionPlan(), 3) == CollectionPlan(shards=3, replicas=2)
    assert spread(CollectionPlan(shards=6, replicas=1), 3) == CollectionPlan(shards=6, replicas=1)
