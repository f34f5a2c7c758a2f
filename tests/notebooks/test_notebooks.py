"""Every notebook runs from its first cell in a fresh kernel, and shows what is stored in it."""

import nbformat
import pytest

from notebooks.writing.execute import VARIES, alike, differences, executed, notebooks

NAMES = [path.stem for path in notebooks()]


def test_there_are_four():
    assert [name[0] for name in NAMES] == ["1", "2", "3", "4"]


# The third measures this machine for minutes
RUN = [
    pytest.param(path, marks=pytest.mark.study if path.stem[0] == "3" else pytest.mark.slow)
    for path in notebooks()
]


@pytest.mark.parametrize("path", RUN, ids=NAMES)
def test_it_shows_what_is_stored(path):
    stored = nbformat.read(path, as_version=4)
    assert not list(differences(stored, executed(path)))


@pytest.mark.parametrize("path", notebooks(), ids=NAMES)
def test_outputs_are_stored_and_free_of_noise(path):
    cells = nbformat.read(path, as_version=4).cells
    outputs = [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]
    assert outputs
    assert all(
        output.output_type != "error" and output.get("name") != "stderr" for output in outputs
    )


def cell(text, *tags):
    shows = nbformat.v4.new_output("stream", text=text)
    return nbformat.v4.new_code_cell(outputs=[shows], metadata={"tags": list(tags)})


def test_another_number_or_word_is_a_difference_unless_it_may_vary():
    stored = nbformat.v4.new_notebook(cells=[cell("score 0.50"), cell("score 0.50", VARIES)])
    same = nbformat.v4.new_notebook(cells=[cell("score 0.51"), cell("1.0")])
    other = nbformat.v4.new_notebook(cells=[cell("score 0.60"), cell("")])
    assert not list(differences(stored, same))
    assert len(list(differences(stored, other))) == 1


@pytest.mark.parametrize(
    ("now", "right"),
    [("a 1.01", True), ("a  1", True), ("b 1", False), ("a 2", False), ("a 1 1", False)],
)
def test_the_same_words_and_nearly_the_same_numbers(now, right):
    assert alike("a 1", now) is right
