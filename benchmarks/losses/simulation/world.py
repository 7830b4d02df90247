"""The task, and each replica's gradients."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from benchmarks.common.tasks import Task, data
from benchmarks.losses.simulation.stacked import stacked
from curvadion import param_groups
from token_data import TrainingBatches

Weights = dict[str, Tensor]  # (replicas, ...), by the name of the parameter
IGNORED = -100  # a target that does not count


class World:
    """The model, its initial weights and its data, the same as of train_processes.py.

    Args:
        task: the model and its data.
        seed: of the weights and of the data order.
        replicas: how many.
        device: of all tensors.
        sequences: of all replicas at a step, split as evenly as possible; None:
            ``task.batch_size`` for each.
        autocast: whether products of the model are bfloat16.
        compiled: whether the model's blocks are compiled; equal up to rounding.

    Attributes:
        initial: weights by name, in the optimizer's order, without the dimension of replicas.
        matrices: names of the weights that take a direction; all others take AdamW.
        counts: each replica's number of sequences at a step.
    """

    def __init__(
        self,
        task: Task,
        seed: int,
        replicas: int,
        device: str = "cpu",
        *,
        sequences: int | None = None,
        autocast: bool = False,
        compiled: bool = False,
    ):
        training, held_out = data(task)
        self.device = torch.device(device)
        self.autocast = autocast
        self.context = task.context
        self.held_out = [(x.to(device), y.to(device)) for x, y in held_out]
        total = replicas * task.batch_size if sequences is None else sequences
        if total < replicas:
            raise ValueError(f"sequences={total} are fewer than the {replicas} replicas")
        # Windows of all replicas; replica r reads those from r * total // replicas on, as a rank
        # of real processes does where total is a multiple of replicas.
        self.batches = TrainingBatches(training, task.context, total, 1, 1, seed)
        edges = [r * total // replicas for r in range(replicas + 1)]
        self.counts = [stop - start for start, stop in itertools.pairwise(edges)]
        self._rows = [
            [min(start + i, stop - 1) for i in range(max(self.counts))]
            for start, stop in itertools.pairwise(edges)
        ]
        text = np.concatenate(training.tokens.parts)[training.start : training.stop]
        self._text = torch.from_numpy(text).to(device)
        self._window = torch.arange(task.context + 1, device=device)
        self.replicas = replicas
        torch.manual_seed(seed)
        self.model = task.model().to(device)  # the same weights on every device
        groups = param_groups(self.model)
        named = [pair for group in groups for pair in group["params"]]
        self.initial = {name: X.detach() for name, X in named}
        directed = [group for group in groups if group["algorithm"] == "dion"]
        self.matrices = [name for group in directed for name, _ in group["params"]]
        self._stacked = stacked(self.model)
        self.model.eval()  # it only evaluates; its copy in ``_stacked`` trains
        if compiled:
            # One compilation serves all blocks.
            for block in self._stacked.get_submodule("blocks").children():
                block.compile(dynamic=False)

    @property
    def parameters(self) -> int:
        """The number of elements of the model."""
        return sum(X.numel() for X in self.initial.values())

    def _loss(self, model: nn.Module, X: Weights, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss over the targets that count.

        Args:
            model: the model, or its copy for stacked weights.
            X: the weights that it takes.
            tokens: (sequences, context) int64.
            targets: of tokens' shape.
        """
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            loss: Tensor = functional_call(model, X, (tokens, targets))
        return loss

    def _read(self, step: int) -> tuple[Tensor, Tensor]:
        """Return tokens and targets of all sequences of a step, (sequences, context) int64."""
        [starts] = self.batches.starts(step, 0)
        first = torch.from_numpy(starts).to(self.device, non_blocking=True)
        windows = self._text[first[:, None] + self._window].long()
        return windows[:, :-1], windows[:, 1:]

    def gradients(self, step: int, X: Weights, *, each: bool = True) -> Weights:
        """Return each replica's gradient, (replicas, ...), or that of all batches, (1, ...).

        X: (replicas, ...), or (1, ...) if replicas hold the same weights.
        """
        tokens, targets = self._read(step)
        count = self.replicas if each else 1
        if each and min(self.counts) < max(self.counts):
            rows = torch.tensor(self._rows, device=self.device)
            tokens, targets = tokens[rows.flatten()], targets[rows.flatten()]
            padding = [i >= own for own in self.counts for i in range(max(self.counts))]
            targets[torch.tensor(padding, device=self.device)] = IGNORED
        with torch.enable_grad():
            leaves = {
                name: x.expand(count, *x.shape[1:]).detach().requires_grad_()
                for name, x in X.items()
            }
            loss = self._loss(self._stacked, leaves, tokens, targets)
            gradients = torch.autograd.grad(loss, list(leaves.values()))
        if not each:
            return dict(zip(leaves, gradients, strict=True))
        # The loss is the mean over the tokens of all replicas, a gradient is of one's own.
        factors = [sum(self.counts) / own for own in self.counts]
        if min(factors) == max(factors):
            torch._foreach_mul_(gradients, factors[0])
        else:
            scale = torch.tensor(factors, device=self.device)
            for G in gradients:
                G.mul_(scale.view(-1, *[1] * (G.dim() - 1)))
        return dict(zip(leaves, gradients, strict=True))

    @torch.no_grad()
    def loss(self, X: Weights) -> float:
        """Return the held-out loss of the first replica's weights."""
        first = {name: x[0] for name, x in X.items()}
        losses = [self._loss(self.model, first, *batch) for batch in self.held_out]
        counts = [len(tokens) for tokens, _ in self.held_out]
        total = torch.stack(losses).double() @ torch.tensor(counts).double().to(self.device)
        return float(total) / sum(counts)
