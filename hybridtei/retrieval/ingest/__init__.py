"""Documents from files into a collection: `hybridtei.ingest(...)`, which is this package, called."""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """Python binds `hybridtei.ingest` to this package at its import, over the function of that name."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return import_module("hybridtei.retrieval.ingest.run").ingest(*arguments, **options)


sys.modules[__name__].__class__ = _Callable
