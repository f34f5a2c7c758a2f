"""Load tests: `python -m conformance.load NAME [flags]`; `python -m conformance.load NAME --help`
tells a scenario's flags.

A scenario is a function of its name, and an entry of its module's `FLAGS`: what argparse takes, or
a default. Each prints the hardware and versions first. Figures are medians of rounds in which all
sides have their turn, on the loopback interface. A GPU has a program of its own, `gpu.py`.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from conformance.load.report import machine

# Name -> module
SCENARIOS = dict.fromkeys(("request_cost", "asgi_servers"), "cost")
SCENARIOS |= dict.fromkeys(("http_load", "lone"), "traffic") | dict.fromkeys(
    ("storms", "overload"), "storms"
)
OTHERS = ("app_cost", "limit", "precisions", "stored_size", "migrate", "ranking", "index")
SCENARIOS |= {name: name for name in OTHERS}


def main(arguments: Sequence[str]) -> int:
    """Exit status: 1 if a promise was broken, 2 for wrong usage."""
    if not arguments or arguments[0] not in SCENARIOS:
        print(__doc__, *SCENARIOS, sep="\n")
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 2
    name, program = arguments[0], f"python -m conformance.load {arguments[0]}"
    module = import_module(f"conformance.load.{SCENARIOS[name]}")
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=program, description=module.__doc__, formatter_class=raw)
    for flag, given in module.FLAGS[name].items():
        parser.add_argument(
            flag, **(given if isinstance(given, dict) else {"default": given, "type": type(given)})
        )
    options = parser.parse_args(arguments[1:])
    print(machine(), flush=True)
    return int(getattr(module, name)(options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
