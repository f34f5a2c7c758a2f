"""The frozen dense model, its token states, and the two trainable heads with their scores.

Arrays are packed: all tokens of a batch of texts in one axis. cu_seqlens [texts + 1] has the start
of each text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm
from transformers import AutoModel

from hybridtei.errors import LoadError
from hybridtei.models.checkpoint.contents import check_contents
from hybridtei.models.checkpoint.folder import Folder
from hybridtei.models.checkpoint.peft import ADAPTER

SPECIAL_NAMES = (
    "[CLS]",
    "[SEP]",
    "[PAD]",
    "[UNK]",
    "[MASK]",
    "<s>",
    "</s>",
    "<pad>",
    "<unk>",
    "<mask>",
)


@dataclass(frozen=True)
class Trunk:
    """An encoder with its tokenizer, in evaluation mode."""

    model: nn.Module
    tokenizer: Tokenizer
    # [vocabulary, hidden_size], fp32
    word_embeddings: Tensor
    # Ids that never become sparse terms
    special_ids: tuple[int, ...]
    # Of model.safetensors
    sha256: str

    @property
    def hidden_size(self) -> int:
        """Width of a token's last hidden state."""
        return int(self.word_embeddings.shape[1])

    def tokenize(self, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
        """Return each text's input_ids with the model's special tokens, truncated to
        `max_tokens`."""
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(max_tokens)
        return [list(encoding.ids) for encoding in self.tokenizer.encode_batch_fast(list(texts))]

    @torch.inference_mode()
    def encode(
        self, sequences: Sequence[Sequence[int]], dtype: torch.dtype = torch.float32
    ) -> list[Tensor]:
        """Return the last hidden states [tokens, hidden_size] of each sequence, fp32, run as one
        padded batch."""
        longest = max(map(len, sequences))
        input_ids = torch.zeros(len(sequences), longest, dtype=torch.long)
        attention_mask = torch.zeros_like(input_ids)
        for row, ids in enumerate(sequences):
            input_ids[row, : len(ids)] = torch.as_tensor(ids)
            attention_mask[row, : len(ids)] = 1
        with autocast(dtype):
            output = self.model(input_ids=input_ids, attention_mask=attention_mask)
        states: Tensor = output.last_hidden_state.float()
        return [states[row, : len(ids)] for row, ids in enumerate(sequences)]


def autocast(dtype: torch.dtype) -> torch.autocast:
    """Return a context in which matrix products run in `dtype`. bfloat16 halves their time on CPUs
    that have it."""
    return torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32)


def load_trunk(folder: Path) -> Trunk:
    """Load a model folder in the Hugging Face layout (config.json, model.safetensors,
    tokenizer.json).

    Raises OSError for a missing file, and the errors of `check_contents`. Does not read sharded or
    pickled weights.
    """
    check_contents(Folder(folder))
    if (folder / ADAPTER).exists():
        raise LoadError(
            f"{folder / ADAPTER}: heads are not trained on a model with an adapter: merge it by "
            "peft's `merge_and_unload` and train on the folder that `save_pretrained` writes"
        )
    weights = folder / "model.safetensors"
    with weights.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    model = AutoModel.from_pretrained(
        folder, use_safetensors=True, dtype=torch.float32, local_files_only=True
    ).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = {tokenizer.token_to_id(name) for name in SPECIAL_NAMES}
    ids |= {
        number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special
    }
    special_ids = tuple(sorted(number for number in ids if number is not None))
    embeddings = model.get_input_embeddings().weight.detach().clone()
    return Trunk(model.requires_grad_(False), tokenizer, embeddings, special_ids, digest)


# Padded tokens a pass, so that a small model's activations fit the CPU's cache
BATCH_TOKENS = 4096


@dataclass(frozen=True)
class TokenStates:
    """Token states of a list of texts, one after another."""

    # [tokens, hidden_size]
    hidden_states: npt.NDArray[np.float16]
    # [tokens]
    input_ids: npt.NDArray[np.int32]
    # [texts + 1]
    cu_seqlens: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.cu_seqlens) - 1

    def rows(self, texts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the chosen texts' hidden states (fp32), input_ids and cu_seqlens, packed."""
        spans = [slice(self.cu_seqlens[text], self.cu_seqlens[text + 1]) for text in texts]
        lengths = [span.stop - span.start for span in spans]
        hidden = np.concatenate([self.hidden_states[span] for span in spans])
        ids = np.concatenate([self.input_ids[span] for span in spans])
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
        return torch.from_numpy(hidden).float(), torch.from_numpy(ids).long(), cu_seqlens

    def pooled(self, pooling: str) -> Tensor:
        """Return the texts' unit dense vectors [texts, hidden_size], fp32, by "mean" or "cls"
        pooling."""
        out = torch.empty(len(self), self.hidden_states.shape[1])
        for text in range(len(self)):
            states = self.rows([text])[0]
            out[text] = states[0] if pooling == "cls" else states.mean(0)
        return torch.nn.functional.normalize(out, dim=-1)


def cached_states(
    folder: Path,
    trunk: Trunk,
    texts: Sequence[str],
    max_tokens: int,
    dtype: torch.dtype = torch.float32,
) -> TokenStates:
    """Return the texts' token states from `folder`. Computes them first unless the folder has
    exactly these.

    `dtype` is the trunk's compute type (bfloat16 runs under autocast). Disk: 2 x hidden_size bytes
    a token.
    """
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256("\0".join(texts).encode("utf-8", errors="surrogatepass")).hexdigest()
    label = {"model": trunk.sha256, "texts": digest, "max_tokens": max_tokens, "dtype": str(dtype)}
    written = json.dumps(label, indent=1) + "\n"
    file = folder / "cache.json"
    if not file.exists() or file.read_text(encoding="utf-8") != written:
        file.unlink(missing_ok=True)
        _write_states(folder, trunk, texts, max_tokens, dtype)
        file.write_text(written, encoding="utf-8")
    return _open_states(folder, trunk.hidden_size)


def _open_states(folder: Path, hidden_size: int) -> TokenStates:
    hidden = np.memmap(folder / "hidden_states.f16", dtype="<f2", mode="r").reshape(-1, hidden_size)
    input_ids = np.fromfile(folder / "input_ids.i32", dtype="<i4")
    return TokenStates(hidden, input_ids, np.fromfile(folder / "cu_seqlens.i64", dtype="<i8"))


def _write_states(
    folder: Path, trunk: Trunk, texts: Sequence[str], max_tokens: int, dtype: torch.dtype
) -> None:
    sequences = trunk.tokenize(texts, max_tokens)
    cu_seqlens = np.cumsum([0, *map(len, sequences)], dtype="<i8")
    np.concatenate([np.asarray(ids, dtype="<i4") for ids in sequences]).tofile(
        folder / "input_ids.i32"
    )
    cu_seqlens.tofile(folder / "cu_seqlens.i64")
    shape = (int(cu_seqlens[-1]), trunk.hidden_size)
    hidden = np.memmap(folder / "hidden_states.f16", dtype="<f2", mode="w+", shape=shape)
    with tqdm(total=shape[0], desc="token states", unit="tok", unit_scale=True) as progress:
        for batch in _batches_by_length(sequences):
            for text, states in zip(
                batch, trunk.encode([sequences[text] for text in batch], dtype), strict=True
            ):
                hidden[cu_seqlens[text] : cu_seqlens[text + 1]] = states.numpy()
                progress.update(len(states))
    hidden.flush()


def _batches_by_length(sequences: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Yield text indices, longest first, in batches of at most `BATCH_TOKENS` padded tokens."""
    order = sorted(range(len(sequences)), key=lambda text: -len(sequences[text]))
    start = 0
    while start < len(order):
        size = max(1, BATCH_TOKENS // len(sequences[order[start]]))
        yield order[start : start + size]
        start += size


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "relu": functional.relu,
    "silu": functional.silu,
}
DROPS = ("first", "specials", "none")


class SparseHeadModule(nn.Module):
    """A weight >= 0 for every token: BGE-M3's linear form (width 0) or a perceptron with one hidden
    layer.

    Inputs are the last hidden state and optionally the token's word embedding, which is independent
    of the context. Linear form: https://arxiv.org/abs/2402.03216, section 3.2.
    """

    def __init__(
        self, hidden_size: int, width: int, inputs: Sequence[str], activation: str
    ) -> None:
        super().__init__()
        if list(inputs) not in (["hidden"], ["hidden", "embedding"]):
            raise ValueError(f"inputs must be hidden, or hidden and embedding, not {list(inputs)}")
        self.inputs, self.activation = list(inputs), activation
        in_features = hidden_size * len(self.inputs)
        self.hidden = nn.Linear(in_features, width) if width else None
        self.out = nn.Linear(width or in_features, 1)
        # Every token starts above 0, since relu has no gradient below 0
        nn.init.constant_(self.out.bias, 1.0)

    def forward(self, hidden_states: Tensor, embeddings: Tensor) -> Tensor:
        """Return weights [tokens] from hidden states and layer-normed word embeddings, each
        [tokens, hidden_size]."""
        x = torch.cat([hidden_states, embeddings], -1) if len(self.inputs) == 2 else hidden_states
        if self.hidden is not None:
            x = ACTIVATIONS[self.activation](self.hidden(x))
        return functional.relu(self.out(x)).squeeze(-1).float()


class MultivectorHeadModule(nn.Linear):
    """A vector for every token: a linear projection. Its dimensions are ordered, so that a prefix
    of them also works.

    The vector is the projection, or its prefix, scaled to unit length.
    """

    @torch.no_grad()
    def start_from(self, hidden_states: Tensor) -> None:
        """Set the weights to the principal directions, largest first, of a sample of unit token
        states."""
        unit = functional.normalize(hidden_states, dim=-1)
        _, vectors = torch.linalg.eigh((unit.T @ unit).double())
        directions = vectors.flip(1)[:, : self.out_features].T
        # `eigh` leaves the sign open: the largest number of each direction becomes positive
        signs = directions.gather(1, directions.abs().argmax(1, keepdim=True)).sign()
        self.weight.copy_(directions * signs)
        if self.bias is not None:
            self.bias.zero_()


def text_of_token(cu_seqlens: Tensor) -> Tensor:
    """Return the number of the text each packed token belongs to, [tokens]."""
    return torch.repeat_interleave(torch.arange(len(cu_seqlens) - 1), cu_seqlens.diff())


def term_matrix(weights: Tensor, input_ids: Tensor, cu_seqlens: Tensor, columns: Tensor) -> Tensor:
    """Return each text's term weights [texts, terms]: the maximum over a term's repeats, 0 for
    absent terms.

    `columns` [vocabulary] has each id's column, -1 for ids that are no terms.
    """
    texts, terms = len(cu_seqlens) - 1, int(columns.max()) + 1
    column = columns[input_ids]
    is_term = column >= 0
    # Each weight's place in the matrix, row after row
    place = text_of_token(cu_seqlens)[is_term] * terms + column[is_term]
    zeros = weights.new_zeros(texts * terms)
    return zeros.scatter_reduce(0, place, weights[is_term], "amax").view(texts, terms)


def maxsim(
    query_vectors: Tensor, query_cu_seqlens: Tensor, text_vectors: Tensor, text_cu_seqlens: Tensor
) -> Tensor:
    """Return MaxSim [queries, texts] divided by the query's number of vectors (a cosine,
    independent of the length)."""
    similarity = query_vectors @ text_vectors.T
    lengths: list[int] = text_cu_seqlens.diff().tolist()
    # A text without vectors scores 0
    zeros = similarity.new_zeros(len(similarity))
    parts = torch.split(similarity, lengths, dim=1)
    # The best match of each query's vector in each text
    matches = [part.max(1).values if part.shape[1] else zeros for part in parts]
    best = torch.stack(matches, 1).float()
    counts = query_cu_seqlens.diff()
    total = best.new_zeros(len(counts), len(lengths)).index_add(
        0, text_of_token(query_cu_seqlens), best
    )
    return total / counts.clamp_min(1).unsqueeze(1)
