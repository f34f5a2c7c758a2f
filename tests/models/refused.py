"""Folders that list other modules, and the error of a refused folder."""

import pytest

from conformance.small import tiny
from hybridtei.errors import LoadError, UnsupportedArchitecture
from hybridtei.inference.backends.graph.ops import family_graph
from hybridtei.models.checkpoint.spec import read_spec
from hybridtei.models.checkpoint.weights import Weights


def raised(kind, folder, name, **options):
    """The message of the error, which must be of just this class and name the file."""
    with pytest.raises(LoadError) as caught:
        read_spec(folder, **options)
    assert type(caught.value) is kind
    assert str(folder / name) in str(caught.value)
    return str(caught.value)


def refuses(folder, kind, message, **options):
    """Reading the folder ends with this error and message."""
    with pytest.raises(kind, match=message):
        read_spec(folder, **options)


def refuses_weights(folder, message, kind=LoadError):
    """Opening the folder's weights ends with this error and message."""
    with pytest.raises(kind, match=message):
        Weights.open(folder)


def refuses_graph(folder, message, kind=UnsupportedArchitecture):
    """No graph is made of the folder: its config.json is refused with this message."""
    with pytest.raises(kind, match=f"{folder}/config.json: {message}"):
        family_graph(read_spec(folder, pooling="mean"))


def listed(folder, *pairs, **modules):
    """The folder, with a modules.json of these classes and their folders."""
    rows = [*pairs, *modules.items()]
    home = "sentence_transformers.models"
    listing = [
        {"type": name if "." in name else f"{home}.{name}", "path": path} for name, path in rows
    ]
    tiny.write_json(folder / "modules.json", listing)
    return folder


def chained(folder, *names):
    """The folder, with a Transformer and these modules, whose settings are empty if there are
    none."""
    paths = {name: f"{number}_{name}" for number, name in enumerate(names, 1)}
    for path in paths.values():
        if not (folder / path / "config.json").exists():
            tiny.write_json(folder / path / "config.json", {})
    return listed(folder, Transformer="", **paths)
