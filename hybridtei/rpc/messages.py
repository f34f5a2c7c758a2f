"""The messages and services of `tei.proto`, built from that file at import.

No generated code: it refuses to load beside another release of protobuf's runtime than it was made for, and it would be a
second copy of what the file says. The pool is our own, so a client's generated `tei.v1` may live in the same process.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from hybridtei.errors import Garbage
from hybridtei.outputs import Floats
from hybridtei.system.frames import nested

PACKAGE, FILE = "tei.v1", "tei.proto"
SCALARS = {"string": 9, "bool": 8, "float": 2, "uint32": 13, "uint64": 4}  # numbers of FieldDescriptorProto.Type
MESSAGE, ENUM, OPTIONAL, REPEATED = 11, 14, 1, 3

_BLOCK = re.compile(r"(service|enum|message)\s+(\w+)\s*\{([^}]*)\}")
_RPC = re.compile(r"rpc\s+(\w+)\s*\(\s*(stream\s+)?(\w+)\s*\)\s*returns\s*\(\s*(stream\s+)?(\w+)\s*\)\s*;")
_FIELD = re.compile(r"(?:(optional|repeated)\s+)?(\w+)\s+(\w+)\s*=\s*(\d+)\s*;")
_VALUE = re.compile(r"(\w+)\s*=\s*(\d+)\s*;")


def parse(text: str) -> Any:
    """Parse a `.proto` of flat messages, enums and services, as far as `tei.proto` needs, to a FileDescriptorProto."""
    text = re.sub(r"//[^\n]*", "", text)
    file = descriptor_pb2.FileDescriptorProto(name=FILE, package=PACKAGE, syntax="proto3")
    blocks = _BLOCK.findall(text)
    enums = {name for kind, name, _ in blocks if kind == "enum"}
    for kind, name, body in blocks:
        if kind == "enum":
            values = [{"name": value, "number": int(number)} for value, number in _VALUE.findall(body)]
            file.enum_type.add(name=name, value=[descriptor_pb2.EnumValueDescriptorProto(**value) for value in values])
        elif kind == "message":
            _add_message(file.message_type.add(name=name), body, enums)
        else:
            _add_service(file.service.add(name=name), body)
    return file


def _add_message(message: Any, body: str, enums: set[str]) -> None:
    for rule, kind, name, number in _FIELD.findall(body):
        field = message.field.add(name=name, number=int(number), label=REPEATED if rule == "repeated" else OPTIONAL)
        field.type = SCALARS.get(kind) or (ENUM if kind in enums else MESSAGE)
        if kind not in SCALARS:
            field.type_name = f".{PACKAGE}.{kind}"
        if rule == "optional":  # proto3 tells presence by a oneof of one
            field.proto3_optional, field.oneof_index = True, len(message.oneof_decl)
            message.oneof_decl.add(name=f"_{name}")


def _add_service(service: Any, body: str) -> None:
    for name, takes_stream, takes, gives_stream, gives in _RPC.findall(body):
        service.method.add(
            name=name,
            input_type=f".{PACKAGE}.{takes}",
            output_type=f".{PACKAGE}.{gives}",
            client_streaming=bool(takes_stream),
            server_streaming=bool(gives_stream),
        )


POOL = descriptor_pool.DescriptorPool()
POOL.AddSerializedFile(parse(files(__package__).joinpath(FILE).read_text(encoding="utf-8")).SerializeToString())


def message(name: str) -> Any:
    """Return the class of a message."""
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


def parsed(kind: Any, data: bytes) -> Any:
    """Parse a message of a class. Raises Garbage."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise Garbage(f"not a {kind.DESCRIPTOR.full_name}: {error}") from None


def services() -> Iterator[Any]:
    """Yield the descriptors of all services, in the order of the file."""
    return iter(POOL.FindFileByName(FILE).services_by_name.values())


EmbedResponse = message("EmbedResponse")
EncodeResponse, SimpleToken = message("EncodeResponse"), message("SimpleToken")
DecodeResponse = message("DecodeResponse")
EmbedSparseResponse, SparseValue = message("EmbedSparseResponse"), message("SparseValue")
InfoResponse, Metadata = message("InfoResponse"), message("Metadata")
PredictResponse, Prediction = message("PredictResponse"), message("Prediction")
RerankResponse, Rank = message("RerankResponse"), message("Rank")
LEFT = 1  # TRUNCATION_DIRECTION_LEFT


def floats(field: int, row: Floats) -> bytes:
    """Encode float32[d] as `repeated float`, packed."""
    return nested(field, row.astype("<f4", copy=False).tobytes())


def float_rows(field: int, inner: int, rows: Floats) -> bytes:
    """Encode float32[t, d] as a repeated message with `repeated float` as its field `inner`. All begin with the same bytes."""
    count, width = rows.shape
    body = floats(inner, np.zeros(width, dtype=np.float32))
    head = np.frombuffer(nested(field, body), dtype=np.uint8)[: -4 * width or None]
    whole = np.empty((count, len(head) + 4 * width), dtype=np.uint8)
    whole[:, : len(head)] = head
    whole[:, len(head) :] = np.ascontiguousarray(rows, dtype="<f4").view(np.uint8)
    return whole.tobytes()
