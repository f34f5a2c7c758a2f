"""Kustomizations as a cluster gets them."""

import shutil

import pytest
import yaml

from tests.ran import ran


def render(folder):
    """The manifests of a kustomization, by kubectl, which the extra `dev` installs."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed", allow_module_level=True)
    return [*yaml.safe_load_all(ran([kubectl, "kustomize", str(folder)], check=True).stdout)]
