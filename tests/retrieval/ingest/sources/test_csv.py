"""CSV as programs write it."""

import pytest

from hybridtei.retrieval.ingest.document import Document, Rejection
from tests.retrieval.ingest.sources.reading import all_of, one_of


def texts(path, data, **options):
    return [row.text for row in all_of(path, data, **options) if isinstance(row, Document)]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("id;text\n1;a, b\n2;c\n", ["a, b", "c"]),
        ("sep=;\nid;text\n1;a\n", ["a"]),
        ("sep=|\r\nid|text\r\n1|a\r\n", ["a"]),
        ("id\ttext\n1\ta b\n", ["a b"]),
        ("id, text\n1,a\n", ["a"]),
        ("ID,Text\n1,a\n", ["a"]),
        ("text\none, two\n", []),
        ("text\none\ntwo\n", ["one", "two"]),
        ("1,the boundary layer\n2,a plate\n", ["the boundary layer", "a plate"]),
        ("text,\na,\nb,\n", ["a", "b"]),
        ('id,text\n1,"a\nb"\n2,"say ""c"""\n', ["a\nb", 'say "c"']),
        ("id,text\n1,a\u2028b\n2,a\x0bb\n3,a\x85b\n", ["a\nb"] * 3),
        ("id,text\r1,a\r2,b\r", ["a", "b"]),
    ],
)
def test_separator_and_header_are_found(tmp_path, data, expected):
    assert texts(tmp_path / "a.csv", data) == expected


@pytest.mark.parametrize("stray", ['2,"open', '2,5" pipe', '2,"a" b', '2,a"', '2,"a""'])
def test_a_stray_quote_loses_its_own_row_and_no_other(tmp_path, stray):
    rows = [f"{number},text {number}" for number in range(10, 3000)]
    quoted = '3,"quoted, and\ntwo lines"'
    data = "\n".join(["id,text", "1,first", stray, quoted, *rows]) + "\n"
    found = all_of(tmp_path / "a.csv", data)
    read = {row.document_id for row in found if isinstance(row, Document)}
    assert read - {"2"} == {"1", "3", *map(str, range(10, 3000))}
    assert [row.location for row in found if isinstance(row, Rejection)] in (["line 3"], [])


def test_numbers_are_numbers_and_names_are_kept_apart(tmp_path):
    row = one_of(
        tmp_path / "a.csv",
        "id,text,year,price,code,name,name,when\n007,a,1958,-2.50,0012,x,y,1e5\n",
    )
    assert row.document_id == "007"
    assert row.metadata == {
        "year": 1958,
        "price": -2.5,
        "code": "0012",
        "name": "x",
        "name 2": "y",
        "when": "1e5",
    }
    assert row.earlier[2]["year"] == "1958"


def test_a_row_with_a_bare_cr_is_told(tmp_path):
    row, refused = all_of(tmp_path / "a.csv", 'id,text\n1,"a\rb"\n2,a\rb\n')
    assert row.text == "a\nb"
    assert "new-line character" in refused.reason


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.tsv", "id\ttext\r1\ta\r2\tb\r"),
        ("a.jsonl", '{"id":1,"text":"a"}\r{"id":2,"text":"b"}'),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_lines_of_old_macs_end_by_cr(tmp_path, name, data, encoding):
    assert texts(tmp_path / name, data.encode(encoding)) == ["a", "b"]


def test_tabs_with_quotes_or_without(tmp_path):
    assert texts(tmp_path / "a.tsv", 'id\ttext\n1\t5" pipe\n2\t"b\n') == ['5" pipe', '"b']
    quoted = 'id\ttext\n1\t"The first line\nand a\ttab."\n2\t"He said ""no"" twice."\n'
    assert texts(tmp_path / "a.tsv", quoted) == [
        "The first line\nand a\ttab.",
        'He said "no" twice.',
    ]


def test_inch_marks_lose_no_row_between_them(tmp_path):
    rows = [f"{number},Plank {number}" for number in range(1000)]
    rows[50], rows[950] = '50,A 5" block', '950,A 6" block'
    data = "\n".join(["id,text", *rows]) + "\n"
    assert len(texts(tmp_path / "a.csv", data)) == 1000


@pytest.mark.parametrize("header", ["port,2024,2025", ",text words,2025", "port,kind,"])
def test_a_header_may_have_years_and_an_empty_cell(tmp_path, header):
    table = one_of(tmp_path / "a.csv", f"{header}\nAlfa harbour,10,20\nBravo,5,6\n")
    assert table.text == "Alfa harbour | 10 | 20\nBravo | 5 | 6"
    assert table.context_at(0) == header.replace(",", " | ")
    name = next(filter(None, header.split(",")))
    assert len(texts(tmp_path / "a.csv", f"{header}\nAlfa,x,2\nB,y,3\n", text_field=name)) == 2


def test_numbers_without_a_header_are_no_text(tmp_path):
    data = "150,4,setosa,versicolor\n" + "".join(f"5.{n},3.{n},1.4,0.{n}\n" for n in range(9))
    refusal = one_of(tmp_path / "a.csv", data)
    assert (refusal.reason, refusal.is_left_out) == ("tables without words", True)


def test_a_column_has_one_type(tmp_path):
    data = "id,text,sku,size,rest\n1,a,4711,1,2.5\n2,b,47A1,,3\n3,c,0815,3,x\n"
    rows = all_of(tmp_path / "a.csv", data)
    assert [row.metadata for row in rows] == [
        {"sku": "4711", "size": 1, "rest": "2.5"},
        {"sku": "47A1", "rest": "3"},
        {"sku": "0815", "size": 3, "rest": "x"},
    ]


def test_equal_names_of_columns_are_counted(tmp_path):
    names = ",a" * 4_000
    row = one_of(tmp_path / "a.csv", f"text,a 2{names}\nx,0{',1' * 4_000}\n")
    assert (row.metadata["a 2"], row.metadata["a 4001"]) == (0, 1)


def test_a_table_without_a_column_of_text_is_one_document(tmp_path):
    data = "id;name;price\n" + "1;bolt\n" + "1;bolt;2\n" * 1000
    table = one_of(tmp_path / "a.csv", data)
    assert table.text == "1 | bolt\n" + "\n".join(["1 | bolt | 2"] * 1000)
    assert table.context_at(5000) == "id | name | price"
    assert table.metadata == {"columns": ["id", "name", "price"]}
    assert "--text-field" in table.notes[0]
    assert len(all_of(tmp_path / "a.csv", data, text_field="name")) == 1001
    assert (
        "longer than allowed: name its text with --text-field"
        in one_of(tmp_path / "a.csv", data, max_document_characters=1000).reason
    )
    assert (
        "no column `body`; it has `id`, `name`, `price`"
        in one_of(tmp_path / "a.csv", data, text_field="body").reason
    )


def test_an_empty_table(tmp_path):
    assert one_of(tmp_path / "a.csv", "").reason == "tables without words"
