"""The page that decides: every choice of one row a table is a command, and the examples that it
prints are such choices."""

import re
import shlex
from itertools import product

import pytest

from notebooks.writing.execute import FOLDER
from tests.notebooks.test_snippets import Block, commands, parses

PAGE = (FOLDER / "decide.md").read_text(encoding="utf-8")
QUESTIONS = re.findall(r"^## \d\. .*?(?=^## )", PAGE, re.MULTILINE | re.DOTALL)
ANSWERS = [
    [
        (re.findall(r"`([^`]*)`", row) or [""])[0]
        for row in re.findall(r"^\| [^|]* \|([^|]*)\|$", question, re.MULTILINE)[2:]
    ]
    for question in QUESTIONS
]
ENDS = {" ".join(filter(None, ["serve", *words])) for words in product(*ANSWERS)}


def test_there_are_four_questions():
    assert [len(answers) for answers in ANSWERS] == [4, 3, 2, 3]
    assert all(one.startswith("--") for answers in ANSWERS for one in answers if one)


@pytest.mark.parametrize("end", sorted(ENDS))
def test_every_choice_is_a_command(end):
    parses(shlex.split(end))


@pytest.mark.parametrize("answers", sorted({*product(*ANSWERS[:3])}))
def test_an_ingest_takes_the_flags_of_the_first_three_questions(answers):
    flags = shlex.split(" ".join(answers).replace("--reuse-port", ""))
    parses(["ingest", "./documents", "--collection", "notes", *flags])


def test_the_printed_ends_are_choices():
    printed = [
        commands(Block("decide.md", 0, "bash", text))
        for text in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    ]
    assert len(printed) == 6
    assert {shlex.join(words[1:]) for (words,) in printed} <= ENDS
