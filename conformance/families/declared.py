"""Write `hybridtei/models/families/declared.json`: the keys of config.json that transformers reads,
by `model_type`.

    python -m conformance.families.declared          # writes the file, with transformers 5.23
    python -m conformance.families.declared --check  # exits with 1 if the file is out of date

A key counts where the configuration class has a field or an alias of that name, or where the class,
the model's own module or the code that all models share reads it. Wrong vectors are worse than a
refusal: a key too many does less harm than one too few.
"""

import argparse
import ast
import dataclasses
import inspect
import json
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from hybridtei.models.families import SERVED
from hybridtei.models.families.settings import DECLARED

VERSION = "5.23.0"
# Code of every model: the base class, masks, rotary positions, loading, layers that differ,
# quantisation.
SHARED = (
    "configuration_utils",
    "integrations.heterogeneity.configuration_utils",
    "masking_utils",
    "modeling_layers",
    "modeling_rope_utils",
    "modeling_utils",
    "quantizers.auto",
)
# transformers 4 read these for every model; a checkpoint that it trained with another value is
# another model.
EARLIER = frozenset({"position_embedding_type", "pruned_heads", "quantization_config"})
# Functions that are given what config.json holds beyond the fields of the class.
TAKE_REST = frozenset({"__post_init__", "convert_rope_params_to_dict"})


def content() -> str:
    """The file, by the transformers that is installed."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    every = {*EARLIER, "auto_map", "model_type"}.union(*map(_keys_of, map(_module, SHARED)))
    every.update(field.name for field in dataclasses.fields(_base()))
    lines = [
        f'"transformers": {json.dumps(VERSION)}',
        f'"every": {json.dumps(sorted(_public(every)))}',
    ]
    for model_type in sorted({*SERVED}.intersection(CONFIG_MAPPING.keys())):
        own = _public(_own(CONFIG_MAPPING[model_type])) - every
        lines.append(f"{json.dumps(model_type)}: {json.dumps(sorted(own))}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _own(config_class: Any) -> set[str]:
    place = config_class.__module__
    modules = (_module(place), _module(place.replace(".configuration_", ".modeling_")))
    fields = {field.name for field in dataclasses.fields(config_class)}
    return fields.union(config_class.attribute_map, *map(_keys_of, modules))


def _module(name: str) -> ModuleType:
    return import_module(name if name.startswith("transformers.") else f"transformers.{name}")


def _base() -> Any:
    return _module("configuration_utils").PreTrainedConfig


def _public(names: Iterable[str]) -> set[str]:
    """Without the methods of the base class and of dictionaries, which are called and not read, and
    Python's own names."""
    return {
        name
        for name in names
        if not callable(getattr(_base(), name, getattr(dict, name, None))) and name[:2] != "__"
    }


def _keys_of(module: ModuleType) -> set[str]:
    """Names that code reads from a configuration: attributes, texts of `getattr`, `get`, `pop`,
    `in` and brackets."""
    tree = ast.parse(inspect.getsource(module))
    found = set(_reads(tree, {"config", "config_dict"}))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in TAKE_REST:
            found.update(_reads(node, {"kwargs", "self"}))
    return found


def _reads(tree: ast.AST, holders: Collection[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=holder, attr=name) if "config" in holders:
                pass
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr"),
                args=[holder, ast.Constant(value=str(name)), *_],
            ):
                pass
            case ast.Call(
                func=ast.Attribute(value=holder, attr="get" | "pop" | "setdefault"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                pass
            case ast.Subscript(value=holder, slice=ast.Constant(value=str(name))):
                pass
            case ast.Compare(
                left=ast.Constant(value=str(name)),
                ops=[ast.In() | ast.NotIn()],
                comparators=[holder],
            ):
                pass
            case _:
                continue
        # Of `config`, or of `self.config`
        last = getattr(holder, "id", None) or getattr(holder, "attr", None)
        if last in holders:
            yield name


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 1 if `--check` finds that the file is out of date, 2 with another
    transformers."""
    import transformers

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args(argv).check
    if transformers.__version__ != VERSION:
        print(
            f"transformers {transformers.__version__} is installed; the file is of {VERSION}",
            file=sys.stderr,
        )
        return 2
    if not check:
        DECLARED.write_text(content(), encoding="utf-8")
    elif DECLARED.read_text(encoding="utf-8") != content():
        print(
            f"{DECLARED} is out of date: python -m conformance.families.declared", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
