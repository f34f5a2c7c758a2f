"""A command that ran to its end."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def ran(command, *, check=False, cwd=ROOT, env=None, timeout=300):
    """What it said, as text."""
    return subprocess.run(
        command, capture_output=True, text=True, check=check, cwd=cwd, env=env, timeout=timeout
    )
