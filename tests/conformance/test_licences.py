"""`python conformance/licences.py`: which licences a dependency may have."""

import pytest

from conformance.licences import dependencies, verdict


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("MPL-2.0 AND (Apache-2.0 OR MIT)", "allowed"),
        ("Python Software Foundation License", "allowed"),
        ("BSD-3-Clause AND Zlib", "similar"),
        ("ISC License (ISCL)", "similar"),
        ("LGPL-3.0", "other"),
        ("BSD-3-Clause, Apache-2.0, dependency licenses", "other"),
        ("none", "other"),
    ],
)
def test_licences(text: str, word: str) -> None:
    assert verdict("package", text) == word


def test_extras_count() -> None:
    assert {"hybridtei", "numpy", "torch", "ray", "qdrant-client", "grpcio"} <= set(
        dependencies("hybridtei")
    )


def test_a_text_that_a_reader_of_the_package_knows() -> None:
    assert verdict("pypdfium2", "BSD-3-Clause, Apache-2.0, dependency licenses") == "similar"
