"""HTML as a reader sees it."""

import pytest

from hybridtei.retrieval.ingest import html
from hybridtei.retrieval.ingest.html import BLOCKS
from tests.retrieval.ingest.sources.reading import one_of, text_of

TABLE = """<table><caption>Bolts</caption><thead><tr><th>Size</th><th>Torque<br>Nm</th><th>Key</th></tr></thead>
<tbody><tr><td>M8</td><td> 25 </td><td><b>hex</b> 6</td></tr><tr><td>M10<td><td>hex 8</table><p>after"""


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("<pre>if a:\n    b\n\nc</pre><p>d", "if a:\n    b\n\nc\nd"),
        ("<pre><span>if</span> a:\n\tb</pre>", "if a:\n\tb"),
        ("<textarea>a\n  b</textarea>c", "a\n  b\nc"),
        (TABLE, "Bolts\nSize | Torque Nm | Key\nM8 | 25 | hex 6\nM10 |  | hex 8\nafter"),
        ("<table><tr><th>Name<td>Ada</table>", "Name | Ada"),
        (
            "<table><tr><td>left<td><table><tr><th>a<th>b<tr><td>1<td>2</table></table>",
            "left\na | b\n1 | 2",
        ),
        ("<table><tr><td>menu<td><p>1<p>2<p>3<p>4<p>5<p>6</table>", "menu\n1\n2\n3\n4\n5\n6"),
        ("<p>foo <b>b</b>ar\n baz<br>next<hr>line", "foo bar baz\nnext\nline"),
        ("<dl><dt>a<dd>b</dl><details><summary>c</summary>d</details>", "a\nb\nc\nd"),
        ("<select><option>one<option>two</select>", "one\ntwo"),
        ("<fieldset><legend>a</legend>b</fieldset>", "a\nb"),
        ("a<p hidden>b<p style='color:red; DISPLAY : none'>c<p aria-hidden=true>d<p>e", "a\ne"),
        ("<nav>a</nav><div role=navigation>b</div><footer>c</footer>d", "d"),
        ("<div id=cookie-banner>We use cookies</div><div class='x cookie_consent'>b</div>c", "c"),
        ("<body class=cookie-notice-seen>a", "a"),
        ("<table hidden><tr><td>a</table><table><tr hidden><td>b<tr><td>c<td>d</table>", "c | d"),
        ("see <img src=x alt='a red plate'> here", "see a red plate here"),
        ("<math><mi>E</mi><mo>=</mo><mi>m</mi><annotation>E=m</annotation></math>", "E=m"),
        ("<noscript>without scripts</noscript>", "without scripts"),
        ("10<sup>6</sup>, 1<sup>st</sup>, 250<sup><a href=#n>3</a></sup>", "10^6, 1st, 250 3"),
        ("<math><msup><mi>y</mi><mn>3</mn></msup></math>", "y^3"),
        (
            "<math><mfrac><mrow><mi>a</mi><mo>+</mo><mi>b</mi></mrow><mn>2</mn></mfrac></math>",
            "(a+b)/2",
        ),
        (
            "<table><tr><th>Day<th>Hour<th>Ferry<tr><td rowspan=2>Monday<td>9<td>Alma<tr><td>11<td>Berta"
            "<tr><td colspan=2>Sunday<td>none</table>",
            "Day | Hour | Ferry\nMonday | 9 | Alma\nMonday | 11 | Berta\nSunday |  | none",
        ),
        ("<div role=tabpanel hidden>a</div><a href=#b>open</a><p id=b hidden>c</p>", "a\nopen\nc"),
        ("<button aria-controls=f>q</button><div id=f style='display:none'>a</div>", "q\na"),
        ("<section id=cookie-consent><h2>Cookie consent</h2>a</section>", "Cookie consent\na"),
        ("<div id=cookie-law><h2>Cookie law</h2>a</div>", "Cookie law\na"),
        ("<%@ Page %><p>a</p>", "a"),
        ("<script>a</script><style>b</style><template>c</template>d", "d"),
        ("<h1>Name<a class=headerlink href=#x>¶</a></h1>a", "Name\na"),
        ("a<!-- b -->c<![CDATA[d]]>", "ac"),
        ("a<table><!DOCTYPE x><tr><td>b</table>", "a\nb"),
        ("<pre><!DOCTYPE x [ <!ELEMENT y> ]>c</pre>", "]>c"),
        ("x &amp; y &lt;z&gt; &#xfdd0;", "x & y <z>"),
    ],
)
def test_what_a_reader_sees(tmp_path, page, text):
    assert text_of(tmp_path / "a.html", page) == text


def test_every_block_separates(tmp_path):
    """Elements that a table, a list or a form needs around them are within these."""
    around = {"td": "<table><tr>", "th": "<table><tr>", "tr": "<table>", "caption": "<table>"}
    outside = {"body", "frameset", "head", "hr", "tbody", "thead", "tfoot", "dialog", "nav"}
    outside |= {"footer", "plaintext", "table", "tr"}
    for name in sorted(BLOCKS - outside):
        outer = around.get(name, "")
        page = f"one{outer}<{name}>two</{name}>{outer.replace('<', '</')}three"
        lines = [line for line in text_of(tmp_path / "a.html", page).split("\n") if line]
        assert all("one" not in a or "two" not in a for a in lines), (name, lines)
        assert "".join(lines).count("two") == 1
        assert not any("twothree" in line or "onetwo" in line for line in lines), (name, lines)


def test_the_title_is_the_pages(tmp_path):
    page = one_of(
        tmp_path / "a.html",
        "<head><title> The\n page </title></head><body><svg><title>icon</title></svg>text",
    )
    assert (page.title, page.text) == ("The page", "text")
    without = one_of(tmp_path / "b.html", "<svg><title>icon</title><text>x</text></svg>text")
    assert (without.title, without.text) == (None, "text")


@pytest.mark.parametrize("tag", ["div", "ul", "blockquote", "b", "font", "svg", "table", "p"])
def test_a_page_that_is_deep_is_read(tmp_path, tag):
    """The parser alone takes minutes for these."""
    assert (
        text_of(tmp_path / "a.html", f"<{tag}>" * 100_000 + "<p>deep text</p>").endswith(
            "deep text"
        )
        or tag == "svg"
    )


def test_tags_that_the_parser_would_open_again_are_bounded(tmp_path):
    page = "".join(f"<b id={number}><p>{number}" for number in range(20_000))
    assert text_of(tmp_path / "a.html", page).split("\n")[-1] == "19999"


def test_a_page_of_usual_depth_is_parsed_as_it_is():
    page = "<div><b>a</b></div>" * 10_000
    assert html._flattened(page) == page


@pytest.mark.parametrize(
    ("page", "count"),
    [
        ("<p hidden>a</p><p style='display:none'> </p>b", 1),
        ("<div class=cookie-banner>a</div><svg><text>words</text></svg><svg><path/></svg>b", 2),
        ("<nav>a</nav><div role=contentinfo>c</div><footer> </footer>b", 2),
        ("<a class=headerlink href=#x>x</a>b", 0),
    ],
)
def test_what_is_left_out_is_counted(tmp_path, page, count):
    document = one_of(tmp_path / "a.html", page)
    notes = [f"{count} menus, footers, hidden parts or drawings with words were left out"] * bool(
        count
    )
    assert document.notes == notes


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("<div " + " ".join(f"a{n}" for n in range(30_000)) + ">x</div>", "x"),
        ("<select>" + "<option>x" * 30_000 + "</select>", "x\n" * 29_999 + "x"),
        ("<td colspan=9999999>x</td>" * 2000, "x" * 2000),
    ],
)
def test_pages_that_parsers_read_in_squares(tmp_path, page, text):
    assert text_of(tmp_path / "a.html", page) == text
