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
from typing import Any, Literal

from hybridtei.errors import LoadError, MissingArtifact, UnsupportedArchitecture, WeightMismatch
from hybridtei.models.checkpoint.files import JsonObject, inside, read_json, read_object
from hybridtei.models.checkpoint.hub_layouts import own_code

log = logging.getLogger(__name__)

Pooling = Literal["cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
POOLINGS: tuple[Pooling, ...] = (
    "cls",
    "max",
    "mean",
    "mean_sqrt_len_tokens",
    "weightedmean",
    "lasttoken",
)
LEGACY_FLAGS: Mapping[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
TRANSFORMERS = ("MLMTransformer", "Transformer")
# pplx-embed's module, which rounds pooled vectors (`ModelSpec.is_rounded`)
QUANTIZER = "FlexibleQuantizer"
STATIC, CODER = "StaticEmbedding", "SparseAutoEncoder"
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

# (type, path)
Modules = Sequence[tuple[str, str]]


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


def read_modules(folder: Path, *, late: bool = False) -> Modules:
    """Return (type, path) of each module. Without modules.json: (), or for a Model2Vec its table.

    The type is the class name alone, since modules have moved between versions.
    """
    file = folder / "modules.json"
    if not file.exists():
        config = read_object(folder / "config.json", optional=True)
        return ((STATIC, ""),) if config.get("model_type") == "model2vec" else ()
    listed = read_json(file)
    if not isinstance(listed, list) or not all(_is_module(entry) for entry in listed):
        raise LoadError(f"{file}: should be a list of objects with the texts `type` and `path`")
    modules = _with_effect(
        [(module["type"].rsplit(".", 1)[-1], module["path"]) for module in listed]
    )
    order: Sequence[str] = ORDER
    if late:
        order = LATE_ORDER
    elif modules and modules[0][0] == "Router":
        order = ("Router", *ORDER)
    unknown = [name for name, _ in modules if name not in order]
    if unknown:
        raise UnsupportedArchitecture(f"{file}: modules of type {unknown} are not supported")
    _check_order(file, [name for name, _ in modules], order, orphans=late)
    return modules


def _is_module(entry: object) -> bool:
    return isinstance(entry, dict) and all(
        isinstance(entry.get(key), str) for key in ("type", "path")
    )


def _with_effect(modules: Modules) -> list[tuple[str, str]]:
    """Return the modules without Dropout, which acts only in training, and without a second
    Normalize in a row."""
    modules = [module for module in modules if module[0] != "Dropout"]
    return [
        module
        for i, module in enumerate(modules)
        if module[0] != "Normalize" or not i or modules[i - 1][0] != "Normalize"
    ]


def transformer_folder(folder: Path, modules: Modules) -> Path:
    """Return the folder of configuration, weights and tokenizer: the model's folder, or
    `0_Transformer` in old checkpoints."""
    return inside(folder, module_path(modules, *TRANSFORMERS, STATIC) or "")


def module_path(modules: Modules, *types: str) -> str | None:
    """Return the path of the first module of one of these types, or None."""
    return next((path for name, path in modules if name in types), None)


def logit_score(folder: Path, modules: Modules) -> tuple[int, int | None] | None:
    """Return the ids of the tokens (true, false or None) whose logits make a language model's
    score, or None."""
    path = module_path(modules, "LogitScore")
    if path is None:
        return None
    settings = read_object(inside(folder, path) / "config.json")
    ids = [settings.get(key) for key in ("true_token_id", "false_token_id")]
    if len(modules) > 2 or settings.get("module_input_name", "causal_logits") != "causal_logits":
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


@dataclass(frozen=True, slots=True)
class Routes:
    """Modules by route. `table`: the folder of the table that replaces the model for queries.
    `default`: the route of texts whose kind the request does not name, or None."""

    document: Modules
    query: Modules = ()
    table: Path | None = None
    default: str | None = None


def read_router(folder: Path, modules: Modules) -> Routes:
    """Return the routes of a Router; modules after the Router end both. Without a Router, `modules`
    are the document route. Raises UnsupportedArchitecture unless there is one query route and one
    document route."""
    if not modules or modules[0][0] != "Router":
        return Routes(modules)
    prefix = modules[0][1]
    file = inside(folder, prefix) / "router_config.json"
    settings = read_object(file)
    types, structure = settings.get("types"), settings.get("structure")
    if (
        not isinstance(types, dict)
        or not isinstance(structure, dict)
        or set(structure) != {"query", "document"}
    ):
        raise UnsupportedArchitecture(
            f"{file}: only routers with a query and a document route are supported"
        )
    if not all(
        isinstance(paths, list) and all(isinstance(path, str) for path in paths)
        for paths in structure.values()
    ):
        raise LoadError(f"{file}: `structure` should list the paths of each route's modules")
    routes = {
        name: [
            *_with_effect(
                [
                    (str(types.get(path, "?")).rsplit(".", 1)[-1], str(Path(prefix) / path))
                    for path in paths
                ]
            ),
            *modules[1:],
        ]
        for name, paths in structure.items()
    }
    kinds = {name: [kind for kind, _ in route] for name, route in routes.items()}
    if kinds["query"] == ["SparseStaticEmbedding"] and kinds["document"] in [
        [kind, "SpladePooling"] for kind in TRANSFORMERS
    ]:
        return Routes(routes["document"], table=inside(folder, routes["query"][0][1]))
    for name, names in kinds.items():
        if not {"Pooling", STATIC} & {*names} or not {*names} <= {
            *TRANSFORMERS,
            STATIC,
            "Pooling",
            *STEPS,
            "Normalize",
        }:
            raise UnsupportedArchitecture(
                f"{file}: the {name} route is {names}; supported: a model of dense vectors in "
                "each, or a SparseStaticEmbedding for queries and SPLADE for documents"
            )
        _check_order(file, names, ORDER, orphans=False)
    return Routes(
        routes["document"],
        routes["query"],
        default=_default_route(settings.object("parameters"), [*structure]),
    )


def _default_route(parameters: JsonObject, names: list[str]) -> str | None:
    if parameters.get("route_mappings"):
        raise UnsupportedArchitecture(
            f"{parameters.file}: `route_mappings` are not supported; name the routes query and "
            "document"
        )
    default = parameters.get("default_route")
    if default is None:
        return names[0] if parameters.get("allow_empty_key", True) else None
    if default not in names:
        raise LoadError(
            f"{parameters.file}: `default_route` is {default!r}; the routes are {', '.join(names)}"
        )
    return str(default)


def splade_function(
    folder: Path, override: str | None, modules: Modules, architectures: tuple[str, ...]
) -> str | None:
    """Return the function of logits before SPLADE's last logarithm, "relu" or "log1p_relu"; None
    without SPLADE pooling, which `override` or else the checkpoint declares. Raises
    UnsupportedArchitecture."""
    declared = module_path(modules, "SpladePooling")
    if override is not None and override != "splade":
        return None
    if declared is not None:
        settings = read_object(inside(folder, declared) / "config.json")
        strategy = settings.get("pooling_strategy", "max")
        activation = settings.get("activation_function", "relu")
        if strategy != "max" or activation not in ("relu", "log1p_relu"):
            raise UnsupportedArchitecture(
                f"{folder / declared}: SPLADE pooling {strategy!r} with {activation!r}; supported: "
                "'max' of relu or log1p_relu"
            )
        return str(activation)
    if override == "splade" and not any(name.endswith("MaskedLM") for name in architectures):
        raise UnsupportedArchitecture(
            f"{folder}: splade pooling needs an architecture ending in MaskedLM, config.json names "
            f"{list(architectures)}"
        )
    return None if override is None else "relu"


def read_pooling(
    folder: Path,
    override: str | None,
    modules: Modules,
    model_type: str,
    config: Mapping[str, Any],
    *,
    can_rank: bool = False,
) -> tuple[Pooling, ...]:
    """Return the poolings whose vectors are concatenated: from sentence-transformers' files, else
    `pooling` of config.json, as `hub_layouts` translates it. Raises MissingArtifact if no file
    declares one; if `can_rank`, it names the ranker's file."""
    if override is not None:
        return ("lasttoken",) if override == "last-token" else (_pooling_name(override, folder),)
    listed = module_path(modules, "Pooling")
    file = inside(folder, listed or "1_Pooling") / "config.json"
    if listed is not None or (not modules and file.exists()):
        return _declared_pooling(read_object(file))
    if config.get("pooling") is not None:
        return (_pooling_name(config["pooling"], folder / "config.json"),)
    if modules:
        raise MissingArtifact(
            f"{folder / 'modules.json'}: lists no Pooling, and no --pooling given"
        )
    if "bert" not in model_type.lower():
        name = next(iter(config.get("architectures") or ()), model_type)
        more = ""
        if can_rank and name.endswith("ForCausalLM"):
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


def pools_prompts(folder: Path, override: str | None, modules: Modules) -> bool:
    """True if the tokens of a prompt are pooled together with the text's."""
    file = inside(folder, module_path(modules, "Pooling") or "1_Pooling") / "config.json"
    return (
        override is not None or read_object(file, optional=True).get("include_prompt") is not False
    )


def codes_tokens(modules: Modules) -> bool:
    """True if a SparseAutoEncoder reads token states, because no Pooling comes before it."""
    return module_path(modules, CODER) is not None and module_path(modules, "Pooling") is None


def gives_scores(folder: Path, modules: Modules) -> bool:
    """True if the last module is a Dense that gives logits: a cross-encoder in modules."""
    steps = [(name, path) for name, path in modules if name in STEPS]
    if not steps or steps[-1][0] != "Dense":
        return False
    return (
        read_object(inside(folder, steps[-1][1]) / "config.json").get("module_output_name")
        == SCORES
    )


def read_steps(
    folder: Path,
    modules: Modules,
    override: str | None,
    pooled_width: int,
    *,
    names: Sequence[str | None] = POOLED,
    trusted: bool = False,
) -> tuple[StepModule, ...]:
    """Return the Dense and LayerNorm layers in order, with matching widths. `names`: accepted names
    of their inputs and outputs. The last Dense may give `SCORES`. `trusted`: classes that are not
    torch's are activations too.

    Raises LoadError and its subclasses.
    """
    steps = [(name, path) for name, path in modules if name in STEPS]
    # As in TEI, only a single Dense can be replaced
    if override is not None and [name for name, _ in steps] == ["Dense"]:
        steps = [("Dense", override)]
    read, width = list[StepModule](), pooled_width
    for place, (name, path) in enumerate(steps, 1):
        home = inside(folder, path)
        if name == "LayerNorm":
            settings = read_object(home / "config.json")
            read.append(NormModule(home, _width_of(settings, "dimension", width)))
        else:
            outputs = (*names, SCORES) if place == len(steps) else names
            read.append(_dense_module(home, width, names, outputs=outputs, trusted=trusted))
        width = read[-1].out_features
    return tuple(read)


def _check_order(file: Path, names: Sequence[str], order: Sequence[str], *, orphans: bool) -> None:
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
    folder: Path,
    width: int,
    names: Sequence[str | None],
    *,
    outputs: Sequence[str | None],
    trusted: bool,
) -> DenseModule:
    settings = read_object(folder / "config.json")
    if settings.get("use_residual"):
        raise UnsupportedArchitecture(f"{settings.file}: Dense with a residual is not supported")
    for key, served in (("module_input_name", names), ("module_output_name", outputs)):
        if settings.get(key) not in served:
            raise UnsupportedArchitecture(
                f"{settings.file}: `{key}` {settings[key]!r}; supported: {names[-1]!r}"
            )
    return DenseModule(
        folder,
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
