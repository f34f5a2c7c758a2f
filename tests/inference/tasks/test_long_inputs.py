"""Texts longer than the model, whose vectors are made from those of their windows."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from hybridtei.batch import Encoding, Head, WindowEncoding
from hybridtei.errors import InvalidInput
from hybridtei.inference.tasks.embed import MAX_WINDOWS, Embed
from hybridtei.models.checkpoint.late import Expansion, Side
from hybridtei.options import EmbedOptions
from hybridtei.outputs import unit
from tests.inference.engine import small
from tests.near import near, same

MODELS = {"hybrid": small.model(), "splade": small.model(small.splade())}
ALL = frozenset({Head.DENSE, Head.SPARSE, Head.MULTIVECTOR})
words = st.lists(st.sampled_from(small.WORDS), min_size=1, max_size=400).map(" ".join)
LONG = " ".join(small.WORDS[(place * 7 + place // 5) % len(small.WORDS)] for place in range(300))


def answer(task, model=MODELS["hybrid"]):
    return small.answered(task, model)


def windowed(*texts, heads=ALL, **options):
    return Embed(texts, heads, EmbedOptions(long_inputs="mean", **options))


def parts_of(encodings, texts):
    """The windows of each text, or the text itself."""
    parts = [[] for _ in texts]
    for encoding in encodings:
        if isinstance(encoding, WindowEncoding):
            begin, end = encoding.characters
            parts[encoding.document].append(texts[encoding.document][begin:end])
        else:
            parts[next(i for i, own in enumerate(parts) if not own)].append(None)
    return parts


@given(st.lists(words, min_size=1, max_size=4), st.booleans(), st.sampled_from([None, 4]))
def test_a_vector_is_the_average_of_the_windows_by_tokens(texts, normalize, dimensions):
    """The oracle embeds the windows' texts alone, and averages them in float64."""
    task = windowed(*texts, normalize=normalize, dimensions=dimensions)
    encodings, found = answer(task)
    assert len(found) == len(texts)
    alone = replace(task, options=structs.replace(task.options, long_inputs=None))
    for row, (text, windows) in enumerate(zip(texts, parts_of(encodings, texts), strict=True)):
        if windows == [None]:
            _, expected = answer(replace(alone, inputs=[text]))
            same(found.dense[row], expected.dense[0])
            same(found.multivector.row(row), expected.multivector.row(0))
            for ours, theirs in zip(found.sparse.row(row), expected.sparse.row(0), strict=True):
                same(ours, theirs)
            continue
        assert len(windows) > 1
        raw = replace(alone, inputs=windows, normalize=False, dimensions=None)
        read, vectors = answer(raw)
        mean = np.average(vectors.dense, axis=0, weights=[len(e) for e in read])[:dimensions]
        if normalize:
            mean /= np.linalg.norm(mean)
        near(found.dense[row], mean, 1e-6)
        rows = np.concatenate([*vectors.multivector])[:, :dimensions]
        near(found.multivector.row(row), unit(rows), 1e-6)
        expected = vectors.sparse.to_dense().max(axis=0)
        same(found.sparse.part(row, row + 1).to_dense()[0], expected)


def test_windows_cover_the_text_to_its_end_and_are_bounded():
    encodings, _ = answer(windowed("one", LONG))
    windows = [item for item in encodings if isinstance(item, WindowEncoding)]
    assert windows[0].characters[0] == 0
    assert windows[-1].characters[1] == len(LONG)
    assert {window.extent for window in windows} == {None}
    assert max(map(len, windows)) <= small.LONGEST
    task = windowed("one", " ".join([LONG] * 40))
    encodings = task.prepare(MODELS["hybrid"])
    assert len(encodings) == 1 + MAX_WINDOWS
    assert encodings[-1].extent == (0, encodings[-1].characters[1])


def test_texts_in_windows_are_computed_a_few_at_a_time():
    """Each chunk is one request of the engine, and its windows are in memory together."""
    model = MODELS["hybrid"]
    texts = ["one", *[f"{'two ' * 20_000}{place}" for place in range(4)], "three", "four"]
    task = windowed(*texts).for_model(model.spec)
    chunks = task.split(32)
    assert [text for chunk in chunks for text in chunk.inputs] == texts
    assert max(len(chunk.prepare(model)) for chunk in chunks) <= MAX_WINDOWS + 3


def test_what_may_not_be_cut_is_refused_as_ever():
    task = windowed("one", LONG, truncate=False)
    with pytest.raises(InvalidInput, match="less than 64 tokens") as refused:
        task.prepare(MODELS["hybrid"])
    assert refused.value.place == 1


def test_a_length_of_the_request_is_that_of_the_windows():
    encodings = windowed(LONG, max_tokens=30).prepare(MODELS["hybrid"])
    assert len(encodings) > 8
    assert max(map(len, encodings)) <= 30
    # A window needs 16 tokens of its text
    (cut,) = windowed(LONG, max_tokens=10).prepare(MODELS["hybrid"])
    assert cut.extent is not None


def test_of_splades_weights_the_largest_counts():
    task = windowed(LONG, "one two", LONG, heads=frozenset({Head.SPARSE}))
    encodings, found = answer(task, MODELS["splade"])
    texts = parts_of(encodings, task.inputs)
    _, windows = answer(Embed(texts[0], task.heads), MODELS["splade"])
    expected = windows.sparse.to_dense().max(axis=0)
    dense = found.sparse.to_dense()
    same(dense[0], expected)
    same(dense[2], expected)
    _, alone = answer(Embed(["one two"], task.heads), MODELS["splade"])
    same(dense[1], alone.sparse.to_dense()[0])


def test_every_window_has_the_prompt():
    task = windowed(LONG, prompt_name="query")
    prompt = [small.IDS[piece] for piece in ("[CLS]", "q", "##u", "##e", "##r", "##y", ":")]
    encodings = task.prepare(MODELS["hybrid"])
    assert len(encodings) > 5
    for encoding in encodings:
        assert encoding.input_ids[: len(prompt)].tolist() == prompt


def test_ids_are_cut_as_before():
    ids = [small.IDS["one"]] * 100
    encodings = windowed(ids, LONG).prepare(MODELS["hybrid"])
    before = Embed([ids], ALL).prepare(MODELS["hybrid"])[0]
    assert type(encodings[0]) is Encoding
    assert encodings[0].input_ids.tolist() == before.input_ids.tolist()
    assert encodings[0].extent == before.extent
    with pytest.raises(InvalidInput, match="tokens") as refused:
        windowed("one", ids, truncate=False).prepare(MODELS["hybrid"])
    assert refused.value.place == 1


EXPANDING = Side(expansion=Expansion(32, 0)), Side()


@pytest.mark.parametrize(
    ("spec", "fields"),
    [
        (small.model_spec(), {"heads": frozenset({Head.TOKENS})}),
        (small.model_spec(), {"heads": frozenset({Head.SPARSE}), "query_encoder": "table"}),
        (
            small.model_spec(sides=EXPANDING),
            {"input_type": "query", "heads": frozenset({Head.MULTIVECTOR})},
        ),
    ],
)
def test_what_has_no_windows_is_refused_by_name(spec, fields):
    task = windowed(LONG, **fields)
    assert not task.reads_windows(spec)
    with pytest.raises(InvalidInput, match=r"`long_inputs` \"mean\" is not for `tokens`, nor for"):
        task.check(spec)
    replace(task, options=structs.replace(task.options, long_inputs="cut")).check(spec)


def test_a_router_reads_queries_in_windows_of_the_model_for_queries():
    queries = small.model(small.model_spec(max_input_length=32))
    documents = MODELS["hybrid"]
    spec = small.model_spec(query=queries.spec)
    model = replace(documents, spec=spec, query=queries)
    for side, longest, route in (("query", 32, 1), ("document", 64, 0)):
        task = windowed(LONG, input_type=side)
        encodings = task.prepare(model)
        assert longest - 8 < max(map(len, encodings)) <= longest
        assert {encoding.route for encoding in encodings} == {route}
