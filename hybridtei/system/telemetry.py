"""Turns off the usage reports that dependencies send to their makers. The package imports this module before any other.

The surprise: ONNX Runtime (from 1.29 on, on Linux) reads its variable when it is loaded and at no other time. Unless the
variable is set by then, it looks up a host of its maker and keeps a device id in `~/.cache/Microsoft`;
`disable_telemetry_events()` comes too late. Processes that this one starts inherit the variables.
"""

from __future__ import annotations

import os
import sys
import warnings

OFF = {
    "ORT_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",  # hf_xet reads it too
    "RAY_USAGE_STATS_ENABLED": "0",
}


def turn_off() -> None:
    """Set each variable that the user has not set; warn where ONNX Runtime was imported before and may report already."""
    if "onnxruntime" in sys.modules and "ORT_DISABLE_TELEMETRY" not in os.environ:
        warnings.warn(
            "onnxruntime was imported before hybridtei, so hybridtei cannot turn off the usage reports that it sends to its "
            "maker: import hybridtei first, or set ORT_DISABLE_TELEMETRY=1 in the environment",
            RuntimeWarning,
            stacklevel=3,
        )
    for name, value in OFF.items():
        os.environ.setdefault(name, value)
