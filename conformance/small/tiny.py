"""Seeded tiny checkpoints in hub format, written into a folder and read back by the real loader.

Random weights here are not degenerate: embeddings have a standard deviation of 0.5, biases and
norms are not constant, so that a wrong position, a wrong neighbour or a dropped bias shows in the
first digits of the output.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from conformance.small.vocabulary import LONGEST, Kind, tokenizer
from hybridtei.inference.backends.graph.ops import family_graph
from hybridtei.models.checkpoint.spec import read_spec

HIDDEN = 32
# Of families with local attention: shorter than the longest texts of the tests
WINDOW = 16
SMALL = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
ENCODER = {**SMALL, "max_position_embeddings": LONGEST}
ROBERTA = {**SMALL, "max_position_embeddings": LONGEST + 2, "type_vocab_size": 1}
# Of a BERT
SHIPPED = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 512,
}
DECODER = {
    **ENCODER,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
LOCAL_AND_GLOBAL = ["sliding_attention", "full_attention"]


@dataclass(frozen=True)
class Family:
    """transformers' name for its classes, the tokenizer such models have, and the tiny settings."""

    classes: str
    tokenizer: Kind
    settings: Mapping[str, Any] = field(default_factory=dict)


T5 = {
    "d_model": HIDDEN,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
}
GEMMA = {
    **DECODER,
    "head_dim": 8,
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 8,
    "layer_types": LOCAL_AND_GLOBAL,
}
GEMMA2 = {
    **ENCODER,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": WINDOW,
    "layer_types": LOCAL_AND_GLOBAL,
    "hidden_size_per_layer_input": 12,
    "embedding_dim": 40,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
}
# Queries grow within the texts of the tests
MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
FAMILIES = {
    "bert": Family("Bert", "wordpiece", ENCODER),
    "xlm-roberta": Family("XLMRoberta", "unigram", ROBERTA),
    "roberta": Family("Roberta", "roberta", ROBERTA),
    "camembert": Family("Camembert", "unigram", ROBERTA),
    "electra": Family("Electra", "wordpiece", {**ENCODER, "embedding_size": 16}),
    "nomic_bert": Family("NomicBert", "wordpiece", ENCODER),
    "gte": Family("Gte", "unigram", ENCODER),
    "jina_embeddings_v3": Family("JinaEmbeddingsV3", "unigram", ENCODER),
    "eurobert": Family("EuroBert", "bytes", {**DECODER, "mask_token_id": 0}),
    "qwen2": Family("Qwen2", "bytes", DECODER),
    "qwen3": Family("Qwen3", "bytes", {**DECODER, "head_dim": 8}),
    "mistral": Family("Mistral", "bytes", {**DECODER, "sliding_window": WINDOW}),
    "llama": Family("Llama", "bytes", DECODER),
    "modernbert": Family(
        "ModernBert",
        "wordpiece",
        {**ENCODER, "local_attention": WINDOW, "layer_types": LOCAL_AND_GLOBAL},
    ),
    "gemma": Family("Gemma", "bytes", {**DECODER, "head_dim": 8}),
    "gemma3_text": Family("Gemma3Text", "bytes", GEMMA),
    "ministral3": Family(
        "Ministral3",
        "bytes",
        {**DECODER, "head_dim": 8, "rope_parameters": MINISTRAL_ROPE, "is_causal": False},
    ),
    "ultrabert": Family(
        "Ultrabert",
        "bytes",
        {**DECODER, "sliding_window": WINDOW, "layer_types": LOCAL_AND_GLOBAL},
    ),
    "embedding_gemma2_text": Family("EmbeddingGemma2Text", "bytes", GEMMA2),
    "distilbert": Family(
        "DistilBert",
        "wordpiece",
        {
            "dim": HIDDEN,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 48,
            "max_position_embeddings": LONGEST,
        },
    ),
    "mpnet": Family("MPNet", "unigram", ROBERTA),
    "t5": Family("T5", "unigram", T5),
    "mt5": Family("MT5", "unigram", T5),
    "deberta-v2": Family(
        "DebertaV2",
        "wordpiece",
        {
            **ENCODER,
            "relative_attention": True,
            "pos_att_type": ["c2p", "p2c"],
            "position_buckets": 8,
            "type_vocab_size": 0,
        },
    ),
}


# Families that transformers' own modules run.
MOE = {**DECODER, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
OTHERS = {
    "albert": Family("Albert", "wordpiece", {**ENCODER, "embedding_size": 16}),
    "arcee": Family("Arcee", "bytes", DECODER),
    "big_bird": Family("BigBird", "unigram", {**ENCODER, "attention_type": "original_full"}),
    "data2vec-text": Family("Data2VecText", "roberta", ROBERTA),
    "deberta": Family(
        "Deberta",
        "wordpiece",
        {**ENCODER, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    ),
    "dpr": Family("DPR", "wordpiece", ENCODER),
    "ernie": Family("Ernie", "wordpiece", ENCODER),
    "exaone4": Family("Exaone4", "bytes", {**DECODER, "sliding_window": WINDOW}),
    "fnet": Family("FNet", "unigram", ENCODER),
    "gemma2": Family(
        "Gemma2",
        "bytes",
        {**DECODER, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": WINDOW},
    ),
    "lilt": Family("Lilt", "unigram", ROBERTA),
    "longformer": Family("Longformer", "roberta", {**ROBERTA, "attention_window": WINDOW}),
    "megatron-bert": Family("MegatronBert", "wordpiece", ENCODER),
    "mixtral": Family("Mixtral", "bytes", {**DECODER, "num_local_experts": 4}),
    "nemotron": Family("Nemotron", "bytes", DECODER),
    "nystromformer": Family(
        "Nystromformer", "unigram", {**ENCODER, "segment_means_seq_len": 16, "num_landmarks": 4}
    ),
    "olmo": Family("Olmo", "bytes", DECODER),
    "olmo3": Family("Olmo3", "bytes", {**DECODER, "sliding_window": WINDOW}),
    "persimmon": Family("Persimmon", "bytes", DECODER),
    "phi": Family("Phi", "bytes", DECODER),
    "phi3": Family("Phi3", "bytes", DECODER),
    "qwen2_moe": Family("Qwen2Moe", "bytes", {**MOE, "shared_expert_intermediate_size": 24}),
    "qwen3_moe": Family("Qwen3Moe", "bytes", {**MOE, "head_dim": 8}),
    "rembert": Family(
        "RemBert", "wordpiece", {**ENCODER, "input_embedding_size": 16, "output_embedding_size": 16}
    ),
    "roformer": Family("RoFormer", "wordpiece", {**ENCODER, "embedding_size": HIDDEN}),
    "xlm-roberta-xl": Family("XLMRobertaXL", "unigram", ROBERTA),
}


def write_family(folder, model_type, *, task="Model", seed=0, **settings):
    """Model, tokenizer and configuration of a family; `task` is the end of the class's name, such
    as ForMaskedLM."""
    family = {**FAMILIES, **OTHERS}[model_type]
    words = tokenizer(family.tokenizer)
    if family.classes in (
        "DistilBert",
        "XLMRoberta",
        "Roberta",
        "Camembert",
        "MPNet",
        "ModernBert",
    ):
        words.model_input_names = ["input_ids", "attention_mask"]
    words.save_pretrained(folder)
    # Or transformers would feed them zeros
    if model_type in TYPED:
        edit_json(
            folder / "tokenizer_config.json",
            model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        )
    ids = {"pad_token_id": words.pad_token_id} if model_type != "modernbert" else MODERN_BERT_IDS
    config = getattr(transformers, f"{family.classes}Config")(
        **{"vocab_size": len(words), **ids, **family.settings, **settings}
    )
    model = getattr(transformers, f"{family.classes}{task}")(config)
    randomise(model, seed)
    model.eval().save_pretrained(folder)
    return folder


def family_spec(folder, model_type, *, pooling="mean", **settings):
    """A tiny family, as its folder is read."""
    return read_spec(write_family(folder, model_type, **settings), pooling=pooling)


def model_of(folder):
    """transformers' model of a checkpoint with its eager attention; of encoder and decoder the
    encoder."""
    model = transformers.AutoModel.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()
    return model.get_encoder() if model.config.is_encoder_decoder else model


def write_classifier(
    folder,
    model_type,
    labels=1,
    *,
    task="SequenceClassification",
    **settings,
):
    """A reranker (one label), classifier or tagger of a family."""
    names = {i: f"label-{i}" for i in range(labels)}
    more = {"id2label": names, "label2id": {name: i for i, name in names.items()}, **settings}
    return write_family(folder, model_type, task=f"For{task}", **more)


TYPED = frozenset(
    {"albert", "bert", "electra", "ernie", "megatron-bert", "nomic_bert", "rembert", "roformer"}
)


MODERN_BERT_IDS = {
    "pad_token_id": 0,
    "bos_token_id": 2,
    "cls_token_id": 2,
    "eos_token_id": 3,
    "sep_token_id": 3,
}


def randomise(model, seed):
    """Weights whose outputs differ from token to token: 0.5 for embeddings, 0.2 for matrices, 0.1
    around biases and norms."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=draw)
            if parameter.shape == (model.config.vocab_size,):
                # A language model's bias: most of SPLADE's weights are zero
                parameter.copy_(noise - 5)
            elif parameter.dim() < 2:
                parameter.add_(0.1 * noise)
            else:
                table = "embed" in name or len(parameter) == model.config.vocab_size
                parameter.copy_((0.5 if table else 0.2) * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.add_(0.1 * torch.randn(buffer.shape, generator=draw))


def write_bert(folder, *, seed=0, pooling="mean", **settings):
    """A BERT with a Pooling module, as sentence-transformers 6 writes it; without one for None."""
    write_family(folder, "bert", seed=seed, **settings)
    return folder if pooling is None else write_modules(folder, pooling=pooling)


def write_m3(
    folder,
    *,
    seed=0,
    dtype=torch.float16,
    dim=24,
    suffix=".pt",
):
    """An XLM-R with BGE-M3's two heads beside it."""
    write_family(folder, "xlm-roberta", seed=seed)
    write_modules(folder, pooling="cls", normalize=True)
    write_linear(folder / f"sparse_linear{suffix}", 1, seed=seed + 1, dtype=dtype)
    write_linear(folder / f"colbert_linear{suffix}", dim, seed=seed + 2, dtype=dtype)
    return folder


def write_linear(
    path,
    width,
    *,
    seed=0,
    dtype=torch.float16,
    hidden=HIDDEN,
):
    """A one-layer head, `weight` and `bias`: a torch pickle or safetensors, by its suffix."""
    weights = {
        "weight": _random(width, hidden, seed=seed).to(dtype),
        "bias": _random(width, seed=seed + 100).to(dtype),
    }
    save_file(weights, path) if path.suffix == ".safetensors" else torch.save(weights, path)


def write_own_heads(
    folder,
    *,
    dim=12,
    width=8,
    inputs=("hidden", "embedding"),
    seed=0,
    hidden=HIDDEN,
    **changes,
):
    """`hybridtei_heads.safetensors`: a perceptron for lexical weights, a projection for
    multi-vectors. Returns the tensors."""
    tensors = {
        "sparse.hidden.weight": _random(width, hidden * len(inputs), seed=seed),
        "sparse.hidden.bias": _random(width, seed=seed + 1),
        "sparse.out.weight": _random(1, width, seed=seed + 2),
        "sparse.out.bias": _random(1, seed=seed + 3),
        "multivector.weight": _random(dim, hidden, seed=seed + 4),
    }
    described = {
        "version": 1,
        "hidden_size": hidden,
        "sparse": {"inputs": list(inputs), "activation": "gelu", "idf": True},
        "multivector": {"dim": dim, "drop": "specials"},
        **changes,
    }
    save_file(
        tensors,
        folder / "hybridtei_heads.safetensors",
        metadata={"hybridtei_heads": json.dumps(described)},
    )
    return tensors


def write_modules(
    folder,
    *,
    pooling="mean",
    dense=(),
    normalize=False,
    layout="new",
    max_seq_length=None,
    prompts=None,
    default_prompt_name=None,
):
    """modules.json and what it names, in the layout before or since sentence-transformers 6.
    `dense`: (in, out, activation)."""
    names = [
        "Transformer",
        "Pooling",
        *("Dense" for _ in dense),
        *(["Normalize"] if normalize else []),
    ]
    homes = {
        "old": "sentence_transformers.models",
        "new": "sentence_transformers.sentence_transformer.modules",
    }
    paths = ["", *(f"{number}_{name}" for number, name in enumerate(names) if number)]
    types = [f"{_home(homes[layout], name, layout)}.{name}" for name in names]
    rows = zip(types, paths, strict=True)
    write_json(
        folder / "modules.json",
        [{"idx": i, "name": str(i), "path": path, "type": of} for i, (of, path) in enumerate(rows)],
    )
    modes = [pooling] if isinstance(pooling, str) else list(pooling)
    write_json(
        folder / "1_Pooling" / "config.json",
        old_pooling(modes) if layout == "old" else _new_pooling(modes),
    )
    if layout == "old":
        write_json(
            folder / "sentence_bert_config.json",
            {"max_seq_length": max_seq_length or LONGEST, "do_lower_case": False},
        )
    for number, (wide, narrow, activation) in enumerate(dense, start=2):
        write_dense(folder / f"{number}_Dense", wide, narrow, activation, seed=number)
    if prompts is not None:
        declared = {
            "prompts": dict(prompts),
            "default_prompt_name": default_prompt_name,
            "similarity_fn_name": "cosine",
        }
        write_json(folder / "config_sentence_transformers.json", declared)
    return folder


def _home(home, name, layout):
    shared = {"Transformer", "Dense", "Normalize"}
    return "sentence_transformers.base.modules" if layout == "new" and name in shared else home


def old_pooling(modes):
    """The settings of a Pooling module as sentence-transformers 5 writes them."""
    flags = {
        "cls": "cls_token",
        "max": "max_tokens",
        "mean": "mean_tokens",
        "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    }
    flags |= {"weightedmean": "weightedmean_tokens", "lasttoken": "lasttoken"}
    return {
        "word_embedding_dimension": HIDDEN,
        **{f"pooling_mode_{flag}": mode in modes for mode, flag in flags.items()},
    }


def _new_pooling(modes):
    mode = modes[0] if len(modes) == 1 else list(modes)
    return {"embedding_dimension": HIDDEN, "pooling_mode": mode, "include_prompt": True}


def write_dense(
    folder,
    wide,
    narrow,
    activation="torch.nn.modules.activation.Tanh",
    *,
    seed=0,
):
    """A Dense module: its configuration and its weights."""
    settings = {
        "in_features": wide,
        "out_features": narrow,
        "bias": True,
        "activation_function": activation,
    }
    write_json(folder / "config.json", settings)
    weights = {
        "linear.weight": _random(narrow, wide, seed=seed),
        "linear.bias": _random(narrow, seed=seed + 1),
    }
    save_file(weights, folder / "model.safetensors")


def write_json(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def edit_json(path, **changes):
    """Set some keys of a JSON object in a file; a key set to ... is removed."""
    merged = {**json.loads(path.read_text(encoding="utf-8")), **changes}
    write_json(path, {key: value for key, value in merged.items() if value is not ...})


def configured(folder, **changes):
    """The checkpoint, after some keys of config.json are set; a key set to ... is removed."""
    edit_json(folder / "config.json", **changes)
    return folder


def change(folder, edit):
    """Rewrite a checkpoint's tensors."""
    file = folder / "model.safetensors"
    save_file(edit(load_file(file)), file, metadata={"format": "pt"})
    return folder


def change_each(folder, edit):
    """Rewrite each tensor of a checkpoint by itself."""
    return change(folder, lambda tensors: {name: edit(tensors[name]) for name in tensors})


def without(folder, *names):
    """The checkpoint, after some of its tensors are removed."""
    return change(
        folder, lambda tensors: {name: tensors[name] for name in tensors if name not in names}
    )


def _random(*shape, seed):
    return 0.3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# Positions from 0, from the padding id, windows, causal attention
QUICK = (
    "bert",
    "xlm-roberta",
    "modernbert",
    "qwen3",
)


@functools.cache
def graph_of(model_type, rectangle=False):
    """The graph of a tiny family; the checkpoint whose configuration it was made from is gone by
    then."""
    with TemporaryDirectory() as folder:
        return family_graph(
            read_spec(write_family(Path(folder), model_type), pooling="mean"), rectangle=rectangle
        )
