"""Token states of the frozen trunk, computed once and kept on disk.

Every epoch and every variant of the heads reads the same states, so training costs one pass of the trunk, whatever
else is tried. Layout of the folder, all raw little-endian arrays: `hidden_states.f16` [tokens, hidden_size],
`input_ids.i32` [tokens], `cu_seqlens.i64` [texts + 1]; and `cache.json`, written last, which says what they belong to.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from tqdm import tqdm

from hybridtei.heads.train.trunk import Trunk

BATCH_TOKENS = 4096  # padded tokens per forward pass: keeps the activations of a small model in the CPU's cache


@dataclass(frozen=True)
class TokenStates:
    """Token states of a list of texts, one after another."""

    hidden_states: npt.NDArray[np.float16]  # [tokens, hidden_size]
    input_ids: npt.NDArray[np.int32]  # [tokens]
    cu_seqlens: npt.NDArray[np.int64]  # [texts + 1]

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
        """Return the texts' unit dense vectors [texts, hidden_size], fp32, by "mean" or "cls" pooling."""
        out = torch.empty(len(self), self.hidden_states.shape[1])
        for text in range(len(self)):
            states = self.rows([text])[0]
            out[text] = states[0] if pooling == "cls" else states.mean(0)
        return torch.nn.functional.normalize(out, dim=-1)


def cached_states(
    folder: Path, trunk: Trunk, texts: Sequence[str], max_tokens: int, dtype: torch.dtype = torch.float32
) -> TokenStates:
    """Return the texts' token states from `folder`, computing them first unless it holds exactly these.

    `dtype` is the trunk's compute type (bfloat16 runs under autocast). Disk: 2 x hidden_size bytes a token.
    """
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256("\0".join(texts).encode("utf-8", errors="surrogatepass")).hexdigest()
    label = {"model": trunk.sha256, "texts": digest, "max_tokens": max_tokens, "dtype": str(dtype)}
    if _read_label(folder) != label:
        (folder / "cache.json").unlink(missing_ok=True)
        _write_states(folder, trunk, texts, max_tokens, dtype)
        (folder / "cache.json").write_text(json.dumps(label, indent=1) + "\n", encoding="utf-8")
    return _open_states(folder, trunk.hidden_size)


def _read_label(folder: Path) -> object:
    path = folder / "cache.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _open_states(folder: Path, hidden_size: int) -> TokenStates:
    hidden = np.memmap(folder / "hidden_states.f16", dtype="<f2", mode="r").reshape(-1, hidden_size)
    input_ids = np.fromfile(folder / "input_ids.i32", dtype="<i4")
    return TokenStates(hidden, input_ids, np.fromfile(folder / "cu_seqlens.i64", dtype="<i8"))


def _write_states(folder: Path, trunk: Trunk, texts: Sequence[str], max_tokens: int, dtype: torch.dtype) -> None:
    sequences = trunk.tokenize(texts, max_tokens)
    cu_seqlens = np.cumsum([0, *map(len, sequences)], dtype="<i8")
    np.concatenate([np.asarray(ids, dtype="<i4") for ids in sequences]).tofile(folder / "input_ids.i32")
    cu_seqlens.tofile(folder / "cu_seqlens.i64")
    shape = (int(cu_seqlens[-1]), trunk.hidden_size)
    hidden = np.memmap(folder / "hidden_states.f16", dtype="<f2", mode="w+", shape=shape)
    with tqdm(total=shape[0], desc="token states", unit="tok", unit_scale=True) as progress:
        for batch in _batches_by_length(sequences):
            for text, states in zip(batch, trunk.encode([sequences[text] for text in batch], dtype), strict=True):
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
