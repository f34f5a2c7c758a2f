"""Traffic against embedding servers over HTTP. In a table of several servers, `first/this` is the
first server's figure divided by each server's. COMMAND has `{port}` in it.

    python -m conformance.load http_load --server NAME=COMMAND --server NAME=COMMAND [--traffic
    mixed,queries] [--seconds 8] python -m conformance.load lone --server NAME=COMMAND --server
    NAME=COMMAND [--route embed|rerank] [--sizes 6,40,120]

`http_load` starts the servers one after the other, in each round, and compares useful tokens/s,
counted with the embedded model's tokenizer, special tokens included, no padding; no text is sent
twice at once. `--chart FILE` writes what `notebooks/writing/draw.py` draws; kinds of traffic that
it has already stay.

`lone` is one client that waits for each answer. All servers run at the same time and get a few
requests each in turn. `--sizes`: words of the text for /embed, texts of 60 words of one query for
/rerank, with `--mixed` of 5 to 30 words for 70 % of these and 100 to 250 for the rest. Every text
is new.
"""

import argparse
import json
import os
import random
import statistics
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer

from conformance.load.crowd import Client, Group, crowd, request
from conformance.load.report import medians, milliseconds, paired, processor, ratio, table
from conformance.load.servers import Server, named, started
from hybridtei.models.checkpoint.files import embedded_model

# (share, (fewest tokens, most tokens))
Mix = tuple[tuple[float, tuple[int, int]], ...]

QUERY: Mix = ((1.0, (5, 30)),)
PASSAGE: Mix = ((1.0, (100, 250)),)
MIXED: Mix = ((0.7, (5, 30)), (0.3, (100, 250)))

TRAFFIC: dict[
    str, tuple[tuple[int, int, Mix], ...]
    # Groups of connections, each with that many texts a request
] = {
    "mixed": ((32, 1, MIXED),),
    "queries": ((32, 1, QUERY),),
    "passages": ((16, 1, PASSAGE),),
    "bulk": ((2, 32, MIXED),),
    "bulk 32 x 32": ((32, 32, MIXED),),
    "bulk 4": ((4, 32, MIXED),),
    "one client": ((1, 1, QUERY),),
    # Latencies of the first group
    "query under bulk": ((1, 1, QUERY), (4, 32, MIXED)),
}
SERVERS = {
    "action": "append",
    "required": True,
    "metavar": "NAME=COMMAND",
    "help": "with {port} in it; repeatable",
}
KINDS = {"default": ",".join(TRAFFIC), "help": f"of: {', '.join(TRAFFIC)} [default: all]"}
ROUTES = {"choices": ["embed", "rerank"], "default": "embed"}
MANY = {"action": "store_true", "help": "texts to rank are of many lengths"}
FLAGS = {
    "http_load": {
        "--server": SERVERS,
        "--traffic": KINDS,
        "--rounds": 3,
        "--seconds": 8.0,
        "--chart": {"type": Path},
    },
    "lone": {"--server": SERVERS, "--route": ROUTES, "--sizes": {}, "--turns": 40, "--mixed": MANY},
}
# Requests to one server, before the next has its turn
TURN = 15
SIZES = {"embed": "6,40,120", "rerank": "1,10,32"}
WORDS = (
    "search",
    "vector",
    "wing",
    "plate",
    "the",
    "of",
    "boundary",
    "layer",
    "flow",
    "heat",
    "index",
    "query",
    "in",
    "text",
)
# Of a client, before the first comes again
REQUESTS_ONE, REQUESTS_BULK = 64, 12
WARM_SECONDS = 1.5
# Of a text of `MIXED`, on average
MIXED_TOKENS = 65

Run = dict[str, float]


class Texts:
    """A source of texts; equal seeds give equal texts."""

    def __init__(self, seed: int = 0) -> None:
        tokenizer = Tokenizer.from_file(str(embedded_model()[0] / "tokenizer.json"))
        self.words = sorted(
            word
            for word in tokenizer.get_vocab()
            if word.isascii() and word.isalpha() and len(word) > 2
        )
        self._random = random.Random(seed)

    def draw(self, mix: Mix) -> tuple[str, int]:
        """(text, its tokens with the two special ones)."""
        ((low, high),) = self._random.choices(
            [bounds for _, bounds in mix], [share for share, _ in mix]
        )
        tokens = self._random.randint(low, high)
        return " ".join(self._random.choices(self.words, k=tokens - 2)), tokens


def measure(server: Server, kind: str, seconds: float) -> Run:
    """One traffic against one server."""
    source, groups, tokens = Texts(), [], []
    for number, texts, mix in TRAFFIC[kind]:
        count = number * (REQUESTS_ONE if texts == 1 else REQUESTS_BULK)
        drawn = [[source.draw(mix) for _ in range(texts)] for _ in range(count)]
        inputs = [[text for text, _ in one] if texts > 1 else one[0][0] for one in drawn]
        groups.append(Group(number, [request("/embed", {"inputs": one}) for one in inputs]))
        tokens.append([sum(size for _, size in one) for one in drawn])
    crowd(server.port, groups, min(WARM_SECONDS, seconds))
    before = server.cpu_seconds()
    seen = crowd(server.port, groups, seconds)
    useful = sum(
        sizes[i] * times
        for one, sizes in zip(seen, tokens, strict=True)
        for i, times in one.in_time.items()
    )
    return {
        "tokens/s": useful / seconds,
        "requests/s": sum(one.in_time.total() for one in seen) / seconds,
        **{f"p{share} ms": milliseconds(seen[0].accepted, share / 100) for share in (50, 95, 99)},
        "failures": float(sum(len(one.refused) + one.missing for one in seen)),
        "CPU s": server.cpu_seconds() - before,
        "RSS MB": server.rss_mb(),
    }


def measure_all(command: str, traffic: list[str], seconds: float) -> dict[str, Run]:
    with started(command) as server:
        return {kind: measure(server, kind, seconds) for kind in traffic}


def http_load(options: argparse.Namespace) -> int:
    servers, traffic = named(options.server), options.traffic.split(",")
    runs = paired(
        options.rounds,
        {
            name: partial(measure_all, cmd, traffic, options.seconds)
            for name, cmd in servers.items()
        },
    )
    rows = {}
    for kind in traffic:
        rates = {name: [one[kind]["tokens/s"] for one in found] for name, found in runs.items()}
        for name, found in runs.items():
            first = ratio(rates[next(iter(runs))], rates[name])
            rows[f"{kind} / {name}"] = {
                **medians([one[kind] for one in found]),
                "first/this": first,
            }
    table(rows)
    if options.chart is not None:
        write_chart(options.chart, rows)
    return 0


def write_chart(path: Path, found: dict[str, Run]) -> None:
    """The machine, and each server's median of tokens per second by kind of traffic; kinds that the
    file has already stay."""
    rows: dict[str, Run] = (
        dict(json.loads(path.read_text(encoding="utf-8"))["rows"]) if path.exists() else {}
    )
    for key, row in found.items():
        kind, _, name = key.partition(" / ")
        rows.setdefault(name, {})[kind] = round(row["tokens/s"], 1)
    machine = f"{processor()}, {os.cpu_count()} cores; {time.strftime('%B %Y')}"
    path.write_text(
        json.dumps({"machine": machine, "rows": [*rows.items()]}, indent=1) + "\n", encoding="utf-8"
    )


def lone(options: argparse.Namespace) -> int:
    rows = {}
    with ExitStack() as stack:
        ports = {
            name: stack.enter_context(started(command)).port
            for name, command in named(options.server).items()
        }
        for size in map(int, (options.sizes or SIZES[options.route]).split(",")):
            draw, found = random.Random(size), {name: list[float]() for name in ports}
            for _ in range(options.turns):
                for name in draw.sample([*ports], len(ports)):
                    requests = [
                        request_of(options.route, size, draw, options.mixed) for _ in range(TURN)
                    ]
                    found[name] += turn(ports[name], requests)[1:]
            first = statistics.median(next(iter(found.values())))
            for name, times in found.items():
                median, late = statistics.median(times), statistics.quantiles(times, n=20)[-1]
                rows[f"/{options.route} {size} / {name}"] = {
                    "p50 ms": median,
                    "p95 ms": late,
                    "first/this": first / median,
                }
    table(rows)
    return 0


def turn(port: int, requests: list[bytes]) -> list[float]:
    """Milliseconds of each, on one connection. Raises RuntimeError unless all are answered with
    200."""
    client, times = Client(port, requests), []
    for _ in requests:
        began = time.perf_counter()
        client.ask()
        if (status := client.answer()) != 200:
            raise RuntimeError(f"status {status}")
        times.append((time.perf_counter() - began) * 1e3)
    client.socket.close()
    return times


def request_of(route: str, size: int, draw: random.Random, mixed: bool) -> bytes:
    """A text that was not sent before."""
    if route == "embed":
        return request("/embed", {"inputs": text(size, draw), "truncate": True})
    words = [
        (draw.randint(5, 30) if draw.random() < 0.7 else draw.randint(100, 250)) if mixed else 60
        for _ in range(size)
    ]
    return request(
        "/rerank",
        {"query": text(6, draw), "texts": [text(count, draw) for count in words], "truncate": True},
    )


def text(words: int, draw: random.Random) -> str:
    """Known words and a new one."""
    return " ".join([*draw.choices(WORDS, k=words - 1), f"x{draw.getrandbits(32):x}"])
