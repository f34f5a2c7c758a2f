"""Launching a pass waits for nothing: every family and head under torch's fake tensors. To ask the
device for a number, or for a shape that follows from one, raises there; here a copy from or to
pageable memory does, too, which would wait just as well. So does a copy from pinned memory that was
not made before the launch.

The fake device is "cuda" where torch is built for it. Other builds have no guard of CUDA devices,
which indexing asks for: it is "meta" with them, which our code treats alike, since what it asks of
a device is whether it is the CPU.
"""

import dataclasses
import types
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from conformance.small import published, tiny
from hybridtei.batch import Encoding, Head, pack
from hybridtei.inference.backends import heads
from hybridtei.inference.backends.heads import kept_rows
from hybridtei.inference.backends.torch import backend as backend_module
from hybridtei.inference.backends.torch import kernels, memory
from hybridtei.inference.backends.torch.backend import TorchBackend
from hybridtei.inference.backends.torch.fp8 import to_eight_bits
from hybridtei.inference.backends.torch.fusing import sum_inside
from hybridtei.inference.backends.torch.kernels import flash, padded_groups
from hybridtei.inference.backends.torch.ops import TORCH, entries_of
from hybridtei.models.checkpoint.classifiers import CodeLayers
from hybridtei.models.checkpoint.spec import read_spec
from tests import jina
from tests.sampled import paired

DEVICE = torch.device("cuda" if torch.backends.cuda.is_built() else "meta")
# Collapsed one by one, and at once
FEW, MANY = (7, 1, 60), (3, 17, 5, 1, 9, 2, 30) * 10
KERNELS = {"flash": flash, "padded groups": padded_groups}


class CopyWaits(RuntimeError):
    """An operation has tensors of two devices."""


class NoCopies(TorchDispatchMode):
    """Raises CopyWaits for any operation that moves numbers between the host and the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        flat = tree_flatten((args, kwargs, out))[0]
        kinds = {one.device.type for one in flat if isinstance(one, Tensor) and one.dim()}
        if len(kinds) > 1:
            raise CopyWaits(f"{func} moves numbers between {' and '.join(sorted(kinds))}")
        return out


@contextmanager
def device_of_fakes(monkeypatch):
    """Within, tensors are fake and no copy is allowed but that of `to_device`, which is pinned."""

    def to_device(arrays, device):
        assert device.type == DEVICE.type
        return {
            name: torch.empty(len(array), dtype=torch.int64, device=DEVICE)
            for name, array in arrays.items()
        }

    replace_copies(monkeypatch, to_device)
    with FakeTensorMode() as mode, NoCopies(), torch.inference_mode():
        yield mode


def replace_copies(monkeypatch, copy):
    for module in (backend_module, memory, kernels):
        monkeypatch.setattr(module, "to_device", copy)


def copy_while_launching(*_):
    raise CopyWaits("a buffer of the host is filled while the launches of other batches wait")


def there(value, mode):
    """The same, its tensors fake ones on the device: of modules, of dataclasses, of functions that
    close over some."""
    if isinstance(value, Tensor):
        fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=DEVICE)
        return nn.Parameter(fake, requires_grad=False) if isinstance(value, nn.Parameter) else fake
    if isinstance(value, nn.Module):
        return _moved(value, mode)
    if isinstance(value, list | tuple):
        return type(value)(there(one, mode) for one in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {
            one.name: there(getattr(value, one.name), mode) for one in dataclasses.fields(value)
        }
        return dataclasses.replace(value, **changed)
    if isinstance(value, types.FunctionType) and value.__closure__:
        cells = tuple(types.CellType(there(cell.cell_contents, mode)) for cell in value.__closure__)
        return types.FunctionType(
            value.__code__, value.__globals__, value.__name__, value.__defaults__, cells
        )
    return value


def _moved(module, mode):
    for part in module.modules():
        for kept in (part._parameters, part._buffers):
            for name, tensor in kept.items():
                kept[name] = None if tensor is None else there(tensor, mode)
    return module


def launched(
    backend,
    batch,
    monkeypatch,
    kernel=None,
):
    """The result of a pass on the fake device."""
    kept, _ = kept_rows(batch, backend.spec)
    with device_of_fakes(monkeypatch) as mode:
        trunk = backend.trunk
        backend.device = trunk._device = DEVICE
        trunk.model, backend._heads = there(trunk.model, mode), there(backend._heads, mode)
        sum_inside(trunk.model)
        if kernel is not None:
            biased = any(has_bias for _, has_bias in trunk.forms)
            trunk.kernel = padded_groups if biased else kernel
        staged = backend.stage(batch, kept)
        replace_copies(monkeypatch, copy_while_launching)
        return backend.launch(staged)


def batch_of(spec, lengths, unseen=0):
    """All heads of the model, of texts of these lengths."""
    draw = np.random.default_rng(0)
    texts = [
        Encoding(
            draw.integers(0, spec.vocab_size, length + unseen),
            unseen=unseen,
            adapter=0 if spec.adapters is None else 1,
        )
        for length in lengths
    ]
    return pack(texts, spec.heads, spec.positions)


def write_hybrid(folder):
    tiny.write_own_heads(tiny.write_bert(folder))
    return folder


def write_poolings(folder):
    width = len(heads.POOLINGS) * tiny.HIDDEN
    return tiny.write_modules(
        tiny.write_family(folder, "bert"),
        pooling=[*heads.POOLINGS],
        dense=[(width, 8, "torch.nn.modules.activation.Tanh")],
    )


Case = tuple[Callable[[Path], Path], str | None]
CASES = {
    **{name: (partial(tiny.write_family, model_type=name), "mean") for name in tiny.FAMILIES},
    "jina_bert": (published.write_jina, "mean"),
    "jina_bert, code": (partial(published.write_jina, code=True), "mean"),
    "adapters": (jina.write, None),
    "experts": (published.write_nomic, "mean"),
    "BGE-M3": (tiny.write_m3, None),
    "our heads": (write_hybrid, None),
    "every pooling": (write_poolings, None),
    "SPLADE": (partial(tiny.write_family, model_type="bert", task="ForMaskedLM"), "splade"),
    "SPLADE, modernbert": (
        partial(tiny.write_family, model_type="modernbert", task="ForMaskedLM"),
        "splade",
    ),
    "classifier": (partial(tiny.write_classifier, model_type="bert", labels=3), None),
    "tagger": (
        partial(tiny.write_classifier, model_type="bert", labels=3, task="TokenClassification"),
        None,
    ),
}


@pytest.mark.parametrize(("case", "kernel"), paired([*CASES], [*KERNELS]))
def test_a_launch_waits_for_nothing(tmp_path, monkeypatch, case, kernel):
    (write, pooling), lengths = CASES[case], MANY if kernel == "flash" else FEW
    spec = read_spec(write(tmp_path), pooling=pooling)
    batch = batch_of(spec, lengths)
    found = launched(TorchBackend(spec), batch, monkeypatch, KERNELS[kernel])
    assert {tensor.device.type for tensor in found.values()} == {DEVICE.type}
    assert found["tokens" if Head.TOKENS in spec.heads else next(iter(found))].shape[0] in (
        len(batch),
        len(batch.input_ids),
    )
    assert len(found) == len(spec.heads)


@pytest.mark.parametrize("kernel", KERNELS)
def test_nor_does_one_of_tokens_that_none_attends_to(tmp_path, monkeypatch, kernel):
    spec = read_spec(tiny.write_m3(tmp_path))
    assert (
        len(
            launched(
                TorchBackend(spec), batch_of(spec, FEW, unseen=3), monkeypatch, KERNELS[kernel]
            )
        )
        == 4
    )


@pytest.mark.parametrize("kernel", KERNELS)
def test_nor_does_one_that_computes_a_prefix_once(tmp_path, monkeypatch, kernel):
    spec = tiny.family_spec(tmp_path, "qwen3", pooling="lasttoken")
    texts = [Encoding(np.append(np.arange(5, 25), last)) for last in range(30, 40)]
    batch = pack(texts, spec.heads, spec.positions, prefix=20)
    backend = TorchBackend(spec)
    assert backend.shares_prefixes
    assert launched(backend, batch, monkeypatch, KERNELS[kernel])["dense"].shape == (
        10,
        tiny.HIDDEN,
    )


def test_nor_does_one_in_fp8(tmp_path, monkeypatch):
    spec = read_spec(tiny.write_m3(tmp_path))
    backend = TorchBackend(spec)
    assert to_eight_bits(backend.trunk.model)
    assert len(launched(backend, batch_of(spec, MANY), monkeypatch, flash)) == 4


def test_nor_does_a_sparse_code(monkeypatch):
    with device_of_fakes(monkeypatch) as mode:
        weights = there(CodeLayers(torch.ones(9, 4), torch.ones(9), 3, 1e-5), mode)
        assert heads.code(TORCH, torch.empty(5, 4, device=DEVICE), weights).shape == (5, 9)


@pytest.mark.parametrize(
    ("wait", "error"),
    [
        (lambda x: x.sum().item(), DataDependentOutputException),
        (lambda x: bool((x > 0).any()), DataDependentOutputException),
        (lambda x: x[x[:, 0] > 0], DynamicOutputShapeException),
        (entries_of, DynamicOutputShapeException),
        (lambda x: x.cpu(), CopyWaits),
        (lambda x: torch.as_tensor(np.arange(3), device=x.device), CopyWaits),
    ],
)
def test_what_waits_is_seen(monkeypatch, wait, error):
    with device_of_fakes(monkeypatch):
        rows = torch.empty(4, 3, device=DEVICE)
        with pytest.raises(error):
            wait(rows)
