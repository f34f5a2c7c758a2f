"""A server for a profile: a process of a command line with TEI's flags, on a free port, until the
block is left."""

import os
import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from conformance.processes import free_port, started
from conformance.wire.case import Profile

OURS = f"{shlex.quote(sys.executable)} -m hybridtei serve --model-id {{model}} --port {{port}}"
# Would speak for every profile
OTHERS = ("MODEL_ID", "POOLING", "API_KEY", "TASK", "MAX_CLIENT_BATCH_SIZE", "DEFAULT_PROMPT")


@contextmanager
def launched(template: str, profile: Profile, model: Path) -> Iterator[str]:
    """The URL of a server that answers. `template`: with `{model}` and `{port}`. Raises
    RuntimeError if it never does."""
    port = free_port()
    words = shlex.split(template)
    if template == OURS:
        words += profile.ours
    command = [word.format(model=model, port=port) for word in words] + list(profile.args)
    environment = {name: value for name, value in os.environ.items() if name not in OTHERS} | dict(
        profile.env
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        started(command, port, Path(folder) / "log", env=environment),
    ):
        yield f"http://127.0.0.1:{port}"
