"""`explain`: the cause and remedy of an error, by the name that a command printed. The texts are those of
`/page/errors.html`."""

from __future__ import annotations

import argparse
import html
import re
import textwrap
from pathlib import Path

from hybridtei.cli.flags import Commands, new_parser
from hybridtei.errors import UsageError

PAGE = Path(__file__).parents[1] / "server/page/errors.html"
SECTION = re.compile(r'<h2 id="[^"]+">(.*?)</h2>\n(.*?)(?=<h2|</main>|</body>|\Z)', re.DOTALL)
PARAGRAPH = re.compile(r"<p>(.*?)</p>", re.DOTALL)
TAG = re.compile(r"<[^>]+>")
WIDTH = 100


def add(commands: Commands) -> None:
    """Add the command `explain`."""
    parser = new_parser(commands, "explain", "Say what causes an error and what cures it.")
    parser.add_argument("name", metavar="NAME", help="the error's name, such as LoadError")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Print the section of an error. Raises UsageError for an unknown name."""
    sections = {html.unescape(name).lower(): (name, body) for name, body in SECTION.findall(PAGE.read_text(encoding="utf-8"))}
    found = sections.get(arguments.name.lower())
    if found is None:
        raise UsageError(
            f"NAME is {arguments.name!r}, which is no error; known: {', '.join(name for name, _ in sections.values())}"
        )
    name, body = found
    print(name)
    for paragraph in PARAGRAPH.findall(body):
        text = html.unescape(TAG.sub("", paragraph.replace("<code>", "`").replace("</code>", "`")))
        print(f"\n{textwrap.fill(text, WIDTH, break_long_words=False)}", flush=True)
