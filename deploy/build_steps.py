"""The steps of a Dockerfile's target in plain folders, for machines without a container engine;
then the result is started.

    python deploy/build_steps.py [--target cpu] [--python PYTHON] [--keep FOLDER]

Every stage gets a file system of its own, an empty folder, and only what a COPY names goes into it.
So a path that is wrong, or a file that the final image would lack, fails here too. All of them are
built at one place, one after the other, as in an image: an environment's scripts name their
interpreter by its full path. What only a real image has (users, the base image's files) is said and
left out. Then the entry point serves the embedded model, and that model again from a mounted folder
without a network; each time the health check's own command is asked before and after, and SIGTERM
must end it with 0.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from deploy.dockerfile import Instruction, Stage, expand, lineage, needed, parse

ROOT = Path(__file__).parents[1]
# The image's own paths in a shell's words
PLACES = re.compile(r"(?<![\w./:-])/(?=(?:src|build|wheels|opt|var|data)\b)")
OF_AN_IMAGE = ("useradd", "groupadd")
HANG = 180.0
MAX_BYTES, LARGE_BYTES = 750_000_000, 10_000_000


class Builder:
    """Stages made at `place`, and put aside under `done` by name."""

    def __init__(self, folder: Path, python: str) -> None:
        self.place, self.done, self.base = folder / "image", folder / "stages", folder / "base"
        self.done.mkdir(parents=True)
        # Stands for the base image
        subprocess.run([python, "-m", "venv", str(self.base)], check=True)
        self.directory = self.place

    def build(self, stages: Mapping[str, Stage], target: str) -> dict[str, str]:
        """Perform all that a target needs; its environment."""
        for name in needed(stages, target):
            print(f"== {name}", flush=True)
            self._begin(stages[name])
            environment = self._environment(lineage(stages, name)[:-1])
            for instruction in stages[name].instructions:
                self._perform(instruction, environment)
            if name != target:
                self.place.rename(self.done / name)
        return environment

    def _begin(self, stage: Stage) -> None:
        if (self.done / stage.base).is_dir():
            shutil.copytree(self.done / stage.base, self.place, symlinks=True)
        else:
            self.place.mkdir()
        self.directory = self.place

    def _environment(self, below: Sequence[Stage]) -> dict[str, str]:
        environment = {"PATH": f"{self.base / 'bin'}:/usr/bin:/bin", "HOME": str(self.base)}
        environment |= {
            name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_"))
        }
        for stage in below:
            for instruction in stage.all("ENV"):
                self._perform(instruction, environment)
        return environment

    def _perform(self, instruction: Instruction, environment: dict[str, str]) -> None:
        keyword, line = instruction.keyword, instruction.line
        if keyword in ("ENV", "ARG"):
            pairs = {
                name: self.here(expand(value, environment))
                for name, value in instruction.pairs().items()
            }
            environment |= pairs
        elif keyword == "WORKDIR":
            self.directory = Path(self.here(instruction.arguments))
            self.directory.mkdir(parents=True, exist_ok=True)
        elif keyword == "COPY":
            self._copy(instruction)
        elif keyword == "RUN" and any(word in instruction.arguments for word in OF_AN_IMAGE):
            print(
                f"   line {line}: left out, it needs an image: {instruction.arguments}", flush=True
            )
        elif keyword == "RUN":
            print(f"   line {line}: RUN", flush=True)
            subprocess.run(
                ["sh", "-ec", self.here(instruction.arguments)],
                cwd=self.directory,
                env=environment,
                check=True,
            )

    def _copy(self, instruction: Instruction) -> None:
        *sources, last = instruction.paths()
        stage = instruction.flags().get("from")
        where = Path(self.here(last)) if last.startswith("/") else self.directory / last
        for source in sources:
            path = self.done / stage / source.lstrip("/") if stage else ROOT / source
            to = where / path.name if last.endswith("/") or last == "." else where
            print(f"   line {instruction.line}: COPY {source}", flush=True)
            to.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                shutil.copytree(
                    path,
                    to,
                    symlinks=True,
                    ignore=None if stage else shutil.ignore_patterns("__pycache__", "*.pyc"),
                )
            else:
                shutil.copy(path, to)

    def here(self, text: str) -> str:
        """Absolute paths of the image as they are at `place`."""
        return PLACES.sub(f"{self.place}/", text)


def start(
    command: Sequence[str], environment: Mapping[str, str], check: Sequence[str], log: Path
) -> None:
    """Serve until the health check is content, then stop. Raises SystemExit if a step
    fails."""
    healthy = subprocess.run(
        check, env=environment, stderr=subprocess.DEVNULL, timeout=HANG, check=False
    ).returncode
    expect(healthy != 0, "the health check is content without a server")
    began = time.perf_counter()
    with log.open("wb") as output:
        server = subprocess.Popen(command, env=environment, cwd="/", stdout=output, stderr=output)
        try:
            while subprocess.run(
                check, env=environment, stderr=subprocess.DEVNULL, timeout=HANG, check=False
            ).returncode:
                expect(
                    server.poll() is None,
                    f"the server ended with {server.returncode}:\n{log.read_text()}",
                )
                expect(
                    time.perf_counter() - began < HANG,
                    f"not healthy after {HANG:.0f} s:\n{log.read_text()}",
                )
                time.sleep(0.2)
            print(f"   healthy after {time.perf_counter() - began:.1f} s", flush=True)
            server.send_signal(signal.SIGTERM)
            status = server.wait(HANG)
            expect(status == 0, f"SIGTERM ended it with {status}:\n{log.read_text()}")
            print("   SIGTERM: 0", flush=True)
        finally:
            if server.poll() is None:
                server.kill()
                server.wait()


def expect(holds: bool, otherwise: str) -> None:
    """Raises SystemExit with the message."""
    if not holds:
        raise SystemExit(f"FAULT: {otherwise}")


def free_port() -> str:
    """A port on which no process listens now."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


def check_package(installed: Path) -> None:
    """Nothing of the package was left behind by its wheel: graphs, weights, the marker that it is
    typed."""
    sources = [
        path for path in (ROOT / "hybridtei").rglob("*") if path.is_file() and path.suffix != ".pyc"
    ]
    missing = [
        path for path in sources if not (installed / path.relative_to(ROOT / "hybridtei")).is_file()
    ]
    expect(not missing, f"not in the wheel: {', '.join(map(str, missing))}")
    print(f"== {len(sources)} files of the package are installed", flush=True)


def check_size(image: Path) -> None:
    """What the image adds to its base: at most `MAX_BYTES`, and no large file twice. A link counts
    once."""
    files = {
        status.st_ino: (status.st_size, path)
        for path in image.rglob("*")
        if (status := path.lstat()) and path.is_file()
    }
    held = sum(size for size, _ in files.values())
    print(f"== {held / 1e6:.0f} MB above the base", flush=True)
    expect(
        held <= MAX_BYTES,
        f"the image adds {held / 1e6:.0f} MB to its base, of at most {MAX_BYTES / 1e6:.0f}",
    )
    seen: dict[str, Path] = {}
    for size, path in files.values():
        if size >= LARGE_BYTES and not path.is_symlink():
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            expect(digest not in seen, f"twice in the image: {seen.get(digest)} and {path}")
            seen[digest] = path


def check_image(
    builder: Builder, stages: Mapping[str, Stage], target: str, environment: Mapping[str, str]
) -> None:
    """Start what was built, twice."""
    own = [each for stage in lineage(stages, target) for each in stage.instructions]
    last = {each.keyword: each for each in own}
    entry, words, check = (
        last["ENTRYPOINT"].words(),
        last["CMD"].words(),
        last["HEALTHCHECK"].words(),
    )
    binaries = builder.place / "opt/hybridtei/bin"
    expect(not list(binaries.glob("pip*")), "pip is in the final image")
    check_package(next(builder.place.glob("opt/hybridtei/lib/python*/site-packages/hybridtei")))
    entry, check = [str(binaries / entry[0]), *entry[1:]], [str(binaries / check[0]), *check[1:]]
    common = {**environment, "PORT": free_port(), "HF_HUB_OFFLINE": "1"}

    if target == "cpu":
        check_size(builder.place)
    print("== started with the embedded model", flush=True)
    start([*entry, *words], common, check, builder.place.parent / "embedded.log")
    print("== started from a mounted folder, with TEI's flags and an empty cache", flush=True)
    [assembled] = (builder.place / "opt/model").glob("all-MiniLM-*")
    shutil.copytree(assembled, builder.place / "data/model")
    flags = [
        "--model-id",
        builder.here("/data/model"),
        "--pooling",
        "mean",
        "--dtype",
        "float32",
        "--max-batch-tokens",
        "4096",
    ]
    bare = {**common, "HYBRIDTEI_CACHE": str(builder.place / "data/nothing")}
    start([*entry, *flags], bare, check, builder.place.parent / "mounted.log")


def main() -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="cpu")
    parser.add_argument(
        "--python", default=sys.executable, help="stands for the base image's [default: this one]"
    )
    parser.add_argument(
        "--keep",
        type=Path,
        help="folder for the result, which must not exist; else a temporary one",
    )
    arguments = parser.parse_args()
    stages = parse((ROOT / "Dockerfile").read_text())
    with tempfile.TemporaryDirectory() as scratch:
        builder = Builder(arguments.keep or Path(scratch), arguments.python)
        environment = builder.build(stages, arguments.target)
        check_image(builder, stages, arguments.target, environment)
    print("all steps done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
