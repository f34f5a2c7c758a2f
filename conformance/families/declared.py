"""Write `hybridtei/models/families/declared.json`: the keys of config.json that transformers reads,
by `model_type`; and `hybridtei/models/checkpoint/declared.json`: the keys that
sentence-transformers' classes of modules take.

    python -m conformance.families.declared          # writes both, with transformers 5.23
    python -m conformance.families.declared --check  # exits with 1 if a file is out of date

A key counts where the configuration class has a field or an alias of that name, or where the class,
the model's own module or what this module imports of the shared code reads it. A key that only
other models' code reads does not count: transformers ignores it in this family.
"""

import argparse
import ast
import dataclasses
import inspect
import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from hybridtei.models.checkpoint import keys
from hybridtei.models.families import SERVED
from hybridtei.models.families.settings import DECLARED

VERSION = "5.23.0"
# Code that models share: masks, layers and rotary positions. It counts for the models that import
# it
SHARED = ("masking_utils", "modeling_layers", "modeling_rope_utils")
# The base of all classes reads these, or transformers 4 did; a checkpoint that it trained with
# another value is another model.
EARLIER = frozenset({"per_layer_config", "pruned_heads", "quantization_config"})
# Modules of sentence-transformers, and arguments of their classes that are no keys of files.
MODULES = {
    "base": ("Dense", "Transformer"),
    "cross_encoder": ("LogitScore",),
    "multi_vector_encoder": ("HierarchicalTokenPooling", "MultiVectorMask"),
    "sentence_transformer": ("LayerNorm", "Pooling"),
    "sparse_encoder": ("MLMTransformer", "SparseAutoEncoder", "SpladePooling"),
}
NO_KEYS = frozenset({"self", "model_name_or_path", "backend", "init_weight", "init_bias", "kwargs"})
OLD_KEYS = {"Transformer": ("config_args", "model_args", "tokenizer_args")}
# Functions that are given what config.json holds beyond the fields of the class.
TAKE_REST = frozenset({"__post_init__", "convert_rope_params_to_dict"})


def content() -> str:
    """The file, by the transformers that is installed."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    every = {*EARLIER, "auto_map", "model_type"}
    every.update(field.name for field in dataclasses.fields(_base()))
    keys = {
        model_type: sorted(_public(every | _own(CONFIG_MAPPING[model_type])))
        for model_type in sorted({*SERVED}.intersection(CONFIG_MAPPING.keys()))
    }
    return _written({"transformers": VERSION, **keys})


def modules_content() -> str:
    """The file of modules, by the sentence-transformers that is installed."""
    keys = {}
    for package, names in MODULES.items():
        module = import_module(f"sentence_transformers.{package}.modules")
        for name in names:
            taken = getattr(module, name)
            found = {*inspect.signature(taken).parameters, *taken.config_key_renames}
            keys[name] = sorted(found.union(OLD_KEYS.get(name, ())) - NO_KEYS)
    keys["MLMTransformer"] = keys["Transformer"] = sorted(
        {*keys["Transformer"], *OLD_KEYS["Transformer"]}
    )
    return _written(keys)


def _written(keys: Mapping[str, Any]) -> str:
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in keys.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _own(config_class: Any) -> set[str]:
    place = config_class.__module__
    modules = (_module(place), _module(place.replace(".configuration_", ".modeling_")))
    fields = {field.name for field in dataclasses.fields(config_class)}
    imported = {name: parts for module in modules for name, parts in _imported(module)}
    shared = (_keys_of(_module(name), parts) for name, parts in imported.items())
    return fields.union(config_class.attribute_map, *map(_keys_of, modules), *shared)


def _imported(module: ModuleType) -> Iterator[tuple[str, Collection[str] | None]]:
    """What a module imports of the shared code; None: all of it, since tables name its
    functions."""
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.ImportFrom) and node.module in SHARED:
            whole = node.module == "modeling_rope_utils"
            yield node.module, None if whole else {name.name for name in node.names}


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


def _keys_of(module: ModuleType, parts: Collection[str] | None = None) -> set[str]:
    """Names that code reads from a configuration: attributes, texts of `getattr`, `get`, `pop`,
    `in` and brackets. `parts`: functions and classes; with those that they name."""
    tree = ast.parse(inspect.getsource(module))
    if parts is not None:
        named = {getattr(node, "name", ""): node for node in tree.body}
        reached, added = set[str](), {*parts} & named.keys()
        while added:
            reached |= added
            nodes = [node for name in added for node in ast.walk(named[name])]
            names = {node.id for node in nodes if isinstance(node, ast.Name)}
            added = (names & named.keys()) - reached
        tree = ast.Module([named[name] for name in sorted(reached)], [])
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
    outdated = 0
    for file, written in ((DECLARED, content()), (keys.DECLARED, modules_content())):
        if not check:
            file.write_text(written, encoding="utf-8")
        elif file.read_text(encoding="utf-8") != written:
            print(
                f"{file} is out of date: python -m conformance.families.declared", file=sys.stderr
            )
            outdated = 1
    return outdated


if __name__ == "__main__":
    raise SystemExit(main())
