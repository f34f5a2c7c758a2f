"""Keys of config.json that a family does not read: transformers' class declares them, or ignores
them."""

import sys
from dataclasses import replace

import pytest
import transformers

from conformance.families import declared
from conformance.families.oracle import ENGINES
from conformance.small import tiny
from hybridtei.errors import LoadError
from hybridtei.inference.backends.graph.ops import family_graph
from hybridtei.models.checkpoint.spec import read_spec
from hybridtei.models.families import SERVED
from hybridtei.models.families.settings import IRRELEVANT, declared_keys
from tests.models.families.test_families import equals_transformers
from tests.ran import ran
from tests.sampled import paired

# In transformers
WITHOUT_CLASS = {"jina_bert", "lfm2_bidirectional", "xlm-roberta-flash"}
# Keys of the hub's checkpoints that no class reads.
NOTES = {
    "_num_labels": 5,
    "adapters": {"adapters": {}, "config_map": {}, "fusion_config_map": {}, "fusions": {}},
    "directionality": "bidi",
    "language": "en",
    "max_seq_length": 128,
    "model_name": "unsloth/x",
    "my_training_note": "x",
    "num_beams": 1,
    "output_past": True,
    "qk_layernorm": True,
    "unsloth_version": "2026.1",
    "wandb": {"run": 1},
}


@pytest.mark.parametrize(
    ("family", "engine"), paired(["bert", "llama", "modernbert", "distilbert"], ENGINES)
)
def test_what_transformers_ignores_is_ignored_and_named(tmp_path, caplog, family, engine):
    folder = tiny.configured(tiny.write_family(tmp_path, family), **NOTES)
    equals_transformers(folder, engine)
    (line,) = {
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("hybridtei.models.families")
    }
    assert line.startswith(f"{folder}/config.json: ignored")
    assert all(f"`{key}`" in line for key in NOTES)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("modernbert", "position_embedding_type", "sans_pos"),
        ("bert", "head_dim", 8),
        ("distilbert", "rope_theta", 5.0),
    ],
)
def test_a_key_that_only_other_classes_declare_is_ignored(tmp_path, family, key, value):
    folder = tiny.configured(tiny.write_family(tmp_path, family), **{key: value})
    equals_transformers(folder, "ort")


def test_a_checkpoint_as_transformers_writes_it_is_no_reason_to_warn(tmp_path, caplog):
    for family in tiny.FAMILIES:
        family_graph(tiny.family_spec(tmp_path / family, family))
    assert not [
        record for record in caplog.records if record.name.startswith("hybridtei.models.families")
    ]


@pytest.mark.parametrize("implementation", ["_attn_implementation", "attn_implementation"])
def test_the_implementation_of_attention_is_ours(tmp_path, implementation):
    folder = tiny.configured(tiny.write_family(tmp_path, "bert"), **{implementation: "eager"})
    family_graph(read_spec(folder, pooling="mean"))


# Read, and of no effect here: rotary positions have no table, `rope_parameters` has another base,
# and whole heads are rotated.
ROTARY = {"max_position_embeddings", "partial_rotary_factor", "rope_theta"}
# Lists in a text, of which parts are looked for
PASSED = {"deberta-v2": {"norm_rel_ebd", "pos_att_type"}}


@pytest.mark.parametrize("family", sorted({*SERVED} - WITHOUT_CLASS))
def test_a_declared_key_is_read_or_known_or_refused(tmp_path, family):
    """With a value that no key can have."""
    spec = tiny.family_spec(tmp_path, family)
    keys = declared_keys(family)
    passed = {
        key for key in keys - IRRELEVANT if "dropout" not in key and not _is_refused(spec, key)
    }
    assert passed <= PASSED.get(family, ROTARY)


def _is_refused(spec, key):
    try:
        family_graph(replace(spec, config={**spec.config, key: "what no key can be"}))
    except LoadError:
        return True
    return False


def test_no_class_no_keys():
    assert {family for family in SERVED if declared_keys(family) is None} == WITHOUT_CLASS


def test_the_list_is_that_of_transformers():
    if transformers.__version__ != declared.VERSION:
        pytest.skip(f"the list is of transformers {declared.VERSION}")
    # In a process of its own: `ast.parse` of Python 3.11 can fail beside another thread
    ran([sys.executable, "-m", "conformance.families.declared", "--check"], check=True)
