"""The checked-in descriptor set is protoc's of `tei.proto`; bytes written from arrays are what
protobuf reads."""

from importlib.resources import as_file, files

import numpy as np
import pytest
from google.protobuf import descriptor_pb2
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hybridtei.server.grpc.answers import METHODS
from hybridtei.server.grpc.messages import Metadata, float_rows, floats, message, services
from hybridtei.system.frames import nested

FLOATS = st.floats(width=32, allow_nan=False)
EmbedResponse = message("EmbedResponse")


def test_the_checked_in_set_is_protocs(tmp_path):
    protoc = pytest.importorskip("grpc_tools.protoc", reason="grpcio-tools is not installed")
    made = tmp_path / "made"
    with as_file(files("hybridtei.server.grpc")) as folder:
        assert (
            protoc.main(["protoc", f"-I{folder}", f"--descriptor_set_out={made}", "tei.proto"]) == 0
        )
        kept = (folder / "tei.binpb").read_bytes()
    kind = descriptor_pb2.FileDescriptorSet
    assert kind.FromString(kept) == kind.FromString(made.read_bytes())


def test_bytes_are_those_of_the_specification():
    request = message("EmbedRequest")
    assert request(inputs="a").SerializeToString() == b"\x0a\x01a"
    # Told, though it is the default
    assert request(inputs="a", normalize=False).SerializeToString() == b"\x0a\x01a\x18\x00"
    assert request(truncate=False, truncation_direction=1).SerializeToString() == b"\x20\x01"
    assert request(prompt_name="", dimensions=8).SerializeToString() == b"\x2a\x00\x30\x08"
    # Packed
    assert EmbedResponse(embeddings=[1.0]).SerializeToString() == b"\x0a\x04\x00\x00\x80\x3f"
    assert (
        message("Rank")(index=3, text="", score=0.5).SerializeToString()
        == b"\x08\x03\x12\x00\x1d\x00\x00\x00\x3f"
    )


def test_every_method_is_answered():
    for service in services():
        for method in service.methods:
            assert method.name.removesuffix("Stream") in METHODS
            assert method.server_streaming == (
                method.name.endswith("Stream") and method.name != "RerankStream"
            )
            assert method.client_streaming == method.name.endswith("Stream")


@given(arrays.arrays(np.float32, st.integers(0, 300), elements=FLOATS))
def test_floats(row):
    read = EmbedResponse.FromString(
        floats(1, row) + nested(2, Metadata(compute_chars=7).SerializeToString())
    )
    assert np.array_equal(np.array(read.embeddings, dtype=np.float32), row)
    assert read.metadata.compute_chars == 7


@given(arrays.arrays(np.float32, st.tuples(st.integers(0, 5), st.integers(1, 80)), elements=FLOATS))
def test_rows_of_floats(rows):
    read = message("EmbedAllResponse").FromString(float_rows(1, 1, rows)).token_embeddings
    assert len(read) == len(rows)
    assert all(
        np.array_equal(np.array(one.embeddings, dtype=np.float32), row)
        for one, row in zip(read, rows, strict=True)
    )


def test_rows_with_gaps_in_memory():
    rows = np.arange(24, dtype=np.float32).reshape(4, 6)[::2, ::3]
    read = message("EmbedAllResponse").FromString(float_rows(1, 1, rows)).token_embeddings
    assert [[*one.embeddings] for one in read] == rows.tolist()
    assert [*EmbedResponse.FromString(floats(1, rows[0])).embeddings] == rows[0].tolist()
