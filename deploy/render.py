"""A kustomization as the manifests a cluster would get, for machines without kubectl.

    python deploy/render.py deploy/kubernetes/overlays/cpu

Reads the part of kustomize that ours uses: resources, components, strategic-merge patches and image
tags; anything else is refused, never skipped. Where kubectl is, a test holds the result against
`kubectl kustomize`. A surprise of strategic merges: lists of named things merge by a key of their
kind, and all other lists are replaced.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]
KNOWN = frozenset({"apiVersion", "kind", "resources", "components", "patches", "images"})
KEYS = {
    "containers": "name",
    "env": "name",
    "ports": "containerPort",
    "volumeMounts": "mountPath",
    "volumes": "name",
}


def render(folder: Path, below: Sequence[Manifest] = ()) -> list[Manifest]:
    """The manifests of a kustomization. `below`: what a component changes. Raises ValueError for
    what is not known here."""
    file = folder / "kustomization.yaml"
    settings = yaml.safe_load(file.read_text())
    unknown = settings.keys() - KNOWN
    if unknown:
        raise ValueError(
            f"{file}: {', '.join(sorted(unknown))}: not read here; read are "
            f"{', '.join(sorted(KNOWN))}"
        )
    manifests = [*below]
    for name in settings.get("resources", ()):
        path = folder / name
        manifests += render(path) if path.is_dir() else _documents(path)
    for name in settings.get("components", ()):
        manifests = render(folder / name, manifests)
    for patch in settings.get("patches", ()):
        for change in _documents(folder / patch["path"]):
            manifests = _patched(manifests, change, folder / patch["path"])
    for image in settings.get("images", ()):
        for manifest in manifests:
            _tag(manifest, image["name"], image["newTag"])
    return manifests


def identity(manifest: Manifest) -> tuple[str, str]:
    """(kind, name)."""
    return manifest["kind"], manifest["metadata"]["name"]


def merged(old: Any, new: Any, name: str = "") -> Any:
    """A strategic merge: `new` over `old`; a null deletes, and of lists the new items come
    first."""
    if isinstance(old, dict) and isinstance(new, dict):
        together = {**old, **{key: merged(old.get(key), value, key) for key, value in new.items()}}
        return {key: value for key, value in together.items() if value is not None}
    if isinstance(old, list) and isinstance(new, list) and name in KEYS:
        key = KEYS[name]
        changes = {item[key]: item for item in new}
        kept = [
            merged(item, changes.pop(item[key])) if item[key] in changes else item for item in old
        ]
        order = {item[key]: place for place, item in enumerate(new)}
        return sorted(
            kept + list(changes.values()), key=lambda item: order.get(item[key], len(order))
        )
    return new


def _patched(manifests: list[Manifest], change: Manifest, file: Path) -> list[Manifest]:
    if identity(change) not in map(identity, manifests):
        raise ValueError(f"{file}: changes {' '.join(identity(change))}, which is not there")
    return [
        merged(each, change) if identity(each) == identity(change) else each for each in manifests
    ]


def _tag(manifest: Manifest, name: str, tag: str) -> None:
    for container in (
        manifest.get("spec", {}).get("template", {}).get("spec", {}).get("containers", ())
    ):
        if container["image"].partition(":")[0] == name:
            container["image"] = f"{name}:{tag}"


def _documents(path: Path) -> list[Manifest]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def main() -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of a kustomization.yaml")
    print(yaml.safe_dump_all(render(parser.parse_args().folder), sort_keys=False), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
