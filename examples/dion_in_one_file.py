"""Dion and CurvaDion in one short file of plain PyTorch: read this before the package.

Dion (arXiv 2504.05295) takes steps along P Q^T, an orthonormal low-rank factor of the momentum, and
replicas share P and R instead of gradients. CurvaDion (arXiv 2512.13728) adds a gate that decides
at each step whether they share anything. This file handles unsharded matrices; the package does the
same on shards.

    torchrun --nproc-per-node 2 examples/dion_in_one_file.py
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Group = dict[str, Any]


class DionInOneFile(torch.optim.Optimizer):
    """Dion for 2-D parameters, AdamW for the others.

    replicas: the ranks that hold replicas, each with its own gradients; None for one replica.
    threshold: tau of the gate; None synchronises at every step, which is Dion.
    """

    def __init__(
        self, params: Any, lr: float = 0.02, *, replicas: dist.ProcessGroup | None = None,
        threshold: float | None = None, rank_fraction: float = 0.25, momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, weight_decay: float = 0.01,
    ) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.replicas, self.threshold, self.rank_fraction = replicas, threshold, rank_fraction
        self.betas, self.eps = betas, eps
        self.steps = self.local_steps = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step; collective over the replicas."""
        each = [(X, group) for group in self.param_groups for X in group["params"]]
        matrices = [(X, group) for X, group in each if X.dim() == 2]
        for X, _ in each:
            if not self.state[X]:
                self.state[X] = self.initial_state(X)

        # M_i <- M_i + G_i, and the gate: RMMC = max | ||M_i|| - ||M_i,prev|| | / ||M_i,prev||
        rmmc = torch.zeros(())
        for X, _ in matrices:
            M = self.state[X]["M"]
            before = M.norm()
            M += X.grad
            rmmc = torch.maximum(rmmc, (M.norm() - before).abs() / before)
        opens = True
        if self.threshold is not None:
            if self.replicas is not None:
                dist.all_reduce(rmmc, dist.ReduceOp.MAX, group=self.replicas)
            opens = rmmc.item() > self.threshold
        if opens and self.local_steps:  # weights have drifted while the gate was closed
            for X, _ in each:
                self.mean_(X)
                for key in ("first", "second"):
                    if key in self.state[X]:
                        self.mean_(self.state[X][key])

        self.steps += 1
        for X, group in each:
            if X.dim() == 2:
                self.step_matrix(X, group, opens)
            else:
                self.step_adamw(X, group, opens)
        self.local_steps = 0 if opens else self.local_steps + 1

    def step_matrix(self, X: Tensor, group: Group, opens: bool) -> None:
        """Step X (m x n) with at least as many rows as columns; a wide X is transposed."""
        M, Q = self.state[X]["M"], self.state[X]["Q"]
        scale = math.sqrt(X.shape[0] / X.shape[1])  # of X as it is given, so below 1 if it is wide
        if X.shape[0] < X.shape[1]:
            X, M = X.mT, M.mT
        # P = orth(mean M Q): (m, r) from (m, n) (n, r), one step of a power iteration
        P = M @ Q
        if opens:
            self.mean_(P)
        P = orthonormalized(P)
        # R = mean M^T P: (n, r) from (n, m) (m, r)
        R = M.mT @ P
        if opens:
            self.mean_(R)
        # M <- M - (1 - mu) P R^T: what the step used decays, the rest stays (error feedback)
        M -= (1 - group["momentum"]) * P @ R.mT
        # Q <- R with columns of length 1;  X <- (1 - lr wd) X - lr scale P Q^T
        Q.copy_(R / R.norm(dim=0))
        X.mul_(1 - group["lr"] * group["weight_decay"])
        X.sub_(group["lr"] * scale * P @ Q.mT)

    def step_adamw(self, X: Tensor, group: Group, opens: bool) -> None:
        """Decoupled weight decay, with the mean gradient if the gate is open."""
        G, state, (beta1, beta2) = X.grad, self.state[X], self.betas
        assert G is not None
        if opens:
            self.mean_(G)
        state["first"].lerp_(G, 1 - beta1)
        state["second"].lerp_(G.square(), 1 - beta2)
        first = state["first"] / (1 - beta1**self.steps)
        second = state["second"] / (1 - beta2**self.steps)
        X.mul_(1 - group["lr"] * group["weight_decay"])
        X.sub_(group["lr"] * first / (second.sqrt() + self.eps))

    def initial_state(self, X: Tensor) -> dict[str, Tensor]:
        if X.dim() != 2:
            return {"first": torch.zeros_like(X), "second": torch.zeros_like(X)}
        # Q follows from the shape alone, so all replicas have the same.
        m, n = X.shape
        r = math.ceil(round(self.rank_fraction * min(m, n), 9))
        generator = torch.Generator().manual_seed((m * 1_000_003 + n) * 1_000_003 + r)
        Q = torch.randn(min(m, n), r, generator=generator)
        return {"M": torch.zeros_like(X), "Q": Q.to(X)}

    def mean_(self, x: Tensor) -> None:
        if self.replicas is not None:
            dist.all_reduce(x, group=self.replicas)
            x /= self.replicas.size()


def orthonormalized(P: Tensor) -> Tensor:
    """Return Q of P = Q R, with a positive diagonal of R."""
    Q, R = torch.linalg.qr(P)
    positive: Tensor = Q * R.diagonal().sign()
    return positive


def main() -> None:
    """Train replicas on one linear map, each from its own examples."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, wanted = nn.Linear(32, 32), torch.randn(32, 32)
    optimizer = DionInOneFile(model.parameters(), replicas=dist.group.WORLD, threshold=0.3)
    torch.manual_seed(1 + dist.get_rank())
    for step in range(200):
        x = torch.randn(64, 32)
        loss = (model(x) - x @ wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 40 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
