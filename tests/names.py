"""Names that cross a language: what the page's scripts and the files in deploy/ read of the server.

A reader takes the text of a file, and returns the names that the server lacks.
"""

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

# Where a script holds an answer of /info, or its part `hybridtei`
INFO = r"(?:info\(\)|infos\.get\([^)]*\)|\(await ask\(\"info\"[^)]*\)\))"
HOLDERS = rf"({INFO}|\bhybridtei(?=\.|\?\.|;))"
CHAIN = r"((?:\??\.\w+)*)"
# The functions of live.js and prometheus.js whose argument names a series
READERS = r"(?:perSecond|growth|meanBetween|quantileBetween)\((?:\w+, )*\"(\w+)\""
# Of elements and lists in a browser
BROWSERS = {"length", "textContent", "hidden"}
# Of Prometheus' own and of scrapes
SERIES_OF_SCRAPES = {"up"}
LABELS_OF_SCRAPES = {"instance", "job", "namespace", "pod", "le"}
PROMQL = {"by", "without", "and", "or", "unless", "on", "ignoring", "offset", "bool"}
# Flags and variables of other programs: docker, kubectl, systemctl, taskset, Qdrant, Grafana
FLAGS_OF_OTHERS = {"--build", "--rm", "--profile", "--from-literal", "--cpu-list", "--now"}
VARIABLES_OF_OTHERS = {"AF_INET", "AF_INET6", "AF_UNIX", "GF_AUTH_ANONYMOUS_ENABLED"}


@dataclass(frozen=True)
class Names:
    """What a server has."""

    info: Mapping[str, Any]
    search: Mapping[str, Any]
    # A series, and its labels. A histogram is here by its own name, too.
    series: Mapping[str, Set[str]]
    routes: Set[str]
    # Packages of gRPC's services
    packages: Set[str]
    flags: Set[str]
    variables: Set[str]


def lacking_in_script(script, names):
    """Keys of `/info`, and series of `/metrics`, that a script reads."""
    lacking = set()
    for path in _reads_of_info(script):
        value = names.info
        for key in path:
            if not isinstance(value, Mapping):
                break
            if key not in value:
                lacking.add(".".join(path))
                break
            value = value[key]
    read = re.findall(r"\bvalues\.(\w+)\b(?!\()", script) + re.findall(READERS, script)
    read += re.findall(r"\"((?:te|hybridtei)_\w+)\"", script)
    return lacking | (set(read) - set(names.series) - BROWSERS)


def _reads_of_info(script):
    """`info().a.b` and `const { a, b: c } = info()` as paths from the root of the answer."""
    for holder, chain in re.findall(HOLDERS + CHAIN, script):
        yield _path(holder, chain)
    for fields, holder, chain in re.findall(rf"\{{([^{{}}]*)\}} = {HOLDERS}{CHAIN}", script):
        for field in fields.split(","):
            yield [*_path(holder, chain), field.partition(":")[0].strip()]


def _path(holder, chain):
    keys = re.findall(r"\w+", chain)
    if holder == "hybridtei":
        return ["hybridtei", *keys]
    return keys


def lacking_in_search(script, names):
    """Keys that search.js, which reads no other answer, reads of `/search`."""
    _, _, reading = re.sub(r"\"[^\"]*\"|//.*|/\*.*?\*/", "", script).partition("export function")
    fields = re.findall(r"\{ ([\w:, ]+) \}(?=\)|\]| =| of\b)", reading)
    read = {field.partition(":")[0].strip() for each in fields for field in each.split(",")}
    read |= set(re.findall(r"(?<!\.)\.(\w+)\b(?!\()", reading)) - BROWSERS
    return read - set(_keys(names.search))


def _keys(value):
    if isinstance(value, Mapping):
        yield from value
        value = value.values()
    elif not isinstance(value, list):
        return
    for each in value:
        yield from _keys(each)


def lacking_in_expression(expression, names):
    """Series and labels of a PromQL expression, of Grafana's `label_values`, and of a pattern of
    prometheus-adapter."""
    expression = re.sub(r"\[[^\]]*\]|<<[^>]*>>", "", expression)
    labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", expression))
    for group in re.findall(
        r"\b(?:by|without) \(([^)]*)\)|label_values\([^,)]*, (\w+)", expression
    ):
        labels |= set(re.findall(r"\w+", "".join(group)))
    rest = re.sub(
        r"\{[^}]*\}|\b(?:by|without) \([^)]*\)|\"[^\"]*\"|(?<=, )\w+(?=\)$)", "", expression
    )
    series = set(re.findall(r"\b([a-zA-Z_:][\w:]*)\b(?!\s*\()", rest)) - PROMQL
    known = LABELS_OF_SCRAPES.union(*(names.series.get(name, ()) for name in series))
    return (series - set(names.series) - SERIES_OF_SCRAPES) | (labels - known)


def lacking_in_nginx(text, names):
    """Routes and gRPC packages of nginx' `location`s."""
    lacking = set()
    for sign, place in re.findall(r"^\s*location (?:(=|~) )?(\S+) \{", text, re.MULTILINE):
        if sign != "~":
            places = [] if place in names.routes or place == "/" else [place]
        elif place.endswith("\\."):
            packages = place.removeprefix("^/(").removesuffix(")\\.").replace("\\", "").split("|")
            places = [name for name in packages if name not in names.packages]
        else:
            places = [
                each
                for each in _alternatives(place)
                if not any(map(re.compile(each).search, names.routes))
            ]
        lacking.update(places)
    return lacking


def _alternatives(pattern):
    """`a(b|c)d` -> `abd`, `acd`: each should match a route."""
    group = re.search(r"\(([^)]*)\)", pattern)
    if group is None:
        return [pattern]
    return [pattern.replace(group[0], word) for word in group[1].split("|")]


def lacking_in_settings(text, names):
    """Flags, variables and the routes of probes that a file of deploy/ names, in its comments
    too."""
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) - FLAGS_OF_OTHERS - {"--help"}
    variables = set(re.findall(r"\b[A-Z][A-Z0-9]*_[A-Z0-9_]*[A-Z0-9]\b", text))
    variables |= set(re.findall(r"^\s*([A-Z]+)[:=]", text, re.MULTILINE))
    variables |= set(re.findall(r"\bname: ([A-Z][A-Z0-9_]*)\b", text))
    variables = {each for each in variables if not each.startswith("QDRANT__")}
    routes = set(re.findall(r"(?:httpGet:\s*\{?\s*path|metrics_path): (/[\w/]+)", text))
    lacking = (flags - names.flags) | (variables - names.variables - VARIABLES_OF_OTHERS)
    return lacking | {route for route in routes if route not in names.routes}
