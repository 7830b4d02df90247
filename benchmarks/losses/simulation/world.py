"""The task, and each replica's gradients."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from benchmarks.common.tasks import Task, data
from curvadion import param_groups
from token_data import TrainingBatches

Weights = dict[str, Tensor]  # (replicas, ...), by the name of the parameter


class World:
    """The model, its initial weights and its data, the same as of train_processes.py.

    Attributes:
        initial: weights by name, in the optimizer's order, without the dimension of replicas.
        matrices: names of the weights that take a direction; all others take AdamW.

    compiled: whether gradients are compiled; equal up to rounding, and faster for models of
    millions of parameters.
    """

    def __init__(
        self, task: Task, seed: int, replicas: int, device: str = "cpu", *, compiled: bool = False
    ):
        training, held_out = data(task)
        self.device = torch.device(device)
        self.held_out = [(x.to(device), y.to(device)) for x, y in held_out]
        self.batches = TrainingBatches(training, task.context, task.batch_size, replicas, 1, seed)
        self.replicas = replicas
        torch.manual_seed(seed)
        self.model = task.model().to(device)  # the same weights on every device
        groups = param_groups(self.model)
        named = [pair for group in groups for pair in group["params"]]
        self.initial = {name: X.detach() for name, X in named}
        directed = [group for group in groups if group["algorithm"] == "dion"]
        self.matrices = [name for group in directed for name, _ in group["params"]]
        one, each = grad(self._loss), vmap(grad(self._loss))
        self._one, self._each = map(torch.compile, (one, each)) if compiled else (one, each)

    @property
    def parameters(self) -> int:
        """The number of elements of the model."""
        return sum(X.numel() for X in self.initial.values())

    def _loss(self, X: Weights, tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = functional_call(self.model, X, (tokens, targets))
        return loss

    def gradients(self, step: int, X: Weights, *, each: bool = True) -> Weights:
        """Return each replica's gradient, (replicas, ...), or that of all batches, (1, ...).

        X: (replicas, ...), or (1, ...) if replicas hold the same weights.
        """
        batches = [batch for rank in range(self.replicas) for batch in self.batches(step, rank)]
        tokens, targets = (torch.stack(x).to(self.device) for x in zip(*batches, strict=True))
        if each:
            X = {name: x.expand(self.replicas, *x.shape[1:]) for name, x in X.items()}
            with warnings.catch_warnings():  # vmap warns that it cannot batch attention: harmless
                warnings.filterwarnings("ignore", ".*batching rule.*")
                gradients: Weights = self._each(X, tokens, targets)
            return gradients
        own = {name: x[0] for name, x in X.items()}
        mean: Weights = self._one(own, tokens.flatten(0, 1), targets.flatten(0, 1))
        return {name: G[None] for name, G in mean.items()}

    @torch.no_grad()
    def loss(self, X: Weights) -> float:
        """Return the held-out loss of the first replica's weights."""
        first = {name: x[0] for name, x in X.items()}
        losses = [float(self._loss(first, *batch)) for batch in self.held_out]
        counts = [len(tokens) for tokens, _ in self.held_out]
        return sum(map(math.prod, zip(losses, counts, strict=True))) / sum(counts)
