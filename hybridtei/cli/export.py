"""`export`: write a model as ONNX files with their weights."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from hybridtei.cli.flags import Commands, add_flags, new_parser, read_settings
from hybridtei.config import ModelConfig
from hybridtei.errors import UsageError


def add(commands: Commands) -> None:
    """Add the command `export` and its flags."""
    parser = new_parser(commands, "export", "write a model as ONNX files, for others too")
    parser.add_argument("model", metavar="MODEL", help="a local folder, a hub id, or the embedded model")
    parser.add_argument("out", metavar="OUT", help="folder to write")
    parser.add_argument("--min-cosine", type=float, default=0.97, help="int8: least cosine to float32 [default: 0.97]")
    parser.add_argument("--min-mean-cosine", type=float, default=0.99, help="int8: on average [default: 0.99]")
    add_flags(parser, (ModelConfig,))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Write a model as ONNX files with their weights."""
    model = msgspec.structs.replace(read_settings(arguments, ModelConfig), model_id=arguments.model)
    dtype = model.dtype or "float32"
    if dtype not in ("float32", "int8"):
        raise UsageError(f"--dtype is {dtype}; export writes float32 or int8")
    from hybridtei.backends.fidelity import Guard
    from hybridtei.backends.graph.onnx_files import export_model
    from hybridtei.load import find_model

    guard = Guard(worst=arguments.min_cosine, mean=max(arguments.min_cosine, arguments.min_mean_cosine))
    print(export_model(find_model(model), Path(arguments.out), dtype, guard))
