"""Rendering: a law of merging, examples of what is refused, and `kubectl kustomize` as the oracle where there is one."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from deploy.render import identity, merged, render
from tests.deploy.command_line import DEPLOY
from tests.server.live import HANG

OVERLAYS = sorted((DEPLOY / "kubernetes/overlays").iterdir())
TREES = st.recursive(
    st.integers() | st.text(),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)


@given(TREES, TREES)
def test_a_patch_has_the_last_word_and_twice_is_once(old: object, new: object) -> None:
    once = merged(old, new)
    assert merged(once, new) == once


def test_named_things_merge_and_other_lists_are_replaced() -> None:
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
def test_renders_what_kubectl_renders(folder: Path) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    text = subprocess.run(
        [kubectl, "kustomize", str(folder)],
        capture_output=True,
        text=True,
        timeout=HANG,
        check=True,
    ).stdout
    ours = {identity(manifest): manifest for manifest in render(folder)}
    assert ours == {identity(manifest): manifest for manifest in yaml.safe_load_all(text)}


def test_what_is_not_read_here_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_text("resources: []\nnamePrefix: x-\n")
    with pytest.raises(ValueError, match="namePrefix: not read here"):
        render(tmp_path)


def test_a_patch_of_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_text("patches: [{path: change.yaml}]\n")
    (tmp_path / "change.yaml").write_text("kind: Service\nmetadata: {name: ghost}\n")
    with pytest.raises(ValueError, match="changes Service ghost, which is not there"):
        render(tmp_path)
