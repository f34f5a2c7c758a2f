"""Spans against transformers' hidden states, and against slices of what the same model gives for
whole texts."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from conformance.small import tiny, vocabulary
from conformance.small.fake_backend import FakeBackend
from hybridtei.batch import Head
from hybridtei.config import EngineConfig
from hybridtei.encoder import Encoder
from hybridtei.errors import InvalidInput, UnsupportedHead
from hybridtei.inference.tasks import spans
from hybridtei.inference.tasks.embed import Embed
from hybridtei.inference.tasks.pooling import MultivectorBudget
from hybridtei.inference.tasks.spans import EmbedSpans, SpanText
from hybridtei.models.checkpoint.late import Side
from hybridtei.options import EmbedOptions
from tests.inference.engine import small
from tests.near import near, same

TEXT = " ".join(vocabulary.texts(3, seed=5))
WORDS = [(found, found + len(word)) for word in TEXT.split() for found in [TEXT.index(word)]]
SPANS = [(0, len(TEXT)), (0, WORDS[2][1]), (WORDS[2][0], WORDS[4][1]), WORDS[1]]


@pytest.mark.parametrize("model_type", ["bert", "xlm-roberta", "modernbert"])
def test_dense_is_the_mean_of_transformers_states(tmp_path, model_type):
    folder = tiny.write_family(tmp_path / "model", model_type)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    read = tokenizer(
        TEXT, return_offsets_mapping=True, return_special_tokens_mask=True, return_tensors="pt"
    )
    with torch.no_grad():
        ids = {name: read[name] for name in ("input_ids", "attention_mask")}
        states = model(**ids).last_hidden_state[0].numpy()
    starts = np.array(
        [end - len(TEXT[begin:end].lstrip()) for begin, end in read["offset_mapping"][0].tolist()]
    )
    starts[read["special_tokens_mask"][0].numpy() == 1] = -1
    theirs = np.stack([states[(starts >= begin) & (starts < end)].mean(0) for begin, end in SPANS])
    theirs /= np.linalg.norm(theirs, axis=1, keepdims=True)
    encoder = Encoder.load(folder, pooling="mean", backend="ort", measures=False)
    ours = encoder.encode(TEXT, spans=SPANS)
    near(ours.dense, theirs, 1e-5)
    assert np.abs(theirs[0] - theirs[1]).max() > 1e-3


def task(*inputs, heads=frozenset({Head.DENSE}), **options):
    return EmbedSpans(inputs, Embed((), heads, EmbedOptions(**options)))


def prepared(*inputs, **options):
    return task(*inputs, **options).prepare(small.model())


def test_a_prompts_tokens_belong_to_no_span():
    (encoding,) = prepared(SpanText("one two", [(0, 7), (4, 7)]), prompt_name="query")
    pieces = [small.PIECES[i] for i in encoding.input_ids]
    assert pieces == ["[CLS]", "q", "##u", "##e", "##r", "##y", ":", "one", "two", "[SEP]"]
    assert [row.tolist() for row in encoding.places] == [[7, 8], [8]]


@pytest.mark.parametrize("direction", ["left", "right"])
def test_a_span_that_was_cut_off_is_refused_and_the_others_keep_their_places(
    direction, monkeypatch
):
    monkeypatch.setattr(spans, "MAX_WINDOWS", 1)
    words, room = "one " * 80, small.LONGEST - 2
    kept, cut = ((0, 3), (316, 319)) if direction == "right" else ((316, 319), (0, 3))
    (encoding,) = prepared(SpanText(words, [kept]), truncation_direction=direction)
    assert encoding.places.values.tolist() == [1 if direction == "right" else room]
    with pytest.raises(
        InvalidInput,
        match=rf"`inputs\[0\].spans\[1\]` is \[{cut[0]}, {cut[1]}\].*no token.* {room} tokens are read",
    ):
        prepared(SpanText(words, [kept, cut]), truncation_direction=direction)


def test_chunks_name_inputs_by_their_place_in_the_request():
    *_, last = task(*[SpanText("one", [(0, 3)])] * 2, SpanText("one", [(2, 2)])).split(2)
    with pytest.raises(InvalidInput, match=r"`inputs\[2\].spans\[0\]` is \[2, 2\]"):
        last.prepare(small.model())


def test_at_most_four_times_the_texts_tokens():
    item = SpanText("one two three", [(0, 13)] * 4)
    (encoding,) = prepared(item)
    assert len(encoding.places.values) == 12
    with pytest.raises(
        InvalidInput, match=r"`inputs\[0\].spans` hold 13 tokens in all > maximum allowed 12"
    ):
        prepared(SpanText(item.text, [*item.spans, (0, 3)]))
    with pytest.raises(InvalidInput, match=f"257 spans > maximum allowed {4 * small.LONGEST}"):
        prepared(SpanText("one", [(0, 3)] * 257), truncate=False)
    with pytest.raises(
        InvalidInput, match=f"4097 spans > maximum allowed {4 * spans.MAX_WINDOWS * small.LONGEST}"
    ):
        prepared(SpanText("one", [(0, 3)] * 4097))


@pytest.mark.parametrize("prompt", [None, "query"])
def test_a_long_text_is_read_by_windows_and_each_span_in_one_of_them(prompt):
    model, words = small.model(), [small.WORDS[i * i % len(small.WORDS)] for i in range(200)]
    text, edges = " ".join(words), np.cumsum([0, *(len(word) + 1 for word in words)])
    # In words, in no order
    asked = [(150, 160), (0, 20), (90, 91), (0, 3), (175, 200), (40, 60)]
    item = SpanText(text, [(int(edges[begin]), int(edges[end]) - 1) for begin, end in asked])
    encodings = task(SpanText("one", [(0, 3)]), item, prompt_name=prompt).prepare(model)
    around = [small.PIECES[i] for i in encodings[0].input_ids]
    around.remove("one")
    room = small.LONGEST - len(around)
    found = {}
    for encoding in encodings[1:]:
        pieces = [small.PIECES[i] for i in encoding.input_ids]
        assert [*pieces[: len(around) - 1], pieces[-1]] == around
        assert len(pieces) == small.LONGEST, "windows are full"
        for row, places in zip(encoding.rows, encoding.places, strict=True):
            found[int(row)] = [pieces[place] for place in places]
            begin, end = int(places[0]) - len(around) + 1, room - int(places[-1]) + len(around) - 2
            at_edge = pieces[len(around) - 1 : -1] in (words[:room], words[-room:])
            assert at_edge or min(begin, end) >= (room // 2 - len(places)) // 2
    assert encodings[0].rows.tolist() == [0]
    assert found == {1 + row: words[begin:end] for row, (begin, end) in enumerate(asked)}
    wrong = SpanText(text, [(0, 3), (int(edges[30]), int(edges[90]) - 1)])
    with pytest.raises(
        InvalidInput,
        match=rf"`inputs\[0\].spans\[1\]` is .* holds 60 tokens > .* allowed {room // 2} of",
    ):
        task(wrong, prompt_name=prompt).prepare(model)
    with pytest.raises(InvalidInput, match=f"less than {small.LONGEST} tokens"):
        task(item, truncate=False).prepare(model)


def test_windows_answers_stand_in_the_order_of_spans():
    encoder = Encoder(small.model(), FakeBackend(small.model_spec()), 256, EngineConfig())
    text = " ".join(small.WORDS * 8)
    places = [(begin, begin + 12) for begin in (600, 5, 300, 40, 610)]
    heads = ("dense", "sparse", "multivector", "tokens")
    together = encoder.encode([text, "one two"], heads, spans=[places, [(4, 7), (0, 3)]])
    alone = [encoder.encode(text, heads, spans=[place]) for place in places]
    assert len(together) == len(places) + 2
    for row, one in enumerate(alone):
        same(together.dense[row], one.dense[0])
        same(together.multivector.row(row), one.multivector.row(0))
        same(together.tokens.row(row), one.tokens.row(0))
        same(together.sparse.row(row)[0], one.sparse.row(0)[0])


def test_windows_of_a_late_interaction_model_keep_its_marker_and_length():
    side = Side(marker=small.IDS["poison"], length=32)
    spec = small.model_spec(sides=(side, side), pooling=(), sparse=None, prompts=None)
    encodings = task(
        SpanText("one " * 100, [(0, 3), (200, 203)]), heads=frozenset({Head.MULTIVECTOR})
    ).prepare(small.model(spec))
    assert [len(encoding) for encoding in encodings] == [32, 32]
    assert all(encoding.input_ids[1] == small.IDS["poison"] for encoding in encodings)


@pytest.mark.parametrize(
    ("chunks", "text"),
    [(["a", "b"], "a b"), (["a ", "b", "\nc"], "a b\nc"), (["a", "", "b"], "a  b"), ([" a"], " a")],
)
def test_chunks_are_joined_by_a_blank_where_none_separates_them(chunks, text):
    made = spans.joined(chunks)
    assert [made.text[begin:end] for begin, end in made.spans] == chunks
    assert made.text == text


@pytest.mark.parametrize("pooling", ["cls", "lasttoken", "max"])
def test_models_that_pool_otherwise_are_refused_by_name(pooling):
    spans, model = SpanText("one", [(0, 3)]), small.model(small.model_spec(pooling=(pooling,)))
    with pytest.raises(UnsupportedHead, match=pooling):
        task(spans).check(model.spec)
    task(spans, heads=frozenset({Head.SPARSE, Head.MULTIVECTOR})).check(model.spec)
    with pytest.raises(UnsupportedHead, match="whole texts"):
        task(spans, heads=frozenset({Head.SPARSE})).check(small.splade())


def test_the_numbers_of_an_answer_are_bounded_by_how_often_spans_overlap():
    model = small.model()
    heads = frozenset({Head.DENSE, Head.MULTIVECTOR})
    # Two vectors, and the states that are pooled
    fixed = (2 + 4) * small.HIDDEN
    apart = task(SpanText("one two", [(0, 3), (4, 7)]), heads=heads)
    assert apart.max_numbers(model.spec, 4) == fixed + 4 * small.DIM
    twice = task(SpanText("one two", [(0, 7), (4, 7)]), heads=heads)
    assert twice.max_numbers(model.spec, 4) == fixed + 8 * small.DIM
    budget = EmbedOptions(multivector=MultivectorBudget(max_tokens=1))
    merged = replace(apart, task=Embed(["one two"], heads, budget))
    # A budget is one of each span
    assert merged.max_numbers(model.spec, 4) == fixed + 2 * small.DIM
