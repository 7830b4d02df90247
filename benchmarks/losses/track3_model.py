"""The model of modded-nanogpt's Track 3, as a variant of the example's GPT.

Written anew from the architecture and the initial values that its baseline states
(``records/track_3_optimization/train_gpt_simple.py`` at commit f411b3d3).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt import GPT, GPTConfig

HIGHEST_LOGIT = 15.0
ATTENTION_SCALE = 0.12
SLOWEST_ROTATION = 1 / 1024  # radians a position
INITIAL_VARIANCE = 0.33  # of a layer's outputs, for inputs of variance 1


class Track3GPT(GPT):
    """The example's GPT with what Track 3 has beside it.

    Linear layers have biases, the norm after the embedding has gains, a half of each head's
    channels does not rotate, products of queries and keys are scaled by 0.12, and logits are
    bounded by 15. With 12 layers of width 768 and a vocabulary of 50,304 it has GPT-2's shape of
    124M parameters, and as the head is a matrix of its own, 162M.
    """

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.embedding_norm = nn.RMSNorm(config.dim)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.bias = nn.Parameter(torch.zeros(module.out_features))

    def initialise(self) -> None:
        """Draw weights; branches end in zeros, so that at first the model is its embedding."""
        nn.init.normal_(self.embedding.weight)
        for name, module in self.named_modules():
            if not isinstance(module, nn.Linear):
                continue
            if name.endswith((".out", ".down")) or module is self.head:
                nn.init.zeros_(module.weight)
            else:
                nn.init.normal_(module.weight, std=(INITIAL_VARIANCE / module.in_features) ** 0.5)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy, float32, of (batch, time) int64 tokens and targets."""
        x = self.embedding_norm(self.embedding(tokens))
        head_dim = self.config.dim // self.config.heads
        rotation = half_rotations(tokens.shape[1], head_dim, x.device)
        for block in self.blocks:
            x = block(x, rotation)
        logits = self.head(self.norm(x)).float()
        # c l / sqrt(l^2 + c^2) is l for small logits, and never above c
        bounded = HIGHEST_LOGIT * logits * (logits.square() + HIGHEST_LOGIT**2).rsqrt()
        return F.cross_entropy(bounded.flatten(0, 1), targets.flatten())


def half_rotations(time: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return scaled cosines and sines, (time, head_dim / 2); a half of the pairs does not rotate.

    Attention divides by sqrt(head_dim). Queries and keys both pass a rotation, so the root of
    0.12 sqrt(head_dim) in each turns that into a scale of 0.12.
    """
    rotating = head_dim // 4
    exponents = torch.linspace(0, 1, rotating, device=device)
    resting = torch.zeros(head_dim // 2 - rotating, device=device)
    frequencies = torch.cat((SLOWEST_ROTATION**exponents, resting))
    angles = torch.outer(torch.arange(time, device=device), frequencies)
    scale = (ATTENTION_SCALE * head_dim**0.5) ** 0.5
    return scale * angles.cos(), scale * angles.sin()
