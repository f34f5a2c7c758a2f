"""Rotary embeddings whose frequencies follow the length of a text: `longrope` and `dynamic`.

transformers picks them once a pass, by the largest position in it, and keeps what it picked in the module. So a text would
depend on the texts beside it, on those before it, and on what another thread does meanwhile. Here such a module answers
each call from a copy as it was loaded; that a pass holds one sequence only is the trunk's business.
"""

from __future__ import annotations

import copy
from typing import Any


def forget_lengths(model: Any) -> bool:
    """Whether any rotary embedding of the model follows the length; from here on those that do keep nothing of it."""
    following = [module for module in model.modules() if _follows_length(module)]
    for module in following:
        module.forward = _Fresh(module)
    return bool(following)


def _follows_length(module: Any) -> bool:
    declared = getattr(module, "rope_type", None)
    kinds = declared.values() if isinstance(declared, dict) else [declared]  # one for all layers, or one a kind of layer
    return any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds)


class _Fresh:
    """Calls a copy of the module as it is now; the copy has buffers of its own, since longrope writes into them."""

    def __init__(self, module: Any) -> None:
        self._pristine = _copy(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _copy(self._pristine)(*args, **kwargs)


def _copy(module: Any) -> Any:
    twin = copy.copy(module)
    twin._buffers = {name: None if buffer is None else buffer.clone() for name, buffer in module._buffers.items()}
    return twin
