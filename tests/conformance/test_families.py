"""`conformance/families`: what its tables say is what was computed."""

import numpy as np
import pytest

from conformance.families import __main__ as table
from conformance.families.oracle import VECTOR_TOLERANCE
from tests.precisions import runs_here

pytest.importorskip("openvino")


IN_FEWER_BITS = {"int8": ["ort", "openvino"], "bfloat16": ["openvino", "torch"]}


@pytest.mark.parametrize(
    ("dtype", "engines"),
    [(dtype, engines) for dtype, engines in IN_FEWER_BITS.items() if runs_here("openvino", dtype)],
)
def test_a_family_in_fewer_bits(capsys, dtype, engines):
    assert table.main(["gte", "--dtype", dtype]) == 0
    head, row, last = capsys.readouterr().out.splitlines()
    assert head.split()[2:-2:2] == [engine for engine in engines for _ in range(2)]
    assert (
        max(float(figure) for figure in row.split()[2:]) > VECTOR_TOLERANCE
    )  # float32 would be below
    assert last.startswith("1 checkpoints, 0 beyond")


def test_a_family_beyond_the_tolerances(capsys, monkeypatch):
    reference = table.reference
    monkeypatch.setattr(table, "reference", lambda *given: reference(*given) + np.float32(1e-4))
    assert table.main(["gte"]) == 1
    assert "BEYOND" in capsys.readouterr().out
