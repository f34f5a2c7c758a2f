"""Rendering: a law of merging, examples of what is refused, and `kubectl kustomize` as the oracle where there is one."""

import shutil

import pytest
import yaml

from deploy.render import identity, merged, render
from tests.deploy.command_line import DEPLOY
from tests.ran import ran

OVERLAYS = sorted((DEPLOY / "kubernetes/overlays").iterdir())


def test_named_things_merge_and_other_lists_are_replaced():
    old = {
        "containers": [
            {"name": "a", "env": [{"name": "X", "value": "1"}], "args": ["1", "2"]},
            {"name": "b"},
        ],
        "kept": 1,
    }
    new = {
        "containers": [{"name": "a", "env": [{"name": "Y", "value": "2"}], "args": ["3"]}],
        "kept": None,
    }
    assert merged(old, new) == {
        "containers": [
            {
                "name": "a",
                "env": [{"name": "Y", "value": "2"}, {"name": "X", "value": "1"}],
                "args": ["3"],
            },
            {"name": "b"},
        ]
    }


@pytest.mark.parametrize("folder", OVERLAYS, ids=lambda folder: folder.name)
def test_renders_what_kubectl_renders(folder):
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    text = ran([kubectl, "kustomize", str(folder)], check=True).stdout
    ours = {identity(manifest): manifest for manifest in render(folder)}
    assert ours == {identity(manifest): manifest for manifest in yaml.safe_load_all(text)}
