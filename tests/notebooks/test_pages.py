"""The pages beside the notebooks keep up with the code."""

import re
import sys
from contextlib import suppress
from importlib import import_module

import pytest

import hybridtei
from conformance.small import tiny
from hybridtei import cli
from hybridtei.cli.flags import SETTINGS, group_of
from hybridtei.config import fields_of
from hybridtei.encoder import Encoder
from hybridtei.errors import LoadError
from notebooks.writing import files, reference
from notebooks.writing import flags as flags_page
from notebooks.writing.execute import FOLDER
from tests.ran import ran

FLAG = re.compile(r"`(--[a-z-]+)")
FILE = re.compile(r"(?<![\w./])((?:hybridtei|tests|conformance|deploy|notebooks)/[\w./-]*\w)")
ROOT = FOLDER.parent
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    *(f"deploy/{page.name}" for page in sorted((ROOT / "deploy").glob("*.md"))),
    *(f"notebooks/{page.name}" for page in sorted(FOLDER.glob("*.md"))),
)


def flags(*groups):
    return {
        f"--{field.name.replace('_', '-')}"
        for kind in SETTINGS
        for field, _, meta in fields_of(kind)
        if not groups or group_of(kind, meta) in groups
    }


def test_what_is_written_from_the_code_is_up_to_date():
    """Read in a process of its own: `ast.parse` of Python 3.11 can fail beside another thread."""
    ran([sys.executable, "-m", "notebooks.writing", "--check"], cwd=ROOT, check=True)


READ = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "modules.json",
    "1_Pooling/config.json",
    "model.safetensors",
)
READ += (
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "adapter_config.json",
    "sparse_linear.pt",
)


@pytest.mark.parametrize("name", READ)
def test_a_file_that_the_table_has_as_read_is_refused_by_its_name(tmp_path, name):
    table = files.PAGE.read_text(encoding="utf-8").partition(files.BEGIN)[2]
    assert f"`{name}`".replace("1_Pooling", "*") in table
    (tiny.write_bert(tmp_path) / name).write_text("[0]")
    with pytest.raises(LoadError, match=re.escape(name)):
        Encoder.load(str(tmp_path), measures=False)


def test_files_that_the_table_has_as_not_read_change_nothing(tmp_path):
    folder = tiny.write_bert(tmp_path)
    before = Encoder.load(str(folder), measures=False).encode(["baka"]).dense
    for name in (*files.NOT_READ, "vocab.txt", "special_tokens_map.json", "merges.txt"):
        (folder / name).write_text("[0]")
    assert (Encoder.load(str(folder), measures=False).encode(["baka"]).dense == before).all()


def test_flags_names_every_flag_and_variable():
    page = flags_page.page()
    for flag in flags():
        assert f"| `{flag}` | `{flag[2:].replace('-', '_').upper()}` |" in page


def test_limits_names_every_flag_that_is_a_limit():
    named = set(FLAG.findall((FOLDER / "limits.md").read_text(encoding="utf-8")))
    assert not flags("limits") - named


def test_pages_name_no_flag_that_is_not_there():
    own = {
        word
        for name, command in cli.command_parsers().items()
        for _, parser in flags_page._with_actions(name, command)
        for action in parser._actions
        for word in action.option_strings
    }
    # Which names flags that are gone
    for page in sorted({path.name for path in FOLDER.glob("*.md")} - {"upgrade.md"}):
        assert not set(FLAG.findall((FOLDER / page).read_text(encoding="utf-8"))) - own, page


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_no_file_that_is_not_there(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert not [
        file for file in FILE.findall(text) if "NAME" not in file and not (ROOT / file).exists()
    ]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page not in ("README.md", "notebooks/errors.md")]
)
def test_a_page_begins_with_what_it_is_for_and_names_the_next_step(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert text.split("\n")[2].startswith("Use this page ")
    assert re.search(r"\bNext:\s.*\]\(", text)


LINK = re.compile(r"\]\((?!https?:)([^)\s#]*)(?:#([\w-]+))?\)")


def anchors(page):
    """As GitHub makes them of headings: lower case, no punctuation, hyphens for spaces."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md"])
def test_links_lead_somewhere(page):
    for target, anchor in LINK.findall((ROOT / page).read_text(encoding="utf-8")):
        file = (ROOT / page).parent / target if target else ROOT / page
        assert file.exists(), (page, target)
        assert not anchor or anchor in anchors(file), (page, target, anchor)


def test_code_that_holds_backticks_is_one_piece_of_code():
    assert (
        reference._as_html("`` `a` is b ``: `c`")
        == "<p><code>`a` is b</code>: <code>c</code></p>\n"
    )


LIFE = (FOLDER / "life-of-a-request.md").read_text(encoding="utf-8")
PLACE = re.compile(r"`((?:cli|server|retrieval|inference|models|system)(?:\.\w+)+)`")


@pytest.mark.parametrize("name", sorted({*PLACE.findall(LIFE)}))
def test_a_name_in_the_life_of_a_request_exists(name):
    found = hybridtei
    for part in name.split("."):
        with suppress(ModuleNotFoundError):
            import_module(f"{found.__name__}.{part}")
        found = getattr(found, part)


def test_each_life_has_eight_steps():
    steps = [
        re.findall(r"^(\d)\. \*\*", section, re.MULTILINE) for section in LIFE.split("\n## ")[1:]
    ]
    assert steps == [[*"12345678"]] * 3
