"""One ONNX Runtime session: a graph in bytes, and the tensors it lacks as arrays that it reads where they lie."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import onnxruntime as ort

from hybridtei.errors import LoadError
from hybridtei.outputs import Floats

# Its one kernel for a sum and the norm after it walks each row number by number: the two apart take a quarter of the time,
# which is a tenth of a pass (1.31, AVX-512).
SLOWER = ("SkipLayerNormFusion",)


class Lent:
    """Arrays that sessions read where they lie; to be kept as long as any of those.

    `tables`: names of those that are looked up and not computed with. ONNX Runtime copies every tensor it is given for its
    optimisers to see, which for a table of words would be half of a small model, and once more for each session; what it is
    given besides by that name it uses as it is.
    """

    def __init__(self, tensors: Mapping[str, Floats], tables: Collection[str] = ()) -> None:
        self.values = {name: ort.OrtValue.ortvalue_from_numpy(tensor) for name, tensor in tensors.items()}
        self.tables = {name: self.values[name] for name in tables}
        self._arrays = [tensors[name] for name in tables]  # whose memory the values share


def open_session(graph: bytes | Path, lent: Lent, folder: Path, threads: int) -> ort.InferenceSession:
    """Raises LoadError, naming the model's folder."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.force_spinning_stop", "1")  # its threads wait actively within a pass only
    options.add_external_initializers(list(lent.values), list(lent.values.values()))
    for name, value in lent.tables.items():
        options.add_initializer(name, value)
    content = str(graph) if isinstance(graph, Path) else graph
    try:
        return ort.InferenceSession(content, options, providers=["CPUExecutionProvider"], disabled_optimizers=SLOWER)
    except Exception as error:  # kinds of the library's own
        raise LoadError(f"{folder}: ONNX Runtime does not take the graph: {error}") from error
