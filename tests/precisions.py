"""What this machine computes in: tests of a precision that it lacks are left out, by their
parameters.

`tests/inference/test_precisions.py` is skipped for each precision that is left out, so that the
list of skips shows it.
"""

from importlib.util import find_spec


def openvino_has_bfloat16():
    """True if OpenVINO computes in bfloat16 on this processor."""
    if find_spec("openvino") is None:
        return False
    import openvino

    return "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def runs_here(engine, dtype):
    """True if an engine is installed and computes in this precision on this machine."""
    import torch

    if engine == "openvino" and find_spec("openvino") is None:
        return False
    if dtype == "float16":
        return torch.cuda.is_available()
    return (engine, dtype) != ("openvino", "bfloat16") or openvino_has_bfloat16()
