"""A collection as JSON lines: out of any store and into any, bit for bit; cut off anywhere; broken
in every field."""

import asyncio
import json
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.errors import CollectionMismatch, InvalidInput, UnknownCollection
from hybridtei.retrieval.store import transfer
from hybridtei.retrieval.store.collection import MIGRATION_OF, CollectionSchemas
from hybridtei.retrieval.store.points import point_id, to_points
from tests.retrieval.store.stores import KINDS, asked, embeddings, emptied, plan

# Three pages
COUNT = 150
IDS = [point_id("a", i) if i % 3 else i for i in range(COUNT)]
PAYLOADS = [
    {
        "text": f"ä\n\u2028 {i}",
        "whole": i,
        "part": float(i),
        "deep": [{"none": None, "flag": i % 2 == 0}],
        "big": 2**63 - 1 - i,
    }
    for i in range(COUNT)
]


@pytest.fixture(scope="module", params=KINDS)
def shared(request, tmp_path_factory):
    with asked(request.param, tmp_path_factory.mktemp("from")) as given:
        yield given


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    with asked("embedded", tmp_path_factory.mktemp("to")) as given:
        yield given


@pytest.fixture
def empty(other):
    with emptied(other) as given:
        yield given


@pytest.fixture(scope="module")
def filled(shared):
    with emptied(shared) as given:
        yield fill(given, plan(model_id="tiny", **{MIGRATION_OF: "docs"}))


@pytest.fixture(scope="module")
def content():
    """An export, of whichever store: all write the same lines."""
    with asked("memory", None) as given:
        yield stream(fill(given, plan(model_id="tiny", **{MIGRATION_OF: "docs"})))


def fill(given, schema):
    given.fill(to_points(embeddings(COUNT), IDS, PAYLOADS), schema)
    return given


def stream(given):
    async def whole():
        return b"".join(
            [lines async for lines in transfer.exported(CollectionSchemas(given.store), given.name)]
        )

    return given.run(whole())


def points_in(content):
    return [json.loads(line) for line in content.splitlines()[1:-1]]


async def pieces(content, size=1000):
    for begin in range(0, len(content), size):
        yield content[begin : begin + size]


def taken(given, content, **settings):
    schemas = CollectionSchemas(given.store)
    return given.run(transfer.import_from(schemas, pieces(content), given.name, **settings))


def records(given):
    found, _ = given.scroll(limit=1000, with_vectors=True)
    return {one.id: (one.payload, bits(one.vector)) for one in found}


def bits(vectors):
    def of(vector):
        if isinstance(vector, dict):
            indices, values = (
                np.asarray(vector["indices"], np.uint32),
                np.asarray(vector["values"], np.float32),
            )
            order = np.argsort(indices)
            return indices[order].tobytes(), values[order].tobytes()
        return np.asarray(vector, np.float32).shape, np.asarray(vector, np.float32).tobytes()

    return {name: of(vector) for name, vector in vectors.items()}


def test_what_comes_out_goes_in_bit_for_bit(filled, empty):
    content = stream(filled)
    assert taken(empty, content) == transfer.Imported(empty.name, True, COUNT, COUNT)
    assert records(empty) == records(filled)
    schema = empty.describe()
    assert schema.metadata == {"model_id": "tiny"}
    assert points_in(stream(empty)) == points_in(content)
    assert taken(empty, content) == transfer.Imported(empty.name, False, COUNT, 0)


def test_an_export_goes_on_behind_the_last_whole_line(filled, tmp_path):
    whole = stream(filled)
    lines = whole.splitlines(keepends=True)
    schemas, path = CollectionSchemas(filled.store), tmp_path / "docs.jsonl"
    cuts = [0, 1, len(lines[0]) - 1, len(whole) - 1]
    cuts += [len(b"".join(lines[:n])) + more for n in (1, 2, 64, 65, 66, 151) for more in (0, 5)]
    for cut in cuts:
        path.write_bytes(whole[:cut])
        told = []
        assert (
            filled.run(transfer.export_to(schemas, filled.name, path, told.append))
            == COUNT
            == sum(told)
        )
        assert path.read_bytes() == whole


def test_a_file_of_something_else_stays_as_it_is(filled, tmp_path):
    schemas, path = CollectionSchemas(filled.store), tmp_path / "docs.jsonl"

    def export(name):
        return filled.run(transfer.export_to(schemas, name, path, lambda count: None))

    for content, message in (
        (stream(filled), "docs.jsonl is a whole export, of 150 points: delete it"),
        (b"my diary", "not an export of this collection's current schema"),
        (
            b'{"hybridtei":"0","collection":"others"}\n',
            "not an export of this collection's current schema",
        ),
    ):
        path.write_bytes(content)
        with pytest.raises(InvalidInput, match=message):
            export(filled.name)
        assert path.read_bytes() == content
    path.unlink()
    with pytest.raises(UnknownCollection):
        export("nowhere")
    assert not path.exists()


def test_an_import_that_was_stopped_writes_what_is_missing(content, empty):
    lines = content.splitlines(keepends=True)
    with pytest.raises(
        InvalidInput,
        match=r'line 102: should be ."points":100. as the last one: the export was cut off',
    ):
        taken(empty, b"".join(lines[:101]))
    told = []
    assert taken(empty, content, advance=told.append) == transfer.Imported(
        empty.name, False, COUNT, 50
    )
    assert sum(told) == COUNT
    assert len(told) > 10
    assert points_in(stream(empty)) == points_in(content)


GOOD = {
    "id": 1,
    "payload": {},
    "vectors": {
        "dense": [1.0] + [0] * 15,
        "multivector": [[1.0] + [0] * 7] * 2,
        "sparse": {"indices": [3, 5], "values": [1, 2.5]},
    },
}
HEADER = {"hybridtei": "0", "collection": "docs", "schema": {"vectors": {}, "sparse": {}}}


def changed(**vectors):
    return {**GOOD, "vectors": {**GOOD["vectors"], **vectors}}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (changed(dense=["?"] * 16), "line 3: point 1, vector `dense`: should hold numbers"),
        (
            changed(dense={"indices": [1], "values": [1]}),
            "line 3: point 1, vector `dense`: should hold numbers",
        ),
        (
            changed(sparse=[1, 2]),
            "line 3: point 1, vector `sparse`: should be a sparse vector of `indices` and `values`",
        ),
        (
            changed(colour=[1]),
            "line 3: point 1: the collection has no vector `colour`; it has `dense`",
        ),
        ({**GOOD, "id": True}, "line 3: id: expected `int | str`, got `bool`"),
        ({**GOOD, "id": -1}, "line 3: point -1: `id` should be between 0"),
        ({**GOOD, "score": 1}, "line 3: unknown field `score`"),
        ({"id": 1}, "line 3: missing field `payload`"),
        (b"{", "line 3: should be JSON"),
        (b"", "line 3: should be JSON"),
        (b"[" * 100_000, "line 3: "),
        (b"\xff", "line 3: should be JSON"),
        (b" " * 4001, "line 3: has more than 2000 bytes"),
        ({"points": 7}, 'line 3: should be {"points":1} as the last one: the export was cut off'),
        ({"points": "1"}, "line 3: should be {"),
    ],
)
def test_a_broken_line_is_named_with_its_field(line, message, broken):
    text = line if isinstance(line, bytes) else json.dumps(line, separators=(",", ":")).encode()
    lines = [stream(broken).splitlines()[0], json.dumps({**GOOD, "id": 0}).encode(), text]
    most = 2000 if text == b" " * 4001 else transfer.MAX_LINE_BYTES
    with pytest.raises(InvalidInput) as caught:
        taken(broken, b"\n".join([*lines, b""]), max_line_bytes=most)
    assert message in str(caught.value)


@pytest.fixture(scope="module")
def broken():
    with asked("memory", None) as given:
        given.create(plan())
        yield given


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({}, "line 1: missing field `hybridtei`"),
        ({**HEADER, "schema": {}}, "line 1: schema: missing field `vectors`"),
        (
            {**HEADER, "schema": {"vectors": {"dense": {"size": "?"}}, "sparse": {}}},
            "line 1: schema.vectors[...].size: ",
        ),
        ({**HEADER, "schema": {"vectors": [], "sparse": {}}}, "line 1: schema.vectors: "),
        (None, "line 1: should be JSON"),
    ],
)
def test_a_broken_header_makes_nothing(broken, line, message):
    schemas = CollectionSchemas(broken.store)
    content = b"" if line is None else json.dumps(line).encode() + b"\n"
    with pytest.raises(InvalidInput) as caught:
        broken.run(transfer.import_from(schemas, pieces(content), "new"))
    assert message in str(caught.value)
    assert broken.run(broken.store.describe("new")) is None


def labelled(content, metadata):
    """The export with further metadata in its header."""
    first, rest = content.split(b"\n", 1)
    header = json.loads(first)
    header["schema"]["metadata"] |= metadata
    return json.dumps(header).encode() + b"\n" + rest


def test_a_header_does_not_steer_this_store(content, empty):
    """The keys of a migration make a name answer from another collection, and name one to
    delete."""
    steering = {"switching_until": time.time() + 30, "stand_in": "private", "previous": "private"}
    assert taken(empty, labelled(content, steering)).created
    schema = empty.run(CollectionSchemas(empty.store).of(empty.name))
    assert schema.stored_as == empty.name
    assert not schema.metadata.keys() & steering.keys()


def test_curves_of_an_export_are_those_of_a_new_collection_alone(content, empty):
    theirs, ours = ({"calibration": {"dense": [[0.5, share]]}} for share in (0.25, 0.75))
    content = labelled(content, theirs)
    assert taken(empty, content).created
    assert empty.describe().metadata.items() >= theirs.items()
    empty.annotate(ours)
    assert taken(empty, content).written == 0
    assert empty.describe().metadata.items() >= ours.items()


def test_a_collection_of_another_model_is_refused(content, empty):
    empty.create(plan(model_id="other"))
    with pytest.raises(CollectionMismatch, match="there other, wanted tiny"):
        taken(empty, content)


@pytest.mark.parametrize("stored", [{}, {"model_fingerprint": "a"}])
@pytest.mark.parametrize("told", [{}, {"model_fingerprint": "b"}])
def test_points_of_weights_that_nobody_knows_do_not_join_others(content, empty, stored, told):
    content = labelled(content, told)
    empty.create(plan(model_id="tiny", **stored))
    if stored == told:
        assert taken(empty, content).written
        return
    with pytest.raises(CollectionMismatch, match="fingerprint"):
        taken(empty, content)
    assert not empty.count()


@given(
    st.lists(st.binary(max_size=9).filter(lambda line: b"\n" not in line)),
    st.integers(1, 12),
    st.booleans(),
)
def test_lines_are_the_same_however_they_come(lines, size, is_ended):
    content = b"\n".join(lines) + (b"\n" if is_ended and lines else b"")

    async def split():
        return [
            line
            async for lines in transfer._whole_lines(pieces(content, size), 9)
            for line in lines
        ]

    wanted = content.split(b"\n")
    assert asyncio.run(split()) == (wanted if wanted[-1] else wanted[:-1] or [b""])
