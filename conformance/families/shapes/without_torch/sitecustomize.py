"""First on PYTHONPATH: a process in which torch, transformers and what exports graphs cannot be
imported or found."""

import importlib.util
import sys

ABSENT = ("torch", "transformers", "sentence_transformers", "onnx", "onnxscript")


class Without:
    """A finder that refuses what is absent, and knows nothing else."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Raise ModuleNotFoundError, as the last finder's caller does."""
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def _find_spec(name: str, package: str | None = None) -> object:
    return None if name.partition(".")[0] in ABSENT else found(name, package)


found = importlib.util.find_spec
# What asks whether a package is there
importlib.util.find_spec = _find_spec  # type: ignore[assignment]
sys.meta_path.insert(0, Without())  # type: ignore[arg-type]
