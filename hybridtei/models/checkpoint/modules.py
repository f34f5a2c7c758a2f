"""A sentence-transformers checkpoint as a chain of modules: modules.json and its folders.

Reads both layouts: the old one (boolean pooling flags) and version 6's (`pooling_mode` as a word).
Refuses modules that it cannot run exactly as declared: a missing module, or another order, gives
wrong vectors that look right.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from hybridtei.errors import LoadError, MissingArtifact, UnsupportedArchitecture, WeightMismatch
from hybridtei.models.checkpoint.checkpoint import (
    NO_FLAGS,
    STATIC,
    TRANSFORMERS,
    Checkpoint,
    Flags,
    Modules,
)
from hybridtei.models.checkpoint.files import JsonObject, read_json
from hybridtei.models.checkpoint.folder import Folder
from hybridtei.models.checkpoint.hub_layouts import own_code
from hybridtei.models.families.family import Pooling

log = logging.getLogger(__name__)

POOLINGS: tuple[Pooling, ...] = get_args(Pooling)
LEGACY_FLAGS: Mapping[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# pplx-embed's module, which rounds pooled vectors (`ModelSpec.is_rounded`)
QUANTIZER = "FlexibleQuantizer"
CODER = "SparseAutoEncoder"
# Packages whose modules are known, and pplx-embed's code
PACKAGES: tuple[str, ...] = ("sentence_transformers.", "pylate.models.", f"st_quantize.{QUANTIZER}")
# On pooled vectors, in any number and order
STEPS = ("Dense", "LayerNorm")
ORDER = (
    *TRANSFORMERS,
    STATIC,
    "LogitScore",
    "Pooling",
    "SpladePooling",
    *STEPS,
    QUANTIZER,
    CODER,
    "Normalize",
)
# Modules of models that have only token vectors.
LATE_ORDER = (*TRANSFORMERS, "Dense", "MultiVectorMask", "Normalize", "HierarchicalTokenPooling")
# The names of the pooled vector in modules
POOLED = (None, "sentence_embedding")
# The name of logits, the output of a cross-encoder's last Dense
SCORES = "scores"
OF_TOKENS = (None, "token_embeddings")
TANH = "torch.nn.modules.activation.Tanh"


@dataclass(frozen=True, slots=True)
class DenseModule:
    """A sentence-transformers Dense layer after the pooling: `activation(W x + b)`."""

    folder: Path
    in_features: int
    out_features: int
    bias: bool
    activation: str


@dataclass(frozen=True, slots=True)
class NormModule:
    """A sentence-transformers LayerNorm after the pooling, with torch's epsilon."""

    folder: Path
    out_features: int


StepModule = DenseModule | NormModule


def read_modules(folder: Folder, *, late: bool = False) -> Modules:
    """Return (type, path) of each module. Without modules.json: (), or for a Model2Vec its
    table."""
    file = folder.path / "modules.json"
    if not file.exists():
        is_table = folder.object(optional=True).get("model_type") == "model2vec"
        return ((STATIC, ""),) if is_table else ()
    listed = read_json(file)
    if not isinstance(listed, list) or not all(_is_module(entry) for entry in listed):
        raise LoadError(f"{file}: should be a list of objects with the texts `type` and `path`")
    names = class_names(folder, [module["type"] for module in listed], file)
    modules = with_effect([*zip(names, (module["path"] for module in listed), strict=True)])
    order: Sequence[str] = ORDER
    if late:
        order = LATE_ORDER
    elif modules and modules[0][0] == "Router":
        order = ("Router", *ORDER)
    unknown = [name for name, _ in modules if name not in order]
    if unknown:
        raise UnsupportedArchitecture(f"{file}: modules of type {unknown} are not supported")
    check_order(file, [name for name, _ in modules], order, orphans=late)
    return modules


def class_names(folder: Folder, types: Sequence[str], file: Path) -> list[str]:
    """Return the class name of each type, since modules have moved between versions. Raises
    UnsupportedArchitecture for classes of a repository's own code, under any name."""
    packages = PACKAGES
    # Jina's Transformer only chooses an adapter
    if "lora_adaptations" in folder.object(optional=True):
        packages = (*PACKAGES, "custom_st.Transformer")
    foreign = [name for name in types if not name.startswith(packages)]
    if foreign:
        raise UnsupportedArchitecture(
            f"{file}: modules of type {foreign} are the repository's own code, which hybridtei "
            f"does not run; supported are sentence-transformers' {', '.join(ORDER)}"
        )
    return [name.rpartition(".")[2] for name in types]


def _is_module(entry: object) -> bool:
    return isinstance(entry, dict) and all(
        isinstance(entry.get(key), str) for key in ("type", "path")
    )


def with_effect(modules: Modules) -> list[tuple[str, str]]:
    """Return the modules without Dropout, which acts only in training, and without a second
    Normalize in a row."""
    modules = [module for module in modules if module[0] != "Dropout"]
    return [
        module
        for i, module in enumerate(modules)
        if module[0] != "Normalize" or not i or modules[i - 1][0] != "Normalize"
    ]


def logit_score(checkpoint: Checkpoint) -> tuple[int, int | None] | None:
    """Return the ids of the tokens (true, false or None) whose logits make a language model's
    score, or None."""
    module = checkpoint.module("LogitScore")
    if module is None:
        return None
    settings = module.object()
    ids = [settings.get(key) for key in ("true_token_id", "false_token_id")]
    if (
        len(checkpoint.modules) > 2
        or settings.get("module_input_name", "causal_logits") != "causal_logits"
    ):
        raise UnsupportedArchitecture(
            f"{settings.file}: LogitScore with other modules than a Transformer is not supported"
        )
    if (
        not all(
            isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids if i is not None
        )
        or ids[0] is None
    ):
        raise LoadError(
            f"{settings.file}: `true_token_id` and `false_token_id` are {ids}, should be token ids"
        )
    return ids[0], ids[1]


def splade_function(checkpoint: Checkpoint, override: str | None) -> str | None:
    """Return the function of logits before SPLADE's last logarithm, "relu" or "log1p_relu"; None
    without SPLADE pooling, which `override` or else the checkpoint declares. Raises
    UnsupportedArchitecture."""
    declared = checkpoint.module("SpladePooling")
    if override is not None and override != "splade":
        return None
    if declared is not None:
        settings = declared.object()
        strategy = settings.get("pooling_strategy", "max")
        activation = settings.get("activation_function", "relu")
        if strategy != "max" or activation not in ("relu", "log1p_relu"):
            raise UnsupportedArchitecture(
                f"{declared}: SPLADE pooling {strategy!r} with {activation!r}; supported: "
                "'max' of relu or log1p_relu"
            )
        return str(activation)
    if override == "splade" and not checkpoint.is_a("MaskedLM"):
        raise UnsupportedArchitecture(
            f"{checkpoint.root}: splade pooling needs an architecture ending in MaskedLM, "
            f"config.json names {list(checkpoint.architectures)}"
        )
    return None if override is None else "relu"


def read_pooling(checkpoint: Checkpoint, override: str | None) -> tuple[Pooling, ...]:
    """Return the poolings whose vectors are concatenated: from sentence-transformers' files, else
    `pooling` of config.json, as `hub_layouts` translates it. Raises MissingArtifact if no file
    declares one; of a language model, it names the ranker's file."""
    folder, config = checkpoint.root, checkpoint.config
    if override == "last-token":
        return ("lasttoken",)
    if override is not None:
        return (_pooling_name(override, folder.path),)
    listed = checkpoint.module("Pooling")
    module = listed or folder.within("1_Pooling")
    file = module.path / "config.json"
    if listed is not None or (not checkpoint.modules and file.exists()):
        return _declared_pooling(module.object())
    if config.get("pooling") is not None:
        return (_pooling_name(config["pooling"], folder.path / "config.json"),)
    if checkpoint.modules:
        raise MissingArtifact(
            f"{folder.path / 'modules.json'}: lists no Pooling, and no --pooling given"
        )
    if "bert" not in checkpoint.model_type.lower():
        name = next(iter(checkpoint.architectures), checkpoint.model_type)
        more = ""
        if checkpoint.family.words and name.endswith("ForCausalLM"):
            more = "; of one that ranks, describe the template in hybridtei_rerank.json"
        if own_code(config) is not None:
            more = (
                "; --trust-remote-code is needed too, since only the publisher's own code computes "
                "this model"
            )
        raise MissingArtifact(
            f"{file}: missing, so nothing says how states of {name} become one vector; give "
            "--pooling mean, which sentence-transformers takes then, or last-token, which most "
            f"language models that embed are trained with{more}"
        )
    log.warning(
        "%s: missing; taking the first token (cls), as TEI does: set --pooling if the model needs "
        "another",
        file,
    )
    return ("cls",)


def pools_prompts(checkpoint: Checkpoint) -> bool:
    """True if the tokens of a prompt are pooled together with the text's."""
    module = checkpoint.module("Pooling") or checkpoint.root.within("1_Pooling")
    return (
        checkpoint.flags.pooling is not None
        or module.object(optional=True).get("include_prompt") is not False
    )


def gives_scores(checkpoint: Checkpoint) -> bool:
    """True if the last module is a Dense that gives logits: a cross-encoder in modules."""
    steps = [(name, path) for name, path in checkpoint.modules if name in STEPS]
    if not steps or steps[-1][0] != "Dense":
        return False
    settings = checkpoint.root.within(steps[-1][1]).object()
    return bool(settings.get("module_output_name") == SCORES)


def read_steps(
    checkpoint: Checkpoint,
    pooled_width: int,
    *,
    names: Sequence[str | None] = POOLED,
    flags: Flags = NO_FLAGS,
) -> tuple[StepModule, ...]:
    """Return the Dense and LayerNorm layers in order, with matching widths. `names`: accepted names
    of their inputs and outputs. The last Dense may give `SCORES`. `flags`: those that count.

    Raises LoadError and its subclasses.
    """
    steps = [(name, path) for name, path in checkpoint.modules if name in STEPS]
    # As in TEI, only a single Dense can be replaced
    if flags.dense_path is not None and [name for name, _ in steps] == ["Dense"]:
        steps = [("Dense", flags.dense_path)]
    read, width = list[StepModule](), pooled_width
    for place, (name, path) in enumerate(steps, 1):
        module = checkpoint.root.within(path)
        if name == "LayerNorm":
            width_in = _width_of(module.object(), "dimension", width)
            read.append(NormModule(module.path, width_in))
        else:
            outputs = (*names, SCORES) if place == len(steps) else names
            trusted = flags.trusted
            read.append(_dense_module(module, width, names, outputs=outputs, trusted=trusted))
        width = read[-1].out_features
    return tuple(read)


def check_order(file: Path, names: Sequence[str], order: Sequence[str], *, orphans: bool) -> None:
    """Raises UnsupportedArchitecture for a Normalize before the end or a step before the pooling,
    since both change later steps. The Normalize at the end is an option of each request."""
    places = [order.index("Dense" if name in STEPS else name) for name in names]
    once = [name for name in names if name not in STEPS]
    steps = {*STEPS, CODER} & {*names}
    if steps == {CODER}:
        # It may read token states too
        steps = set()
    orphaned = steps and not {"Pooling", STATIC} & {*names} and not orphans
    orphaned = orphaned or (STATIC in names and {"Pooling", *TRANSFORMERS} & {*names})
    if places != sorted(places) or len(set(once)) < len(once) or orphaned:
        raise UnsupportedArchitecture(
            f"{file}: the order {list(names)} is not supported; supported: {', '.join(order)}"
        )


def _declared_pooling(settings: JsonObject) -> tuple[Pooling, ...]:
    # sentence-transformers 6's names
    modes = settings.get("pooling_mode")
    if modes is None:
        modes = [mode for flag, mode in LEGACY_FLAGS.items() if settings.get(flag)]
    elif not isinstance(modes, list):
        modes = [modes]
    if not modes:
        raise LoadError(
            f"{settings.file}: no pooling mode is true; set one of {', '.join(LEGACY_FLAGS)}"
        )
    return tuple(_pooling_name(name, settings.file) for name in modes)


def _pooling_name(name: object, where: Path) -> Pooling:
    for pooling in POOLINGS:
        if name == pooling:
            return pooling
    raise UnsupportedArchitecture(f"{where}: pooling {name!r}; supported: {', '.join(POOLINGS)}")


def _dense_module(
    module: Folder,
    width: int,
    names: Sequence[str | None],
    *,
    outputs: Sequence[str | None],
    trusted: bool,
) -> DenseModule:
    settings = module.object()
    if settings.get("use_residual"):
        raise UnsupportedArchitecture(f"{settings.file}: Dense with a residual is not supported")
    for key, served in (("module_input_name", names), ("module_output_name", outputs)):
        if settings.get(key) not in served:
            raise UnsupportedArchitecture(
                f"{settings.file}: `{key}` {settings[key]!r}; supported: {names[-1]!r}"
            )
    return DenseModule(
        module.path,
        _width_of(settings, "in_features", width),
        settings.count("out_features"),
        bool(settings.get("bias", True)),
        _dense_activation(settings, trusted=trusted),
    )


def _dense_activation(settings: JsonObject, *, trusted: bool) -> str:
    """Return the activation's path. sentence-transformers takes Tanh for a class that is not
    torch's unless it trusts the repository."""
    name = str(settings.get("activation_function") or TANH)
    if trusted or name.startswith("torch."):
        return name
    log.warning(
        "%s: `activation_function` %r is Tanh, as in sentence-transformers; --trust-remote-code "
        "takes that class",
        settings.file,
        name,
    )
    return TANH


def _width_of(settings: JsonObject, key: str, width: int) -> int:
    """Return the declared width of a module's input. Raises WeightMismatch unless the module before
    it gives that width."""
    declared = settings.count(key)
    if declared != width:
        raise WeightMismatch(
            f"{settings.file}: `{key}` is {declared}, but what comes before it has a width of "
            f"{width}"
        )
    return declared
