"""Judged collections from disk, in BEIR's layout and the plainer one."""

import json

import pytest

from hybridtei.errors import InvalidInput
from hybridtei.retrieval.evaluate.measures import read_judgements


def write(folder, judgements, *, where="qrels/test.tsv", key="_id", queries=("q1", "q2", "q3")):
    lines = [json.dumps({key: name, "text": f"text of {name}"}) for name in queries]
    (folder / "queries.jsonl").write_text("\n".join([*lines, ""]))
    (folder / where).parent.mkdir(parents=True, exist_ok=True)
    (folder / where).write_text(judgements)
    return folder


HEADER = "query-id\tcorpus-id\tscore\n"


@pytest.mark.parametrize("where", ["qrels/test.tsv", "qrels.tsv"])
@pytest.mark.parametrize("key", ["_id", "id"])
@pytest.mark.parametrize(
    "judgements",
    [
        HEADER + "q1\td1\t2\nq2\td1\t1\nq2\td2\t0\n",
        "q1 0 d1 2\nq2 0 d1 1\nq2 0 d2 0\n".replace(" ", "\t"),
    ],
)
def test_either_layout(tmp_path, where, key, judgements):
    judged = read_judgements(write(tmp_path, judgements, where=where, key=key))
    assert judged.queries == {"q1": "text of q1", "q2": "text of q2"}
    assert judged.relevance == {"q1": {"d1": 2}, "q2": {"d1": 1, "d2": 0}}


def test_a_query_with_nothing_relevant_does_not_count(tmp_path):
    judged = read_judgements(write(tmp_path, HEADER + "q1\td1\t1\nq2\td1\t0\nq9\td1\t1\n"))
    assert list(judged.queries) == ["q1"]


def test_a_split_that_is_not_there_names_those_that_are(tmp_path):
    write(tmp_path, HEADER + "q1\td1\t1\n", where="qrels/dev.tsv")
    with pytest.raises(InvalidInput, match="it has the splits dev"):
        read_judgements(tmp_path)
    assert read_judgements(tmp_path, "dev").relevance == {"q1": {"d1": 1}}


@pytest.mark.parametrize(
    ("judgements", "message"),
    [
        (HEADER + "q1\td1\n", "line 2: should be"),
        (HEADER + "q1\td1\thigh\n", "line 2"),
        (HEADER, "none of the 3 queries"),
        ("q1 d1 1\n", "line 1: should be .* tabs"),
        (HEADER + "q1\td1\t0.5\n", "line 2: should be .* whole grade"),
        (HEADER + "q1\td1\t1\nq1\td1\t2\n", "line 3: .*was there before"),
        (HEADER + "\nq1 d1 1\n", "line 3"),
    ],
)
def test_what_cannot_be_read_is_told_by_its_line(tmp_path, judgements, message):
    with pytest.raises(InvalidInput, match=message):
        read_judgements(write(tmp_path, judgements))


def test_a_byte_order_mark_is_no_part_of_an_id(tmp_path):
    write(tmp_path, "\ufeffq1\td1\t1\nq2\td1\t1.0\n")
    queries = tmp_path / "queries.jsonl"
    queries.write_text("\ufeff" + queries.read_text())
    assert read_judgements(tmp_path).relevance == {"q1": {"d1": 1}, "q2": {"d1": 1}}


@pytest.mark.parametrize("name", ["queries.jsonl", "corpus.jsonl"])
def test_two_lines_of_an_id_are_refused(tmp_path, name):
    write(tmp_path, HEADER + "q1\td1\t1\n")
    line = '{"_id": "q1", "text": "a"}\n'
    (tmp_path / name).write_text(f"{line}\n{line}")
    with pytest.raises(InvalidInput, match=rf"{name}, line 3: 'q1' was there before"):
        read_judgements(tmp_path)


def test_what_does_not_match_is_counted_in_a_line(tmp_path):
    write(tmp_path, HEADER + "q1\td1\t1\nq2\td9\t1\nq3\td1\t0\nq9\td1\t1\n")
    records = ('{"_id": "d1", "text": "a"}', '{"_id": "q1", "text": "b"}')
    (tmp_path / "corpus.jsonl").write_text("\n".join(records))
    assert read_judgements(tmp_path).notes == (
        "4 judgements, 1 of no query, 1 of no document, 2 queries, 1 without a relevant document, "
        "1 that are a document"
    )


def test_missing_and_broken_queries(tmp_path):
    write(tmp_path, HEADER + "q1\td1\t1\n")
    (tmp_path / "queries.jsonl").write_text('{"_id": "q1"}\n')
    with pytest.raises(InvalidInput, match=r"queries\.jsonl, line 1"):
        read_judgements(tmp_path)
    (tmp_path / "queries.jsonl").unlink()
    with pytest.raises(InvalidInput, match="no such file"):
        read_judgements(tmp_path)
    with pytest.raises(InvalidInput, match="no such folder"):
        read_judgements(tmp_path / "nowhere")


@pytest.mark.parametrize("text", ['""', '" "', "null", "5"])
def test_a_query_without_a_word_is_named(tmp_path, text):
    lines = ['{"_id": "a", "text": "b"}', f'{{"_id": "c", "text": {text}}}']
    (tmp_path / "queries.jsonl").write_text("\n".join(lines))
    (tmp_path / "qrels.tsv").write_text("a\td\t1\n")
    with pytest.raises(InvalidInput, match=r"line 2: should be an object .* of at least one word"):
        read_judgements(tmp_path)
