"""A checkpoint's own ONNX files, read or refused; and exported folders: read by our own loader and
by plain ONNX Runtime, and the same as what they were made of."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from conformance.small import tiny
from hybridtei import cli
from hybridtei.config import ModelConfig
from hybridtei.errors import LoadError, MissingArtifact, UnsupportedArchitecture
from hybridtei.inference.backends.fidelity import Guard
from hybridtei.inference.backends.graph import onnx_export as module
from hybridtei.inference.backends.graph.onnx_backend import OnnxBackend
from hybridtei.inference.backends.graph.onnx_export import export_model
from hybridtei.inference.backends.graph.onnx_files import check_file, find_own_graph
from hybridtei.inference.backends.torch.backend import TorchBackend
from hybridtei.inference.load import find_model
from hybridtei.models.checkpoint.spec import read_spec
from hybridtei.models.checkpoint.weights import Weights
from tests.inference.backends.graph.test_int8 import LOOSE
from tests.inference.backends.outputs import random_encodings, run, same
from tests.sampled import paired

pytestmark = pytest.mark.usefixtures("cache")
IDS = {"input_ids": ["n", "s"], "attention_mask": ["n", "s"]}
ROWS = ["n", "s", tiny.HIDDEN]


def own_file(
    folder,
    *,
    external=False,
    path="onnx/model.onnx",
    output="last_hidden_state",
):
    """The checkpoint's trunk as a file that holds its weights, as optimum would write it; its
    safetensors are gone then."""
    spec, weights = read_spec(folder), Weights.open(folder)
    graph = tiny.graph_of(spec.model_type, rectangle=True)
    model = onnx.load_from_string(graph.body)
    for name in graph.weights:
        key = weights.find(name)
        model.graph.initializer.append(
            numpy_helper.from_array(np.array(weights.float32(key)), name)
        )
    for node in model.graph.node:
        node.output[:] = [output if name == "last_hidden_state" else name for name in node.output]
    model.graph.output[0].name = output
    file = folder / path
    file.parent.mkdir(exist_ok=True)
    onnx.save(
        model,
        file,
        save_as_external_data=external,
        location="model.onnx_data" if external else None,
        size_threshold=64,
    )
    (folder / "model.safetensors").unlink()
    return file


def toy(file, inputs, outputs, kind=TensorProto.INT64):
    """A graph with the given ends, which computes nothing sensible."""
    nodes = [
        helper.make_node(
            "ConstantOfShape",
            ["shape"],
            [name],
            value=helper.make_tensor("v", TensorProto.FLOAT, [1], [0.0]),
        )
        for name in outputs
    ]
    graph = helper.make_graph(
        nodes,
        "toy",
        [helper.make_tensor_value_info(name, kind, shape) for name, shape in inputs.items()],
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
            for name, shape in outputs.items()
        ],
        [numpy_helper.from_array(np.array([1, 1, tiny.HIDDEN], np.int64), "shape")],
    )
    file.parent.mkdir(exist_ok=True)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), file
    )
    return file


@pytest.mark.parametrize(
    ("external", "output"), [(False, "last_hidden_state"), (True, "a_name_of_its_own")]
)
def test_a_checkpoint_with_nothing_but_onnx_is_served(bert, copied, external, output):
    folder = copied(bert)
    path = own_file(folder, external=external, output=output)
    assert (path.parent / "model.onnx_data").exists() == external
    spec = read_spec(folder)
    assert (find_own_graph(spec), find_own_graph(read_spec(bert))) == (path, None)
    backend = OnnxBackend.from_file(spec, path)
    assert (backend.name, backend.dtype) == ("ort", "float32")
    agrees(backend, bert)


def agrees(backend, folder):
    """Every output is that of the checkpoint by torch."""
    theirs = TorchBackend(read_spec(folder))
    assert backend.spec.heads == theirs.spec.heads
    texts = random_encodings(theirs.spec)
    same(run(backend, texts), run(theirs, texts), len(texts))


def test_a_head_that_reads_word_embeddings_needs_them(hybrid, copied):
    folder = copied(hybrid)
    with pytest.raises(UnsupportedArchitecture, match="reads the word embeddings"):
        OnnxBackend.from_file(read_spec(folder), own_file(folder))


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        ({"input_ids": ["n", "s"]}, {"hidden": ROWS}, "takes"),
        ({**IDS, "position_ids": ["n", "s"]}, {"hidden": ROWS}, "takes"),
        ({**IDS, "input_ids": ["n", 128]}, {"hidden": ROWS}, "of any two sizes"),
        (
            {**IDS, "attention_mask": [1, "s"]},
            {"hidden": ROWS},
            "of any two sizes",
        ),
        (IDS, {"sentence_embedding": ["n", tiny.HIDDEN]}, "no output is"),
        (IDS, {"hidden": ["n", 128, tiny.HIDDEN]}, "no output is"),
        (IDS, {"one": ROWS, "other": ROWS}, "or several are"),
        (IDS, {"hidden": ROWS}, r"tensor\(int32\)"),
        (
            IDS,
            {"hidden": ROWS},
            "",
            # Whose states have another shape than it promises
        ),
    ],
)
def test_a_graph_with_other_ends_is_refused(folder, inputs, outputs, message):
    kind = TensorProto.INT32 if "int32" in message else TensorProto.INT64
    path = toy(folder / "onnx" / "model.onnx", inputs, outputs, kind)
    with pytest.raises(UnsupportedArchitecture, match=rf"{path}.*{message}"):
        OnnxBackend.from_file(read_spec(folder), path)


def test_a_file_that_knows_fewer_words_is_refused(folder):
    path = own_file(folder)
    tiny.configured(folder, vocab_size=1000)
    with pytest.raises(UnsupportedArchitecture, match=f"{path}.*forward pass failed"):
        OnnxBackend.from_file(read_spec(folder), path)


@pytest.mark.parametrize(
    ("location", "where"),
    paired(
        ["../secret", "/etc/hostname", "a/../../secret"], ["initializer", "attribute", "subgraph"]
    ),
)
def test_a_file_that_leads_out_of_its_folder_is_refused(tmp_path, location, where):
    tensor = TensorProto(name="w", data_type=1, dims=[1], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("length", "4")):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value
    node = helper.make_node("Constant", [], ["w"], value=tensor)
    inner = helper.make_graph([node], "inner", [], [])
    nodes = {
        "attribute": [node],
        "subgraph": [helper.make_node("If", ["c"], ["o"], then_branch=inner, else_branch=inner)],
    }
    graph = helper.make_graph(
        nodes.get(where, []), "g", [], [], [tensor] if where == "initializer" else []
    )
    (tmp_path / "model.onnx").write_bytes(helper.make_model(graph).SerializeToString())
    with pytest.raises(LoadError, match="leads out of"):
        check_file(tmp_path / "model.onnx")


def test_a_file_that_lacks_its_data_is_refused_by_name(folder):
    path = own_file(folder, external=True)
    (path.parent / "model.onnx_data").unlink()
    with pytest.raises(MissingArtifact, match=r"model\.onnx_data"):
        OnnxBackend.from_file(read_spec(folder), path)


@pytest.mark.parametrize(
    "content",
    [
        b"\xff" * 50,
        b"no protobuf",
        b"\x3a\xff\xff\xff\x7f",
        b"version https://git-lfs.github.com/spec/v1",
    ],
)
def test_a_file_that_is_no_onnx_is_a_load_error(folder, content):
    (folder / "model.onnx").write_bytes(content)
    with pytest.raises(LoadError, match=str(folder)):
        OnnxBackend.from_file(read_spec(folder), folder / "model.onnx")


def export(folder, *arguments, **options):
    return export_model(find_model(ModelConfig(model_id=str(folder), **options)), *arguments)


def exported(
    folder,
    out,
    dtype="float32",
    pooling=None,
):
    report = export(folder, out, dtype, LOOSE, pooling=pooling)
    assert str(report.path) in str(report)
    assert (report.fidelity is None) == (dtype == "float32")
    spec = read_spec(out, pooling=pooling)
    path = find_own_graph(spec, dtype)
    assert path == report.path
    assert not list(out.glob("*.safetensors")) or spec.sparse is not None
    return OnnxBackend.from_file(spec, path, dtype=dtype)


@pytest.mark.parametrize("name", ["hybrid", "m3"])
def test_a_folder_gives_what_its_checkpoint_gives(request, tmp_path, name):
    folder = request.getfixturevalue(name)
    agrees(exported(folder, tmp_path / "out"), folder)


def test_a_file_of_eight_bits_is_served_as_such(bert, tmp_path):
    backend = exported(bert, tmp_path / "out", "int8")
    assert backend.dtype == "int8"
    found, expected = (
        run(one, random_encodings(backend.spec)).dense
        for one in (backend, TorchBackend(read_spec(bert)))
    )
    cosines = (
        (found * expected).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(expected, axis=1)
    )
    assert cosines.mean() > LOOSE.mean


def test_too_much_loss_writes_nothing(bert, tmp_path):
    with pytest.raises(LoadError, match="too far"):
        export(bert, tmp_path / "out", "int8", Guard(worst=1.1))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("largest", [0, 10**9])
def test_large_weights_lie_beside_the_file_and_others_in_it(bert, tmp_path, monkeypatch, largest):
    monkeypatch.setattr(module, "LARGEST_FILE", largest)
    out = tmp_path / "out"
    # The second time over the first
    for _ in range(2):
        backend = exported(bert, out)
    data = out / "onnx" / "model.onnx_data"
    assert data.exists() == (largest == 0)
    agrees(backend, bert)
    if data.exists():
        assert data.stat().st_size < 2 * (bert / "model.safetensors").stat().st_size


def test_the_ends_are_named_as_optimum_names_them(bert, tmp_path):
    exported(bert, tmp_path / "out")
    session = ort.InferenceSession(tmp_path / "out" / "onnx" / "model.onnx")
    assert [node.name for node in session.get_inputs()] == [
        "input_ids",
        "attention_mask",
        "token_type_ids",
    ]
    assert [node.name for node in session.get_outputs()] == ["last_hidden_state"]


def test_splade_is_refused(splade, tmp_path):
    with pytest.raises(UnsupportedArchitecture, match="SPLADE"):
        export(splade, tmp_path / "out", pooling="splade")


def test_the_command_tells_what_it_wrote_or_why_not(bert, tmp_path, capsys):
    words, low = (
        ["export", str(bert), str(tmp_path / "out"), "--dtype"],
        ["--min-cosine", "0.5", "--min-mean-cosine", "0.5"],
    )
    assert cli.main([*words, "int8", *low]) == 0
    assert f"{tmp_path / 'out' / 'onnx' / 'model_quantized.onnx'}: " in capsys.readouterr().out
    assert cli.main([*words, "int8", "--min-cosine", "1.1"]) == 1
    assert "too far from float32" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main([*words, "float16"])
    assert "float32 or int8" in capsys.readouterr().err
