"""The torch backend: the formulas of heads on transformers' own states, and what a pass does on the
host before it is launched. Laws of all backends are in tests/inference/backends/test_laws.py."""

import threading
from types import SimpleNamespace

import numpy as np
import torch
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModel

from conformance.small import tiny, tolerances
from hybridtei.inference.backends.torch import backend as backend_module
from hybridtei.inference.backends.torch.backend import TorchBackend
from hybridtei.models.checkpoint.spec import read_spec
from tests.inference.backends.outputs import columns_of, run, sixty_four
from tests.near import near


def equal(
    backend,
    encodings,
    formulas,
):
    """`formulas`: what should come out of (ids, the states that transformers computes of each text
    alone)."""
    model = AutoModel.from_pretrained(backend.spec.folder, attn_implementation="eager").eval()
    outputs = run(backend, encodings)
    for i, encoding in enumerate(encodings):
        ids, found = torch.tensor(encoding.input_ids), columns_of(outputs, i)
        with torch.inference_mode():
            expected = formulas(ids, model(input_ids=ids[None]).last_hidden_state[0])
        for name, values in expected.items():
            near(
                found[name],
                values.numpy(),
                tolerances.WEIGHTS["float32"],
                err_msg=name,
            )


def test_m3_heads_equal_the_formulas(tmp_path):
    backend = TorchBackend(read_spec(tiny.write_m3(tmp_path, suffix=".safetensors")))
    sparse, colbert = (
        load_file(tmp_path / f"{name}_linear.safetensors") for name in ("sparse", "colbert")
    )

    def formulas(_, hidden):
        first, many = (
            torch.nn.functional.linear(hidden, head["weight"].float(), head["bias"].float())
            for head in (sparse, colbert)
        )
        return {
            "dense": hidden[0],
            "token_weights": torch.relu(first).squeeze(1),
            "multivector": many[1:],
            "tokens": hidden,
        }

    equal(backend, sixty_four(backend.spec.vocab_size)[:12], formulas)


def test_our_own_heads_equal_the_formulas(hybrid, tmp_path):
    # The same seed, so the same weights
    backend, tensors = (
        TorchBackend(read_spec(hybrid)),
        tiny.write_own_heads(tmp_path),
    )
    table = AutoModel.from_pretrained(hybrid).get_input_embeddings()
    functional = torch.nn.functional

    def formulas(ids, hidden):
        joined = torch.cat([hidden, functional.layer_norm(table(ids), (tiny.HIDDEN,))], 1)
        inner = functional.gelu(
            functional.linear(
                joined, tensors["sparse.hidden.weight"], tensors["sparse.hidden.bias"]
            )
        )
        weights = torch.relu(
            functional.linear(inner, tensors["sparse.out.weight"], tensors["sparse.out.bias"])
        )
        ordinary = ~torch.isin(ids, torch.tensor([0, 1, 2, 3]))
        many = hidden[ordinary] @ tensors["multivector.weight"].T
        return {"dense": hidden.mean(0), "token_weights": weights.squeeze(1), "multivector": many}

    equal(backend, sixty_four(backend.spec.vocab_size)[:8], formulas)


def test_every_output_is_float32_whatever_the_precision(hybrid):
    columns = columns_of(
        run(TorchBackend(read_spec(hybrid), dtype="bfloat16"), sixty_four(90)[:3]), 1
    )
    assert set(columns) == {"dense", "token_weights", "multivector", "tokens"}
    assert {values.dtype for values in columns.values()} == {np.dtype(np.float32)}


def test_a_gpu_without_an_index_gets_one(hybrid, monkeypatch):
    """`torch.cuda.set_per_process_memory_fraction` refuses a device without an index."""
    stream = SimpleNamespace(wait_stream=lambda _: None)
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: stream)
    plain = TorchBackend(read_spec(hybrid))
    with FakeTensorMode():
        backend = TorchBackend(plain.spec, device="cuda", loaded=(plain._trunk, plain._heads))
    assert backend.device == torch.device("cuda:0")
    assert backend.busy_tokens == 32_768
    assert plain.device == torch.device("cpu")


def test_the_hosts_work_is_done_before_the_turn_to_launch(hybrid, monkeypatch):
    """And a GPU's passes are launched one at a time: its lock stands here in place of a CPU's,
    which has none."""
    backend, turn, seen = (
        TorchBackend(read_spec(hybrid)),
        threading.Lock(),
        [],
    )
    backend._launching = turn

    def noting(name, function):
        def noted(*arguments):
            seen.append((name, turn.locked()))
            return function(*arguments)

        return noted

    host = ("to_device", "kept_rows", "computed_once", "start_copy", "outputs_of")
    for name in (*host, "compute"):
        monkeypatch.setattr(backend_module, name, noting(name, getattr(backend_module, name)))
    backend.shares_prefixes = True
    run(backend, sixty_four(backend.spec.vocab_size)[:5])
    assert seen == [
        ("kept_rows", False),
        ("computed_once", False),
        ("to_device", False),
        ("compute", True),
        ("start_copy", False),
        ("outputs_of", False),
    ]
