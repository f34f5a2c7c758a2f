"""What a terminal gets: no control character of a document, except line feeds and tabs."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.system.terminal import BOLD, CONTROLS, PLAIN, TerminalStream, without_passwords


class Terminal(io.StringIO):
    def isatty(self):
        return True


@given(st.text(st.characters(max_codepoint=0x2FF)))
def test_nothing_that_a_terminal_obeys_is_written(text):
    stream = io.StringIO()
    print("title", text, file=TerminalStream(stream))
    assert not CONTROLS.search(stream.getvalue().lstrip("\r"))


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("\x1b]52;c;ZXZpbA==\x07", "\\u001b]52;c;ZXZpbA==\\u0007"),
        ("a\rb", "a\\u000db"),
        ("\x9b31m", "\\u009b31m"),
        ("a\tb\nc é 東", "a\tb\nc é 東"),
        ("\r 50%|#####     |", "\r 50%|#####     |"),
    ],
)
def test_examples(text, written):
    stream = io.StringIO()
    TerminalStream(stream).write(text)
    assert stream.getvalue() == written


def test_only_a_terminal_gets_bold_text():
    text = f"{BOLD}word{PLAIN}"
    terminal, pipe = Terminal(), io.StringIO()
    TerminalStream(terminal).write(text)
    TerminalStream(pipe).write(text)
    assert terminal.getvalue() == text
    assert pipe.getvalue() == "\\u001b[1mword\\u001b[0m"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("at http://user:secret@h:1/a@b", "at http://[hidden]@h:1/a@b"),
        ("'https://token@h', http://h/x@y", "'https://[hidden]@h', http://h/x@y"),
        ("a@b.example", "a@b.example"),
    ],
)
def test_passwords_of_urls_are_hidden(text, shown):
    assert without_passwords(text) == shown
