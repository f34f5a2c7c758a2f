"""`python conformance/licences.py`: which licences a dependency may have."""

import pytest

from conformance.licences import verdict


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
def test_licences(text, word):
    assert verdict("package", text) == word
