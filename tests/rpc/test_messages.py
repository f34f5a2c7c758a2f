"""What is built from `tei.proto` behaves as protobuf's own compiler would have made it."""

from __future__ import annotations

import re
from importlib.resources import files

from google.protobuf import descriptor_pb2

from hybridtei.rpc import messages
from hybridtei.rpc.services import METHODS

TEXT = files("hybridtei.rpc").joinpath("tei.proto").read_text()


def test_every_block_of_the_file_is_there():
    file = descriptor_pb2.FileDescriptorProto()
    messages.POOL.FindFileByName("tei.proto").CopyToProto(file)
    for kind, known in (("message", file.message_type), ("enum", file.enum_type), ("service", file.service)):
        assert [block.name for block in known] == re.findall(rf"^{kind} (\w+)", TEXT, re.MULTILINE)
    numbered = re.findall(r"^  [^/\n]*= \d+;", TEXT, re.MULTILINE)
    enum_values = sum(len(enum.value) for enum in file.enum_type)
    assert sum(len(message.field) for message in file.message_type) == len(numbered) - enum_values
    assert sum(len(service.method) for service in file.service) == TEXT.count("  rpc ")


def test_bytes_are_those_of_the_specification():
    request = messages.message("EmbedRequest")
    assert request(inputs="a").SerializeToString() == b"\x0a\x01a"
    assert request(inputs="a", normalize=False).SerializeToString() == b"\x0a\x01a\x18\x00"  # told, though it is the default
    assert request(truncate=False, truncation_direction=1).SerializeToString() == b"\x20\x01"
    assert request(prompt_name="", dimensions=8).SerializeToString() == b"\x2a\x00\x30\x08"
    assert messages.EmbedResponse(embeddings=[1.0]).SerializeToString() == b"\x0a\x04\x00\x00\x80\x3f"  # packed
    assert messages.Rank(index=3, text="", score=0.5).SerializeToString() == b"\x08\x03\x12\x00\x1d\x00\x00\x00\x3f"


def test_optional_fields_tell_whether_they_were_given():
    request = messages.message("EmbedSparseRequest")
    assert request(prompt_name="").HasField("prompt_name")
    assert not request.FromString(b"").HasField("prompt_name")


def test_every_call_has_somebody_to_answer_it():
    for service in messages.services():
        for method in service.methods:
            assert method.name.removesuffix("Stream") in METHODS
            assert method.server_streaming == (method.name.endswith("Stream") and method.name != "RerankStream")
            assert method.client_streaming == method.name.endswith("Stream")
