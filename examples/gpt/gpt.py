"""A small modern GPT: RMSNorm, rotary positions, query-key norm, squared-ReLU MLP, no biases."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT; ``dim`` must be a multiple of ``2 * heads``."""

    vocab_size: int
    layers: int
    heads: int
    dim: int
    tie: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError if ``dim`` cannot be split into the heads."""
        if self.dim % (2 * self.heads):
            raise ValueError(
                f"dim={self.dim} must be a multiple of 2 * heads={2 * self.heads}: "
                "rotary positions turn pairs of a head's channels"
            )


def rotations(time: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, (time, head_dim / 2), of angles proportional to the position."""
    frequencies = 10_000.0 ** -torch.arange(0, 1, 2 / head_dim, device=device)
    angles = torch.outer(torch.arange(time, device=device), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate pairs of channels of x, (batch, heads, time, head_dim), and keep its dtype."""
    cos, sin = (each.type_as(x) for each in rotation)
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)


class Attention(nn.Module):
    """Causal attention whose queries and keys are normalised per head."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.head_dim = config.dim // config.heads
        self.query = nn.Linear(config.dim, config.dim, bias=False)
        self.key = nn.Linear(config.dim, config.dim, bias=False)
        self.value = nn.Linear(config.dim, config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Attend over the earlier positions of x, (batch, time, dim)."""
        q, k, v = (
            # Under tensor parallelism a rank has some of the heads.
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        q, k = (rotate(F.rms_norm(y, y.shape[-1:]), rotation) for y in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return mixed


class MLP(nn.Module):
    """Two matrices around a squared ReLU."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.up = nn.Linear(config.dim, 4 * config.dim, bias=False)
        self.down = nn.Linear(4 * config.dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map x, (..., dim), position by position."""
        mapped: Tensor = self.down(F.relu(self.up(x)).square())
        return mapped


class Block(nn.Module):
    """Attention and MLP, each added to the residual stream after a norm."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Return the residual stream, (batch, time, dim), after this block."""
        x = x + self.attention(self.attention_norm(x), rotation)
        x = x + self.mlp(self.mlp_norm(x))
        return x


class GPT(nn.Module):
    """The model; calling it with tokens and targets gives the mean loss in nats per token."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tie:
            self.head.weight = self.embedding.weight
        self.initialise()

    def initialise(self) -> None:
        """Draw weights that keep activations at unit scale; residual branches start smaller."""
        branch_scale = (2 * len(self.blocks)) ** -0.5
        for name, module in self.blocks.named_modules():
            if isinstance(module, nn.Linear):
                scale = branch_scale if name.endswith((".out", ".down")) else 1.0
                nn.init.normal_(module.weight, std=scale * module.in_features**-0.5)
        # Small logits at the start. A tied head shares this scale, and the norm after the
        # embedding brings the stream to unit size.
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy, float32, of (batch, time) int64 tokens and targets."""
        x = F.rms_norm(self.embedding(tokens), (self.config.dim,))
        rotation = rotations(tokens.shape[1], self.config.dim // self.config.heads, x.device)
        for block in self.blocks:
            x = block(x, rotation)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
