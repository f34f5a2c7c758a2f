"""Markdown: what stands around the text is not text."""

import pytest

from tests.retrieval.ingest.sources.reading import one_of, text_of

URI = "data:image/png;base64," + "iVBORw0KGgo" * 50
BADGE = "[![build](https://ci/badge.svg)](https://ci)"


@pytest.mark.parametrize(
    ("written", "title", "text"),
    [
        ("# The title #\n\nbody **bold**", "The title", "body **bold**"),
        (f"{BADGE}\n\n# Name\n\nbody", "Name", f"{BADGE}\n\n\nbody"),
        (f"# {BADGE} [Name](https://x)\nbody", "Name", "body"),
        ("Name\n====\n\nbody", "Name", "body"),
        ('<h1 align="center">\n  <b>Name</b>\n</h1>\n\nbody', "Name", None),
        ('<p align="center">\n<img src="x">\n</p>\n\n# Name\nbody', "Name", None),
        ("body\n# later", None, "body\n# later"),
        ("## Second\nbody", None, "## Second\nbody"),
        ("#no heading\nbody", None, "#no heading\nbody"),
        (
            "a <!-- hidden\n# gone\n--> b\n\n```\n<!-- code -->\n```",
            None,
            "a  b\n\n```\n<!-- code -->\n```",
        ),
        ("[//]: # (a comment)\nbody", None, "body"),
        (f"![plate]({URI}) body\n\n[image1]: <{URI}>", None, "![plate]() body\n\n[image1]: <>"),
        ("<!-- never closed\nbody", None, "<!-- never closed\nbody"),
    ],
)
def test_title_and_text(tmp_path, written, title, text):
    document = one_of(tmp_path / "a.md", written)
    assert document.title == title
    assert text is None or "\n".join(map(str.rstrip, document.text.split("\n"))) == text


@pytest.mark.parametrize(
    ("front", "title", "metadata"),
    [
        (
            "---\ntitle: A plan\ntags: [a, b]\ndate: 2024-05-01\n---\n",
            "A plan",
            {"tags": ["a", "b"], "date": "2024-05-01"},
        ),
        ('+++\ntitle = "A plan"\nweight = 5\n+++\n', "A plan", {"weight": 5}),
        ("---\r\ntitle: A plan\r\n---\r\n", "A plan", {}),
        ("---\nauthor: Ada\n---\n", None, {"author": "Ada"}),
    ],
)
def test_front_matter_is_metadata(tmp_path, front, title, metadata):
    document = one_of(tmp_path / "a.md", f"{front}\nbody\n# Heading")
    assert (document.title, document.metadata) == (title, metadata)
    assert document.text == "body\n# Heading"


@pytest.mark.parametrize(
    "front",
    [
        "---\na: &a [x, x]\nb: &b [*a, *a]\n---\n",
        "---\n" + "[" * 5000 + "\n---\n",
        "---\nnot a mapping\n---\n",
        "---\na: [\n---\n",
        "+++\na = \n+++\n",
        "---\na: !!python/object/apply:os.system ['true']\n---\n",
    ],
)
def test_front_matter_that_is_none_stays_text_and_is_told(tmp_path, front):
    document = one_of(tmp_path / "a.md", f"{front}body")
    assert document.metadata == {}
    assert "body" in document.text
    assert "front matter stays text" in document.notes[0]


def test_a_data_uri_is_no_text_in_any_format(tmp_path):
    for name, written in (("a.txt", f"see {URI} here"), ("a.csv", f'text\n"see {URI} here"\n')):
        document = one_of(tmp_path / name, written)
        assert document.text == "see  here"
    assert one_of(tmp_path / "b.txt", "data: one, two").text == "data: one, two"


def test_rules_between_paragraphs_are_no_front_matter(tmp_path):
    assert (
        one_of(tmp_path / "a.md", "one\n\n---\n\ntwo: x\n\n---\nthree").text
        == "one\n\n---\n\ntwo: x\n\n---\nthree"
    )


@pytest.mark.parametrize(
    "text",
    [
        "Use `<!--` to begin a comment.\n\nThe crane.",
        "Use ``a ` <!--`` and `-->`.\n\nThe crane.",
        "Code:\n\n    <!-- shown\n\nThe crane -->.",
    ],
)
def test_code_comes_before_comments(tmp_path, text):
    assert text_of(tmp_path / "a.md", text) == text


def test_comments_between_code(tmp_path):
    text = "a `b` <!-- c `d` --> e <!-- f\ng --> h `<!--`"
    assert text_of(tmp_path / "a.md", text) == "a `b`  e  h `<!--`"


@pytest.mark.parametrize(
    ("heading", "text"), [("Setting up", "# Setting up\n\nbody"), ("Manual", "body")]
)
def test_a_heading_that_is_not_the_title_of_the_front_matter_stays_text(tmp_path, heading, text):
    document = one_of(tmp_path / "a.md", f"---\ntitle: Manual\n---\n# {heading}\n\nbody")
    assert (document.title, document.text) == ("Manual", text)
