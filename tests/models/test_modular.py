"""Checkpoints whose heads are modules of their own, and tables of token vectors, against
sentence-transformers."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Dense, Transformer
from sentence_transformers.sentence_transformer.modules import LayerNorm, Pooling
from sentence_transformers.sparse_encoder.modules import SparseAutoEncoder
from tokenizers import Tokenizer

from conformance.small import tiny, vocabulary
from conformance.small.saved import shaken, static
from hybridtei.batch import Head
from hybridtei.encoder import Encoder
from hybridtei.errors import UnsupportedArchitecture, UnsupportedHead, WeightMismatch
from hybridtei.inference.backends.graph.onnx_export import export_model
from hybridtei.models.checkpoint.spec import read_spec
from tests.models.refused import raised, refuses
from tests.near import near, scores_of

TEXTS = [*dict.fromkeys(vocabulary.texts(12, seed=7))]
TOLERANCE = 1e-5
BACKENDS = ["ort", "openvino", "torch"]


def trunk(folder, model_type):
    base = tiny.write_family(folder / "base", model_type)
    return [
        Transformer(str(base)),
        Pooling(tiny.HIDDEN, "cls" if model_type == "modernbert" else "mean"),
    ]


def reranker(folder, model_type="modernbert"):
    """As the ettin rerankers are built."""
    steps = [
        Dense(tiny.HIDDEN, 24, bias=False, activation_function=torch.nn.GELU()),
        LayerNorm(24),
        Dense(24, 1, activation_function=torch.nn.Identity(), module_output_name="scores"),
    ]
    model = CrossEncoder(modules=[*trunk(folder, model_type), *map(shaken, steps)], device="cpu")
    model.save_pretrained(str(folder / "saved"))
    return folder / "saved"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model_type", ["modernbert", "bert"])
def test_a_cross_encoder_in_modules_scores_as_theirs(tmp_path, model_type, backend):
    folder = reranker(tmp_path, model_type)
    pairs = [(TEXTS[0], text) for text in TEXTS]
    theirs = CrossEncoder(str(folder), device="cpu").predict(
        pairs, activation_fn=torch.nn.Identity()
    )
    ranked = Encoder.load(folder, backend=backend).rerank(TEXTS[0], TEXTS, raw_scores=True)
    near(scores_of(ranked), theirs, TOLERANCE)
    assert np.ptp(theirs) > 100 * TOLERANCE


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("normalize", [False, True])
def test_a_code_is_theirs(tmp_path, backend, normalize):
    coder = shaken(SparseAutoEncoder(tiny.HIDDEN, hidden_dim=96, k=10, normalize=normalize))
    SparseEncoder(modules=[*trunk(tmp_path, "bert"), coder], device="cpu").save_pretrained(
        str(tmp_path / "saved")
    )
    theirs = SparseEncoder(str(tmp_path / "saved"), device="cpu").encode(TEXTS).to_dense().numpy()
    encoder = Encoder.load(tmp_path / "saved", backend=backend)
    assert encoder.spec.heads == {Head.DENSE, Head.SPARSE, Head.TOKENS}
    ours = encoder.encode(TEXTS, ("sparse",)).sparse
    near(ours.to_dense(), theirs, TOLERANCE)
    with pytest.raises(UnsupportedHead, match="no token"):
        encoder.tokens(ours)
    with pytest.raises(UnsupportedArchitecture, match="SparseAutoEncoder"):
        export_model(encoder.spec, tmp_path / "exported")


def token_coder(folder, **settings):
    """A folder whose SparseAutoEncoder follows the transformer, without a pooling."""
    coder = shaken(SparseAutoEncoder(tiny.HIDDEN, hidden_dim=96, k=10, **settings))
    transformer = trunk(folder, "modernbert")[0]
    SparseEncoder(modules=[transformer, coder], device="cpu").save_pretrained(str(folder / "saved"))
    return transformer, coder


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_code_of_tokens_is_the_maximum_over_their_largest_latents(tmp_path, backend):
    transformer, coder = token_coder(tmp_path)
    encoder = Encoder.load(tmp_path / "saved", backend=backend)
    assert encoder.spec.heads == {Head.SPARSE, Head.TOKENS}
    ours = encoder.encode(TEXTS, ("sparse",)).sparse.to_dense()
    for row, text in zip(ours, TEXTS, strict=True):
        with torch.inference_mode():
            states = transformer(transformer.preprocess([text]))["token_embeddings"][0]
            unit = torch.nn.functional.normalize(states)
            latents, _ = coder.top_k(coder.encode_pre_act(unit), compute_aux=False)
        near(row, latents.amax(0).numpy(), TOLERANCE)
    assert (ours > 0).any(1).all()


def test_a_code_of_tokens_is_not_normalized_by_layer(tmp_path):
    token_coder(tmp_path, normalize=True)
    with pytest.raises(UnsupportedArchitecture, match="put a Pooling before it"):
        Encoder.load(tmp_path / "saved")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model_type", ["t5", "mt5"])
def test_the_encoder_of_a_t5_embeds_as_theirs(tmp_path, model_type, backend):
    """As sentence-t5, GTR and INSTRUCTOR are built, which are saved without the decoder."""
    steps = [
        *trunk(tmp_path, model_type),
        shaken(Dense(tiny.HIDDEN, 24, bias=False, activation_function=torch.nn.Identity())),
    ]
    SentenceTransformer(modules=steps, device="cpu").save_pretrained(str(tmp_path / "saved"))
    assert not [
        name
        for name in load_file(tmp_path / "saved/model.safetensors")
        if name.startswith("decoder")
    ]
    agrees(tmp_path / "saved", backend=backend)


def home(folder):
    """Where a saved StaticEmbedding lies."""
    return next(file.parent for file in folder.rglob("tokenizer.json"))


def agrees(folder, **options):
    theirs = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    ours = Encoder.load(folder, **options).encode(TEXTS, normalize=False).dense
    near(ours, theirs, TOLERANCE)


def test_a_static_embedding_is_theirs_in_both_spellings(tmp_path):
    folder = static(tmp_path)
    agrees(folder)
    file = home(folder) / "model.safetensors"
    table = load_file(file)["embedding.weight"]
    rows = torch.arange(len(table)) % 40
    save_file(
        {
            "embeddings": table[:40].contiguous(),
            "mapping": rows,
            "weights": torch.linspace(0.5, 2, len(table)),
        },
        file,
    )
    agrees(folder)
    encoder = Encoder.load(folder)
    assert encoder.backend_name == "static"
    # By another way than the dense vectors alone
    both = encoder.encode(TEXTS, ("dense", "tokens"))
    near(both.dense, encoder.encode(TEXTS).dense, 1e-6)
    tokens = encoder.encode(["baka bulo"], ("tokens",)).tokens
    # Without special tokens
    assert len(tokens.values) < len(vocabulary.tokenizer("wordpiece")("baka bulo")["input_ids"])


def test_what_modules_cannot_run_is_refused_by_name(tmp_path):
    folder = reranker(tmp_path)
    modules = tiny.json.loads((folder / "modules.json").read_text())
    norm = next(one["path"] for one in modules if one["type"].endswith("LayerNorm"))
    tiny.edit_json(folder / norm / "config.json", dimension=25)
    raised(WeightMismatch, folder, f"{norm}/config.json")
    tiny.write_json(
        folder / "modules.json",
        [*modules, {"type": "sentence_transformers.models.LSTM", "path": ""}],
    )
    assert "LSTM" in raised(UnsupportedArchitecture, folder, "modules.json")
    tiny.write_json(
        folder / "modules.json", [one for one in modules if not one["type"].endswith("Pooling")]
    )
    refuses(folder, UnsupportedArchitecture, "order")


@pytest.mark.parametrize("direction", ["right", "left"])
def test_a_static_embedding_keeps_the_truncation_of_its_tokenizer(tmp_path, direction):
    folder = static(tmp_path)
    file = home(folder) / "tokenizer.json"
    raw = Tokenizer.from_file(str(file))
    raw.enable_truncation(3, direction=direction)
    raw.save(str(file))
    agrees(folder)
    assert read_spec(folder).max_input_length == 3
