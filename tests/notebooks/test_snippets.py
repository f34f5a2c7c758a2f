"""Code of all pages: blocks of Python run, curl is asked, and commands, in a block or a sentence,
are ones that there are.

Blocks of a page run in order and share names. A block for software that is not installed here is
compiled, and skipped.
"""

import ast
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import dropwhile
from pathlib import Path

import pytest

from hybridtei.cli import command_parsers, explicit_booleans
from hybridtei.cli.flags import SETTINGS, from_flags
from hybridtei.errors import UsageError
from tests.server.live import HANG, process

ROOT = Path(__file__).parents[2]
PAGES = [
    file
    for folder in (".", "deploy", "notebooks", "conformance/quality")
    for file in sorted((ROOT / folder).glob("*.md"))
]
SCRIPT = re.compile(r"`(python [^`\n…]+)`")
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ANSWER = re.compile(
    r"^```bash\n(curl (?:(?!^```).)*)^```\n\n```json\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
ADDRESS = re.compile(r"http://(?:127\.0\.0\.1|localhost):(?:3000|8080)")
STORE = re.compile(r"(?:127\.0\.0\.1|localhost):633[34]")
# Of a line, with its comment
UNQUOTED_END = re.compile(r"""('[^']*'|"(?:\\.|[^"\\])*")|(?:(?<!\S)#[^\n]*)?\n""")
ASSIGNMENT = re.compile(r"^\w+=")
DOCKER_VALUES = re.compile("-[pvetf]|--(name|gpus|target|network|shm-size|stop-timeout)")


@dataclass(frozen=True)
class Block:
    """A fenced block, and the line it begins in."""

    page: str
    line: int
    language: str
    text: str


def blocks(*languages):
    found = []
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(path.relative_to(ROOT).as_posix(), line, match[1], match[2]))
    return [block for block in found if block.language in languages]


def commands(block):
    """The words of each command: lines joined, comments and assignments of variables away, split at
    `&&` and pipes."""
    text = UNQUOTED_END.sub(lambda match: match[1] or " ; ", block.text.replace("\\\n", " "))
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|")
    lexer.whitespace_split, lexer.commenters = True, ""
    found = [[]]
    for word in lexer:
        if word and set(word) <= set(";&|"):
            found.append([])
        else:
            found[-1].append(word)
    bare = ([*dropwhile(ASSIGNMENT.match, words)] for words in found)
    return [*filter(None, bare)]


def ids(found):
    return [f"{block.page}:{block.line}" for block in found]


KEY = "the-key"
SERVE = ("-m", "hybridtei", "serve", "--hostname", "127.0.0.1", "--port", "0")
PARSERS = command_parsers()
PYTHON, SHELL = blocks("python"), blocks("bash", "sh", "shell", "console")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """The folder of the collections that the pages' servers share."""
    return str(tmp_path_factory.mktemp("store") / "qdrant")


@pytest.fixture(scope="module")
def url(store):
    """Of a server of the embedded model, as the pages start it."""
    with process([*SERVE, "--qdrant-path", store]) as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def keyed(store):
    """Of another server over the same folder, for commands that send `$KEY`."""
    with process([*SERVE, "--qdrant-path", store, "--api-key", KEY]) as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def names():
    """The names that each page has defined so far."""
    return {}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Which forbids it this machine's own address too
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for name in re.findall(
        r"\w+", "HTTP_PROXY HTTPS_PROXY ALL_PROXY http_proxy https_proxy all_proxy"
    ):
        monkeypatch.delenv(name, raising=False)


# Not by `ast.parse`, which fails in Python 3.11 beside another thread
IMPORTED = re.compile(r"^\s*(?:from|import) (\w+)", re.MULTILINE)


def missing(code):
    """Packages that a block imports and that are not installed."""
    return sorted(name for name in {*IMPORTED.findall(code)} if find_spec(name) is None)


# What a snippet of Python or a command needs, by the name of the extra that brings it
NEEDS = re.compile(
    r"""
    (?P<eval>    ^hybridtei[ ]eval\b)
  | (?P<mcp>     ^hybridtei[ ]mcp\b(?!.*--url[ ]))
  | (?P<qdrant>  \bqdrant_(?:client|edge)\b | \b(?:open_store|Index\.open|\.upsert|\.save)\(
                 | --qdrant- | ^hybridtei[ ](?:ingest|ask|migrate|collections)\b
                 | ^hybridtei[ ]search\b(?!.*--url[ ]))
  | (?P<torch>   --backend[ ]torch | ^hybridtei[ ]train\b | \bimport[ ]torch\b)
  | (?P<parquet> \.parquet\b)
  | (?P<watch>   --watch\b)
  | (?P<ray>     --engine[ ]ray)
  | (?P<grpc>    --grpc-port)
  | (?P<otlp>    --otlp-endpoint)
    """,
    re.MULTILINE | re.VERBOSE,
)
NAMED = re.compile(r"(?:\.\[|extra\s`)([\w,]+)")


@pytest.mark.parametrize("page", sorted({block.page for block in PYTHON + SHELL}))
def test_a_page_names_the_extras_that_its_snippets_need(page):
    found = NAMED.findall((ROOT / page).read_text(encoding="utf-8"))
    named = {*",".join(found).split(",")}
    code = "".join(block.text for block in PYTHON + SHELL if block.page == page)
    assert {found.lastgroup for found in NEEDS.finditer(code)} <= named


# Other people's software may warn
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("block", PYTHON, ids=ids(PYTHON))
def test_python_runs(block, names, request):
    code = compile(
        block.text, f"{block.page}:{block.line}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    )
    absent = missing(block.text)
    if absent:
        pytest.skip(f"compiled only: {', '.join(absent)} not installed")
    if STORE.search(block.text):
        pytest.skip("compiled only: wants a Qdrant server")
    text = (
        ADDRESS.sub(request.getfixturevalue("url"), block.text)
        if ADDRESS.search(block.text)
        else block.text
    )
    code = compile(text, f"{block.page}:{block.line}", "exec")
    exec(code, names.setdefault(block.page, {"__name__": "snippet"}))


@pytest.mark.parametrize("block", SHELL, ids=ids(SHELL))
def test_commands_are_ones_that_there_are(block, request):
    for words in commands(block):
        check(words, request)


ANSWERS = [
    (path.name, *found.groups())
    for path in PAGES
    for found in ANSWER.finditer(path.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize(
    ("page", "command", "answer"),
    ANSWERS,
    ids=[page for page, *_ in ANSWERS],
)
def test_an_answer_has_the_fields_that_its_page_shows(page, command, answer, request):
    *_, last = [asked(words, request) for words in commands(Block(page, 0, "bash", command))]
    assert shape(json.loads(last)) == shape(json.loads(answer))


def shape(value):
    """The keys and types of an answer; of a list, those of its first item."""
    if isinstance(value, dict):
        return {key: shape(one) for key, one in value.items()}
    if isinstance(value, list):
        return [shape(one) for one in value[:1]]
    return "number" if type(value) in (int, float) else type(value).__name__


SCRIPTS = [
    (path.name, found[1])
    for path in PAGES
    for found in SCRIPT.finditer(path.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize(("page", "command"), SCRIPTS)
def test_scripts_in_sentences_are_there_with_their_flags(page, command):
    python(shlex.split(command)[1:])


def test_every_room_and_folder_is_on_the_contributors_map():
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rooms = {file.parent.name for file in (ROOT / "hybridtei").glob("*/__init__.py")}
    beside = {"tests", "conformance", "deploy", "notebooks"}
    assert {name for name in rooms | beside if f"`{name}/`" not in page} == set()


def check(words, request):
    """Raises AssertionError, or what parsing raises, for a command that nobody could type."""
    name, rest = words[0], words[1:]
    if name == "curl":
        asked(words, request)
    elif name in ("hybridtei", "text-embeddings-router"):
        parses(["serve", *rest] if name != "hybridtei" else rest)
    elif name in ("python", "python3"):
        python(rest)
    elif name == "docker":
        docker(rest)
    elif name == "pip":
        installs(rest)
    else:
        tools = "ruff|mypy|lint-imports|pre-commit|[.]|kubectl|systemctl|text"
        assert re.fullmatch(tools, name), f"{name}: say in this test how it is checked"


def parses(words):
    """A command of hybridtei, as its own parser reads it."""
    given = vars(PARSERS[words[0]].parse_args(explicit_booleans(words[1:])))
    if isinstance(given.get("model_id"), list):
        given["model_id"] = given["model_id"][0]
    words_only = {
        name: str(value) if type(value) in (int, float) else value for name, value in given.items()
    }
    # A command's own flag may share a name with a setting, and be a number already
    for kind in SETTINGS:
        from_flags(kind, words_only, {})


def python(words):
    words = words[words[:1] == ["-P"] :]
    # With any command
    if words == ["-m", "hybridtei"]:
        return
    if words[:2] == ["-m", "hybridtei"]:
        parses(words[2:])
    elif words[:2] == ["-m", "pip"]:
        installs(words[2:])
    elif words[0] == "-m" and words[1] in ("pytest", "venv"):
        return
    else:
        source = module(words[1]) if words[0] == "-m" else ROOT / words[0]
        assert source.is_file(), f"{source}: is not there"
        files = sorted(source.parent.glob("*.py")) if source.name == "__main__.py" else [source]
        text = "".join(file.read_text(encoding="utf-8") for file in files)
        for flag in (word.partition("=")[0] for word in words[1:] if word.startswith("--")):
            positive = flag.replace("--no-", "--")
            assert (
                (flag == "--help" and "ArgumentParser(" in text)
                or f'"{flag}"' in text
                or f'"{positive}"' in text
            ), f"{source.name} has no {flag}"


def module(name):
    path = ROOT / name.replace(".", "/")
    return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")


def installs(words):
    """Extras and constraint files are there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for before, word in zip(["", *words], words, strict=False):
        if before == "-c":
            assert (ROOT / word).is_file()
        for extras in re.findall(r"^(?:\.|hybridtei)\[([\w,-]+)\]", word):
            assert set(extras.split(",")) <= set(project["optional-dependencies"])


def docker(words):
    """What stands behind the image's name are flags of `serve`."""
    if words[0] != "run":
        return
    rest = words[1:]
    while rest and rest[0].startswith("-"):
        rest = rest[2:] if DOCKER_VALUES.fullmatch(rest[0]) else rest[1:]
    parses(["serve", *rest[1:]])


def asked(words, request):
    """The answer of a server that runs to the same request."""
    if not shutil.which("curl"):
        pytest.skip("curl is not installed")
    address = request.getfixturevalue("keyed" if any("$KEY" in word for word in words) else "url")
    assert any(ADDRESS.match(word) for word in words), (
        f"{words}: of another address than the pages' own"
    )
    real = [ADDRESS.sub(address, word).replace("$KEY", KEY) for word in words[1:]]
    done = subprocess.run(
        ["curl", "--silent", "--show-error", "--fail-with-body", "--noproxy", "*", *real],
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_every_page_is_found_and_has_no_block_in_a_language_that_nobody_checks():
    found = blocks(
        *(match[1] for path in PAGES for match in FENCE.finditer(path.read_text(encoding="utf-8")))
    )
    known = re.compile("python|bash|yaml|toml|json|diff|text|ini|console|sh|shell")
    assert all(known.fullmatch(block.language) for block in found)
    assert {block.page for block in found} >= {
        "README.md",
        "notebooks/clients.md",
        "notebooks/tuning.md",
    }


@pytest.mark.parametrize(
    "text",
    ["hybridtei serve --no-such-flag", "hybridtei serve --port many", "docker run x --nothing y"],
)
def test_a_wrong_command_is_refused(text, request):
    (words,) = commands(Block("here", 1, "bash", text))
    with pytest.raises((SystemExit, UsageError)):
        check(words, request)
