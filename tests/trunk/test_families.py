"""The table of families: what is packed, what is padded, and which masked-language-model heads are known."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hybridtei.errors import UnsupportedArchitecture
from hybridtei.trunk.families import is_packed, mlm_head


@pytest.mark.parametrize("model_type", ["t5", "bart", "something-new", "distilbert", "mpnet", "deberta", "deberta-v2"])
def test_a_family_that_is_not_listed_runs_padded(model_type: str) -> None:
    assert not is_packed(model_type)


def test_an_unknown_masked_language_model_head_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedArchitecture, match="SimpleNamespace"):
        mlm_head(SimpleNamespace(generator_predictions=None), "electra")
