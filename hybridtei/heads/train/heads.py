"""The two trainable heads over frozen token states, and how they score.

Shapes are packed: all tokens of a batch of texts in one axis, with cu_seqlens [texts + 1] marking where each begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "relu": functional.relu,
    "silu": functional.silu,
}
DROPS = ("first", "specials", "none")


class SparseHead(nn.Module):
    """A weight >= 0 for every token: BGE-M3's linear form (width 0) or a perceptron with one hidden layer.

    Inputs are the last hidden state, and on request the token's word embedding, which tells the head what the token
    is before context blurred it. Linear form: https://arxiv.org/abs/2402.03216, section 3.2.
    """

    def __init__(self, hidden_size: int, width: int, inputs: Sequence[str], activation: str) -> None:
        super().__init__()
        if list(inputs) not in (["hidden"], ["hidden", "embedding"]):
            raise ValueError(f"inputs must be hidden, or hidden and embedding, not {list(inputs)}")
        self.inputs, self.activation = list(inputs), activation
        in_features = hidden_size * len(self.inputs)
        self.hidden = nn.Linear(in_features, width) if width else None
        self.out = nn.Linear(width or in_features, 1)
        nn.init.constant_(self.out.bias, 1.0)  # start with every token counting: relu has no gradient below 0

    def forward(self, hidden_states: Tensor, embeddings: Tensor) -> Tensor:
        """Return weights [tokens] from hidden states and layer-normed word embeddings, each [tokens, hidden_size]."""
        x = torch.cat([hidden_states, embeddings], -1) if len(self.inputs) == 2 else hidden_states
        if self.hidden is not None:
            x = ACTIVATIONS[self.activation](self.hidden(x))
        return functional.relu(self.out(x)).squeeze(-1).float()


class MultiVectorHead(nn.Linear):
    """A vector for every token: a linear projection, ordered so that a prefix of the dimensions also serves.

    What serves is the projection, or its prefix, scaled to unit length.
    """

    def __init__(self, hidden_size: int, dim: int, bias: bool) -> None:
        super().__init__(hidden_size, dim, bias=bias)

    @torch.no_grad()
    def start_from(self, hidden_states: Tensor) -> None:
        """Set the weights to the principal directions, largest first, of a sample of unit token states."""
        unit = functional.normalize(hidden_states, dim=-1)
        _, vectors = torch.linalg.eigh((unit.T @ unit).double())
        directions = vectors.flip(1)[:, : self.out_features].T
        signs = directions.gather(1, directions.abs().argmax(1, keepdim=True)).sign()  # eigh leaves the sign open
        self.weight.copy_(directions * signs)
        if self.bias is not None:
            self.bias.zero_()


def text_of_token(cu_seqlens: Tensor) -> Tensor:
    """Return the number of the text each packed token belongs to, [tokens]."""
    return torch.repeat_interleave(torch.arange(len(cu_seqlens) - 1), cu_seqlens.diff())


def keep_tokens(input_ids: Tensor, cu_seqlens: Tensor, drop: str, special_ids: Tensor) -> Tensor:
    """Return a mask [tokens] of the tokens that get a vector: all but the "first", but the "specials", or all."""
    if drop == "specials":
        return ~torch.isin(input_ids, special_ids)
    keep = torch.ones_like(input_ids, dtype=torch.bool)
    if drop == "first":
        keep[cu_seqlens[:-1]] = False
    return keep


def term_matrix(weights: Tensor, input_ids: Tensor, cu_seqlens: Tensor, columns: Tensor) -> Tensor:
    """Return each text's term weights [texts, terms]: the maximum over a term's repeats, 0 for absent terms.

    `columns` [vocabulary] gives each id's column, -1 for ids that are no terms here.
    """
    texts, terms = len(cu_seqlens) - 1, int(columns.max()) + 1
    column = columns[input_ids]
    used = column >= 0
    place = text_of_token(cu_seqlens)[used] * terms + column[used]
    return weights.new_zeros(texts * terms).scatter_reduce(0, place, weights[used], "amax").view(texts, terms)


def maxsim(query_vectors: Tensor, query_cu_seqlens: Tensor, text_vectors: Tensor, text_cu_seqlens: Tensor) -> Tensor:
    """Return MaxSim [queries, texts] divided by the query's number of vectors (a cosine, whatever the length)."""
    similarity = query_vectors @ text_vectors.T
    lengths: list[int] = text_cu_seqlens.diff().tolist()
    nothing = similarity.new_zeros(len(similarity))  # a text without vectors scores 0
    parts = torch.split(similarity, lengths, dim=1)
    best = torch.stack([part.max(1).values if part.shape[1] else nothing for part in parts], 1).float()
    counts = query_cu_seqlens.diff()
    total = best.new_zeros(len(counts), len(lengths)).index_add(0, text_of_token(query_cu_seqlens), best)
    return total / counts.clamp_min(1).unsqueeze(1)
