"""A model whose weights have a leading dimension of replicas.

Replicas' sequences lie one after another in a batch, and only modules with weights tell them
apart. So attention, activations and the loss see one larger batch, and a layer of all replicas is
one batched product.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class StackedLinear(nn.Module):
    """A linear layer without bias; weight (R, out, in)."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = weight  # a parameter

    def forward(self, x: Tensor) -> Tensor:
        """Map x, (R b, ..., in), to (R b, ..., out), each replica's b sequences by its weight."""
        of_replica = x.reshape(self.weight.shape[0], -1, x.shape[-1])
        y = of_replica @ self.weight.mT
        return y.view(*x.shape[:-1], self.weight.shape[1])


class StackedEmbedding(nn.Module):
    """An embedding; weight (R, rows, d)."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = weight  # a parameter

    def forward(self, index: Tensor) -> Tensor:
        """Look up an index, (R b, ...), in each replica's rows."""
        replicas, rows, _ = self.weight.shape
        first = rows * torch.arange(replicas, device=index.device)
        shifted = index.reshape(replicas, -1) + first[:, None]
        return F.embedding(shifted.view_as(index), self.weight.flatten(0, 1))


class StackedNorm(nn.Module):
    """A norm over the last dimension, without weights of its own; weight (R, d)."""

    def __init__(self, norm: nn.Module, weight: Tensor):
        super().__init__()
        self.norm = norm
        self.weight = weight  # a parameter

    def forward(self, x: Tensor) -> Tensor:
        """Norm x, (R b, ..., d)."""
        of_replica = self.norm(x).view(self.weight.shape[0], -1, x.shape[-1])
        normed: Tensor = of_replica * self.weight[:, None]
        return normed.view_as(x)


def stacked(model: nn.Module) -> nn.Module:
    """Return a copy of a model that takes weights (R, ...) by ``torch.func.functional_call``.

    Raises:
        ValueError: for a module with weights of another kind.
    """
    result = copy.deepcopy(model)
    for module in list(result.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and child.bias is None:
                setattr(module, name, StackedLinear(child.weight))
            elif isinstance(child, nn.Embedding):
                setattr(module, name, StackedEmbedding(child.weight))
            elif isinstance(child, nn.RMSNorm):
                norm = nn.RMSNorm(child.normalized_shape, child.eps, elementwise_affine=False)
                setattr(module, name, StackedNorm(norm, child.weight))
            elif isinstance(child, nn.LayerNorm) and child.bias is None:
                centred = nn.LayerNorm(child.normalized_shape, child.eps, elementwise_affine=False)
                setattr(module, name, StackedNorm(centred, child.weight))
            elif list(child.parameters(recurse=False)):
                raise ValueError(f"{type(child).__name__}: the simulator has no stacked form of it")
    return result
