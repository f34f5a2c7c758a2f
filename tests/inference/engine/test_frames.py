"""What is sent between processes comes out as it went in, and nothing else can be sent."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hybridtei.batch import Head, Ragged, offsets_of
from hybridtei.config import EngineConfig, ServerConfig
from hybridtei.inference.load import find_model
from hybridtei.outputs import Columns, HeadOutputs, SparseVectors, Timings
from hybridtei.system.frames import PREFIX, decode, encode
from tests.inference.engine import small

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner) | st.frozensets(st.integers(0, 2**63))
    ),
    max_leaves=20,
)


def there_and_back(value):
    frame = b"".join(encode(value))
    assert PREFIX.unpack_from(frame)[0] == len(frame)
    return decode(frame)


@given(values)
def test_plain_values(value):
    assert there_and_back(value) == value


@given(st.lists(arrays.arrays(st.sampled_from(["<f4", "<i8", "|b1", "|u1"]), arrays.array_shapes(min_dims=1, min_side=0))))
def test_arrays(several):
    for one, back in zip(several, there_and_back(several), strict=True):
        assert (one.dtype, one.shape, one.tobytes()) == (back.dtype, back.shape, back.tobytes())
        assert back.flags.aligned


def test_descriptions_settings_and_names(hybrid):
    from hybridtei.config import ModelConfig

    for value in (find_model(ModelConfig(model_id=str(hybrid))), small.model_spec(), EngineConfig(), Timings(1, 2, 3)):
        assert there_and_back(value) == value
    server = ServerConfig(cors_allow_origin=("a", "b"))
    assert there_and_back([Path("a/b"), Head.DENSE, {"s": server}]) == [Path("a/b"), Head.DENSE, {"s": server}]


@pytest.mark.parametrize("value", [object(), Ellipsis, {1, 2}, b"bytes", np.float32(1)])
def test_nothing_else_travels(value):
    with pytest.raises(TypeError, match="cannot be sent"):
        encode([value])


@pytest.mark.parametrize("name", ["os:system", "hybridtei.cli:main", "hybridtei.cli:subprocess.run", "pathlib:Path"])
def test_a_frame_makes_only_our_data(name):
    head = msgspec.msgpack.encode(["record", name])
    frame = PREFIX.pack(PREFIX.size + len(head), len(head)) + head
    with pytest.raises((TypeError, AttributeError)):
        decode(frame)


def every_column() -> HeadOutputs:
    rows = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    made = {"Floats": rows[:2], "Ragged": Ragged(rows, offsets_of([2, 3])), "SparseVectors": SparseVectors.from_dense(rows[:2])}
    return HeadOutputs(**{field.name: made[str(field.type).split(" ")[0]] for field in fields(HeadOutputs)})


def test_outputs_of_every_head():
    outputs = every_column()
    assert all(getattr(outputs, field.name) is not None for field in fields(outputs))
    back = there_and_back(outputs)
    assert same_columns(outputs, back)
    assert there_and_back(HeadOutputs()).nbytes == 0


def same_columns(one: Columns, other: Columns) -> bool:
    """Equal to the last bit."""

    def flat(column):
        return [column] if isinstance(column, np.ndarray) else [getattr(column, field.name) for field in fields(column)]

    for field in fields(one):
        mine, yours = getattr(one, field.name), getattr(other, field.name)
        if (mine is None) != (yours is None):
            return False
        if mine is not None and not all(np.array_equal(a, b) for a, b in zip(flat(mine), flat(yours), strict=True)):
            return False
    return True
