"""Which backend runs a model: what was asked for, what can, in the order that is usually the best;
and always a reason."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conformance.small import tiny
from hybridtei.config import ModelConfig
from hybridtei.errors import LoadError
from hybridtei.inference.backends import select as backend_choice
from hybridtei.inference.backends.select import choices, open_backend, why_not
from hybridtei.models.checkpoint.spec import read_spec


@pytest.fixture(autouse=True)
def no_device(monkeypatch):
    monkeypatch.setattr(backend_choice, "NVIDIA", Path("/nowhere"))


def asked(folder, **options):
    return ModelConfig(model_id=str(folder), **options)


@pytest.mark.parametrize("exact", [True, False])
def test_the_processor_decides_who_is_first_in_int8(bert, exact, monkeypatch):
    monkeypatch.setattr(backend_choice, "_installed", lambda _: True)
    monkeypatch.setattr(backend_choice, "_sums_exactly", lambda: exact)
    spec = read_spec(bert)

    def names(**options):
        return [choice.name for choice in choices(asked(bert, **options), spec)]

    assert names() == ["ort", "openvino", "torch"]
    assert names(dtype="int8") == (["openvino", "ort"] if exact else ["ort", "openvino"])


def test_the_only_one_says_so_and_others_that_tune_measures(bert, monkeypatch):
    spec = read_spec(bert)
    assert "`hybridtei tune` measures all" in choices(asked(bert), spec)[0].why
    monkeypatch.setattr(
        backend_choice, "_installed", lambda package: package not in ("openvino", "torch")
    )
    (only,) = choices(asked(bert), spec)
    assert (only.name, only.why) == ("ort", "the only one that can")


@pytest.mark.parametrize(
    ("name", "dtype", "why"),
    [
        ("ort", "bfloat16", "float32 and int8 only, not bfloat16"),
        ("openvino", "float16", "float32 and bfloat16 and int8 only, not float16"),
        ("torch", "int8", "only, not int8"),
    ],
)
def test_a_precision_that_a_backend_lacks_is_named(bert, name, dtype, why):
    assert why in (why_not(name, dtype, read_spec(bert)) or "")


@pytest.mark.parametrize(
    ("name", "installed"), [("openvino", "openvino"), ("torch", "'hybridtei[torch]'")]
)
def test_a_missing_package_is_named_with_the_command(bert, monkeypatch, name, installed):
    monkeypatch.setattr(backend_choice, "_installed", lambda _: False)
    assert f"pip install {installed}" in (why_not(name, None, read_spec(bert)) or "")


def test_nothing_that_can_run_it_is_an_error_with_every_reason(bert, monkeypatch):
    monkeypatch.setattr(backend_choice, "_installed", lambda _: False)
    spec = replace(read_spec(bert), model_type="opt")
    with pytest.raises(
        LoadError,
        match=r"nothing here can run it in float32: ort: .*no family `opt`.*hybridtei\[torch\]",
    ):
        choices(asked(bert), spec)


def test_fp8_is_torchs_alone_and_wants_a_gpu_that_has_it(bert):
    with pytest.raises(LoadError, match="fp8 needs a GPU, and there is no NVIDIA device here"):
        open_backend(asked(bert, dtype="fp8"), read_spec(bert))


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_float16_wants_a_gpu(bert, backend, monkeypatch):
    with pytest.raises(LoadError, match="float16 is for GPUs, and there is no NVIDIA device here"):
        choices(ModelConfig(backend=backend, dtype="float16"), read_spec(bert))


def on_a_gpu(monkeypatch, device, capability=(9, 0)):
    """From now on torch finds a card, `device` being a path that exists."""
    monkeypatch.setattr(backend_choice, "NVIDIA", device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)


HOPPER, TURING = (9, 0), (7, 5)


@pytest.mark.parametrize(
    ("family", "stored", "card", "dtype"),
    [
        ("bert", torch.float32, HOPPER, "float16"),
        ("bert", torch.float16, HOPPER, "float16"),
        ("qwen3", torch.bfloat16, HOPPER, "bfloat16"),
        ("qwen3", torch.bfloat16, TURING, "float16"),
        ("t5", torch.float32, HOPPER, "bfloat16"),
        ("gemma3_text", torch.float16, HOPPER, "bfloat16"),
        ("t5", torch.float32, TURING, "float32"),
    ],
)
def test_a_gpu_computes_in_the_half_precision_of_the_checkpoint_and_of_its_family(
    tmp_path,
    family,
    stored,
    card,
    dtype,
    monkeypatch,
):
    folder = tiny.change_each(tiny.write_family(tmp_path, family), lambda tensor: tensor.to(stored))
    on_a_gpu(monkeypatch, folder, card)
    spec = read_spec(folder, pooling="mean")
    (only,) = choices(asked(folder), spec)
    assert (only.name, only.dtype) == ("torch", dtype)


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize(
    ("family", "dtype", "card", "why"),
    [
        ("t5", "float16", HOPPER, "states of `t5` exceed .* ask for bfloat16"),
        ("gemma3_text", "float16", TURING, "`gemma3_text` exceed .* ask for float32"),
        ("bert", "bfloat16", TURING, r"capability 8\.0 or later; ask for float16"),
        ("bert", "int8", HOPPER, "cannot run on torch: .* not int8"),
    ],
)
def test_a_precision_that_the_family_or_the_card_lacks_is_refused_by_name(
    tmp_path,
    backend,
    family,
    dtype,
    card,
    why,
    monkeypatch,
):
    folder = tiny.write_family(tmp_path, family)
    on_a_gpu(monkeypatch, folder, card)
    config = asked(folder, backend=backend, dtype=dtype)
    with pytest.raises(LoadError, match=why):
        choices(config, read_spec(folder, pooling="mean"))


def test_torch_decides_whether_there_is_a_gpu_and_the_log_says_why_not(bert, monkeypatch, caplog):
    config, spec = asked(bert), read_spec(bert)
    caplog.set_level(logging.INFO, "hybridtei")
    open_backend(config, spec).close()
    # There is a device, and this torch cannot use it
    monkeypatch.setattr(backend_choice, "NVIDIA", bert)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    for built in (None, "13.0"):
        monkeypatch.setattr(torch.version, "cuda", built)
        assert open_backend(config, spec).name != "torch"
    told = [record for record in caplog.records if "GPU" in record.msg]
    assert [(record.levelname, record.getMessage()) for record in told] == [
        ("INFO", "no GPU is used: there is no NVIDIA device here (/nowhere)"),
        ("WARNING", "no GPU is used: torch is built for CPUs only"),
        ("WARNING", "no GPU is used: CUDA_VISIBLE_DEVICES hides it"),
    ]
    on_a_gpu(monkeypatch, bert)
    (only,) = choices(config, spec)
    assert (only.name, only.dtype, only.why) == ("torch", "float16", "torch finds a CUDA device")


@pytest.mark.parametrize("backend", ["auto", "torch", "ort"])
def test_an_old_driver_is_an_error_unless_the_flag_names_a_backend_of_cpus(
    bert, backend, monkeypatch
):
    """Otherwise a server on a GPU machine would compute on its CPU, at a hundredth of the rate."""
    monkeypatch.setattr(backend_choice, "NVIDIA", bert)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = asked(bert, backend=backend)
    if backend == "ort":
        assert open_backend(config, read_spec(bert)).name == "ort"
        return
    with pytest.raises(LoadError, match="cannot use this machine's GPU: update the driver"):
        open_backend(config, read_spec(bert))
