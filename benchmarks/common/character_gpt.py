"""A GPT-2 as small ones are usually trained on characters: learned positions, GELU, tied head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STD = 0.02  # of all initial weights; residual branches start smaller


@dataclass(frozen=True)
class CharacterGPTConfig:
    """The shape of a model; ``dim`` must be a multiple of ``heads``.

    Attributes:
        context: the most positions.
        dropout: probability, on the embedding, in attention and on both residual branches.
    """

    vocab_size: int
    layers: int
    heads: int
    dim: int
    context: int
    dropout: float = 0.0


class Attention(nn.Module):
    """Causal attention. Queries, keys and values are matrices of their own."""

    def __init__(self, config: CharacterGPTConfig):
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.query = nn.Linear(config.dim, config.dim, bias=False)
        self.key = nn.Linear(config.dim, config.dim, bias=False)
        self.value = nn.Linear(config.dim, config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Attend over the earlier positions of x, (batch, time, dim)."""
        q = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k = self.key(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        v = self.value(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        mixed: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return mixed


class Block(nn.Module):
    """Attention and a GELU network, each added to the residual stream after a norm."""

    def __init__(self, config: CharacterGPTConfig):
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.dim, bias=False)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.dim, bias=False)
        self.up = nn.Linear(config.dim, 4 * config.dim, bias=False)
        self.down = nn.Linear(4 * config.dim, config.dim, bias=False)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream, (batch, time, dim), after this block."""
        x = x + self.drop(self.attention(self.attention_norm(x)))
        mapped: Tensor = self.down(F.gelu(self.up(self.mlp_norm(x))))
        result: Tensor = x + self.drop(mapped)
        return result


class CharacterGPT(nn.Module):
    """The model; calling it with tokens and targets gives the mean loss in nats per token."""

    def __init__(self, config: CharacterGPTConfig):
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.positions = nn.Embedding(config.context, config.dim)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim, bias=False)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.head.weight = self.embedding.weight
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                branch = name.endswith(("out.weight", "down.weight"))
                std = STD * (2 * config.layers) ** -0.5 if branch else STD
                nn.init.normal_(weight, std=std)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy, float32, of (batch, time) int64 tokens and targets.

        Targets of -100 do not count.
        """
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        x = self.drop(self.embedding(tokens) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
