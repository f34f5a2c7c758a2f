"""The error of a refused folder."""

import pytest

from hybridtei.errors import LoadError
from hybridtei.models.checkpoint.spec import read_spec


def raised(kind, folder, name, **options):
    """The message of the error, which must be of just this class and name the file."""
    with pytest.raises(LoadError) as caught:
        read_spec(folder, **options)
    assert type(caught.value) is kind
    assert str(folder / name) in str(caught.value)
    return str(caught.value)
