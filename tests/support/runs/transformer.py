"""A small transformer that learns text, for every parallelism: its layers are torch's own.

Sizes divide unevenly, and one matrix has fewer rows than some meshes have ranks.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import curvadion
from support.references import tolerance
from support.references.tolerance import Rounding

WIDTH, HEADS, HIDDEN, LENGTH, BATCH = 12, 2, 22, 8, 3
TEXT = (Path(__file__).parents[3] / "LICENSE").read_bytes()
CHARACTERS = sorted(set(TEXT))
TOKENS = torch.tensor([CHARACTERS.index(c) for c in TEXT])

OPTIONS = {
    "matrix": {"lr": 0.02},
    "embedding": {"lr": 3e-3},
    "head": {"lr": 2e-3},
    "vector": {"lr": 5e-3},
}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wv = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        heads = [
            projection(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for projection in (self.wq, self.wk, self.wv)
        ]
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Expert(nn.Linear):
    """A layer that not every batch uses."""

    def forward(self, x):
        # By sequence: older DTensors cannot flatten a batch of which the sequences are sharded.
        return torch.stack([nn.functional.linear(one, self.weight, self.bias) for one in x])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp_norm = nn.RMSNorm(WIDTH)
        self.mlp = MLP()
        self.narrow = nn.Linear(WIDTH, 3)
        self.wide = nn.Linear(3, WIDTH)
        self.expert = Expert(WIDTH, WIDTH)

    def forward(self, x, use_expert=True):
        x = x + self.attention(self.attention_norm(x))
        h = self.mlp_norm(x)
        x = x + self.mlp(h) + self.wide(torch.tanh(self.narrow(h)))
        return x + torch.tanh(self.expert(x)) if use_expert else x


class Transformer(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.embedding = nn.Embedding(len(CHARACTERS), WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(CHARACTERS), bias=False)

    def forward(self, tokens, use_expert=True):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, use_expert)
        return self.head(self.norm(x))


def build(dtype=torch.float32, blocks=1):
    torch.manual_seed(0)
    return Transformer(blocks).to(dtype)


def groups(model, **matrix):
    """Dion for the matrices, AdamW for all else, each with its own learning rate."""
    options = {**OPTIONS, "matrix": {**OPTIONS["matrix"], **matrix}}
    return curvadion.param_groups(model, options=options)


def batch(step, place):
    """Tokens and targets, (BATCH, LENGTH) each, of the text: what the ``place``-th reader reads."""
    generator = torch.Generator().manual_seed(1000 * step + place)
    starts = torch.randint(len(TOKENS) - LENGTH - 1, (BATCH,), generator=generator)
    rows = torch.stack([TOKENS[s : s + LENGTH + 1] for s in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


def loss_of(model, step, place, use_expert=True):
    tokens, targets = batch(step, place)
    logits = model(tokens, use_expert)
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def rounding(steps):
    """Of sums over a batch's tokens, and of backward passes through a block, at every step."""
    return Rounding(torch.float32, terms=BATCH * LENGTH, steps=steps)


def assert_close(actual, expected, rounding):
    assert list(actual) == list(expected)
    for name, wanted in expected.items():
        tolerance.assert_close(actual[name], wanted, rounding, what=name)
