"""Which GPUs a model is put on, as the setting says it: `0,1` is a replica on each of two, `0,0` two on one, `all` all.

Knows no torch: how many there are is told.
"""

from __future__ import annotations

from hybridtei.errors import LoadError

ALL = "all"
MOST_REPLICAS = 64


def cuda_devices(setting: str | None, count: int) -> list[str]:
    """torch's names of the devices, one a replica; without a setting the first. `count`: how many there are, at least one.

    Raises LoadError, naming what is wrong.
    """
    if setting is None:
        return ["cuda:0"]
    if setting == ALL:
        return [f"cuda:{number}" for number in range(count)]
    numbers = [part.strip() for part in setting.split(",")]
    for number in numbers:
        if not (number.isascii() and number.isdecimal() and int(number) < count):
            raise LoadError(f"`cuda-devices` is {setting!r}: it should name numbers from 0 to {count - 1}, or be {ALL!r}")
    if len(numbers) > MOST_REPLICAS:
        raise LoadError(f"`cuda-devices` names {len(numbers)} replicas, more than {MOST_REPLICAS}")
    return [f"cuda:{int(number)}" for number in numbers]
