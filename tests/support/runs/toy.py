"""A small model with every kind of parameter, and training steps on data that a seed fixes."""

from __future__ import annotations

import torch
from torch import nn

import curvadion
from curvadion.layout.dtensor import local

VOCABULARY = 11


class Toy(nn.Module):
    """Embedding, linear layer, norm and output head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.linear = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.lm_head = nn.Linear(8, VOCABULARY, bias=False)

    def forward(self, tokens):
        return self.lm_head(self.norm(torch.relu(self.linear(self.embedding(tokens)))))


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return Toy().to(dtype)


def groups(of):
    """Two matrices (the head is one here) and two elementwise groups, all at the optimizer's lr."""
    made = curvadion.param_groups(of, patterns={"lm_head.weight": "matrix"})
    return [{key: value for key, value in group.items() if key != "lr_ratio"} for group in made]


def loss(of, step, rank=0):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    tokens, targets = torch.randint(VOCABULARY, (2, 16), generator=generator)
    return nn.functional.cross_entropy(of(tokens).float(), targets)


def train(of, optimizer, steps, rank=0, after_step=None):
    """Take the numbered steps and return the reports; after_step, such as a scheduler's step."""
    reports = []
    for step in steps:
        optimizer.zero_grad()
        loss(of, step, rank).backward()
        optimizer.step()
        if after_step is not None:
            after_step()
        reports.append(getattr(optimizer, "report", None))
    return reports


def weights(of):
    return {name: p.detach().clone() for name, p in of.named_parameters()}


def states(optimizer):
    """Every tensor and number of the optimizer's state, by parameter index and key."""
    state = optimizer.state_dict()["state"]
    return {
        f"{i}.{k}": torch.as_tensor(v).clone() for i, held in state.items() for k, v in held.items()
    }


def held(of, optimizer):
    """This rank's shards of the weights, and all tensors and numbers of their states."""
    of_states = {
        f"{name}.{key}": torch.as_tensor(value)
        for name, p in of.named_parameters()
        for key, value in optimizer.state[p].items()
    }
    return {name: local(tensor).clone() for name, tensor in (weights(of) | of_states).items()}


def assert_bitwise_equal(these, those):
    assert list(these) == list(those)
    for name, tensor in these.items():
        assert tensor.dtype == those[name].dtype, name
        assert torch.equal(tensor, those[name]), name
