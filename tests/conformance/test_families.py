"""`conformance/families`: what its tables say is what was computed."""

import numpy as np
import pytest

from conformance.families import __main__ as table
from conformance.families.oracle import VECTOR_TOLERANCE, Difference, States, difference, unit_means
from hybridtei.batch import Encoding
from tests.precisions import runs_here

pytest.importorskip("openvino")
TEXTS = [Encoding(np.arange(length)) for length in (2, 3)]
EXPECTED = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)


def test_a_family_within_the_tolerances(capsys: pytest.CaptureFixture[str]) -> None:
    assert table.main(["bert"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == ["bert"] * 3
    assert lines[-1].startswith("3 checkpoints, 0 beyond")


IN_FEWER_BITS = {"int8": ["ort", "openvino"], "bfloat16": ["openvino", "torch"]}


@pytest.mark.parametrize(
    ("dtype", "engines"),
    [(dtype, engines) for dtype, engines in IN_FEWER_BITS.items() if runs_here("openvino", dtype)],
)
def test_a_family_in_fewer_bits(
    capsys: pytest.CaptureFixture[str], dtype: str, engines: list[str]
) -> None:
    assert table.main(["gte", "--dtype", dtype]) == 0
    head, row, last = capsys.readouterr().out.splitlines()
    assert head.split()[2:-2:2] == [engine for engine in engines for _ in range(2)]
    assert (
        max(float(figure) for figure in row.split()[2:]) > VECTOR_TOLERANCE
    )  # float32 would be below
    assert last.startswith("1 checkpoints, 0 beyond")


def test_a_family_beyond_the_tolerances(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = table.reference
    monkeypatch.setattr(table, "reference", lambda *given: reference(*given) + np.float32(1e-4))
    assert table.main(["gte"]) == 1
    assert "BEYOND" in capsys.readouterr().out


@pytest.mark.parametrize("form", ["together", "alone"])
@pytest.mark.parametrize("wrong", [1e-3, float("nan")])
def test_one_wrong_number_of_either_form_is_seen(form: str, wrong: float) -> None:
    changed = EXPECTED.copy()
    changed[3, 2] += wrong
    assert difference(States(EXPECTED, EXPECTED), EXPECTED, TEXTS) == Difference(0, 0)
    assert not difference(
        States(**{"together": EXPECTED, "alone": EXPECTED, form: changed}), EXPECTED, TEXTS
    ).is_within


def test_vectors_are_means_of_length_one() -> None:
    vectors = unit_means(EXPECTED, TEXTS)
    mean = EXPECTED[2:].mean(0)
    np.testing.assert_allclose(vectors[1], mean / np.linalg.norm(mean), rtol=1e-6)
