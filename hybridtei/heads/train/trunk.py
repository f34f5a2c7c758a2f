"""The frozen dense model whose token states the heads read."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoModel

SPECIAL_NAMES = ("[CLS]", "[SEP]", "[PAD]", "[UNK]", "[MASK]", "<s>", "</s>", "<pad>", "<unk>", "<mask>")


@dataclass(frozen=True)
class Trunk:
    """An encoder with its tokenizer, in evaluation mode."""

    model: nn.Module
    tokenizer: Tokenizer
    word_embeddings: Tensor  # [vocabulary, hidden_size], fp32
    special_ids: tuple[int, ...]  # ids which never become sparse terms
    sha256: str  # of model.safetensors

    @property
    def hidden_size(self) -> int:
        """Width of a token's last hidden state."""
        return int(self.word_embeddings.shape[1])

    def tokenize(self, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
        """Return each text's input_ids with the model's special tokens, truncated to `max_tokens`."""
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(max_tokens)
        return [list(encoding.ids) for encoding in self.tokenizer.encode_batch_fast(list(texts))]

    @torch.inference_mode()
    def encode(self, sequences: Sequence[Sequence[int]], dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Return the last hidden states [tokens, hidden_size] of each sequence, fp32, run as one padded batch."""
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
    """Return a context in which matrix products run in `dtype`: bfloat16 halves their time on CPUs which have it."""
    return torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32)


def load_trunk(folder: Path) -> Trunk:
    """Load a model folder in the Hugging Face layout (config.json, model.safetensors, tokenizer.json).

    Raises OSError where a file is missing; weights in several files or pickled are not read.
    """
    weights = folder / "model.safetensors"
    with weights.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    model = AutoModel.from_pretrained(folder, use_safetensors=True, dtype=torch.float32, local_files_only=True).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = {tokenizer.token_to_id(name) for name in SPECIAL_NAMES}
    ids |= {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    special_ids = tuple(sorted(number for number in ids if number is not None))
    embeddings = model.get_input_embeddings().weight.detach().clone()
    return Trunk(model.requires_grad_(False), tokenizer, embeddings, special_ids, digest)
