"""The optimizer's parameters as it works on them: matrices in stacks, and the rest."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from curvadion.elementwise import STATE_KEYS
from curvadion.layout import MatrixLayout
from curvadion.power_iteration import RightFactor, Stack

StateDict = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Parameter:
    """A parameter X with its group's hyperparameters, its state and its name in reports."""

    X: Tensor
    group: dict[str, Any]
    state: StateDict
    name: str

    @property
    def G(self) -> Tensor | None:
        """This replica's gradient."""
        if self.X.grad is not None and self.X.grad.is_sparse:
            raise RuntimeError(
                f"{self.name} has a sparse gradient: pass sparse=False to its module"
            )
        return self.X.grad


@dataclass(frozen=True, eq=False)
class Matrix(Parameter):
    """A parameter that takes the low-rank update; see MatrixLayout for its orientation."""

    layout: MatrixLayout

    @property
    def M(self) -> Tensor:
        """Momentum, of X's shape."""
        momentum: Tensor = self.state["momentum"]
        return momentum

    @property
    def Q(self) -> Tensor:
        """Right factor, (min(m, n), r)."""
        q: Tensor = self.state["Q"]
        return q

    @property
    def error_feedback(self) -> bool:
        return bool(self.group["momentum_rule"] == "error_feedback")

    @property
    def momentum_decay(self) -> float:
        """What M is multiplied by before it takes the gradient: error feedback decays it later."""
        return 1.0 if self.error_feedback else float(self.group["mu"])

    @property
    def decay(self) -> float | Tensor:
        """The factor 1 - lr weight_decay of X."""
        factor: float | Tensor = 1 - self.group["lr"] * self.group["weight_decay"]
        return factor

    @property
    def local_lr(self) -> float | Tensor:
        """Learning rate of the local gradient step."""
        local_lr: float | Tensor | None = self.group["local_lr"]
        return self.group["lr"] if local_lr is None else local_lr

    @property
    def product_dtype(self) -> torch.dtype:
        return torch.promote_types(self.X.dtype, torch.float32)

    def create_state(self) -> None:
        rank = self.layout.rank(self.group["rank_fraction"], self.group["rank_multiple_of"])
        momentum = torch.zeros_like(self.X, dtype=_dtype(self.group["momentum_dtype"], self.X))
        q_dtype = _dtype(self.group["q_dtype"], self.X)
        self.state["momentum"] = momentum
        self.state["Q"] = self.layout.initial_q(rank, q_dtype, self.X.device)
        self.state["momentum_norm"] = torch.zeros(
            (), dtype=self.product_dtype, device=self.X.device
        )


def _dtype(name: str | None, X: Tensor) -> torch.dtype:
    dtype = X.dtype if name is None else getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is not a dtype of torch")
    return dtype


class Plan:
    """Which parameters take which update, in an order that all ranks share."""

    def __init__(self, matrices: Sequence[Matrix], elementwise: Sequence[Parameter]) -> None:
        self.matrices = list(matrices)
        self.elementwise = list(elementwise)
        self.parameters: list[Parameter] = [*self.matrices, *self.elementwise]

    @classmethod
    def of(
        cls,
        param_groups: Iterable[dict[str, Any]],
        states: Callable[[Tensor], StateDict],
        replicas: dist.ProcessGroup | None,
    ) -> Plan:
        matrices, elementwise = [], []
        for g, group in enumerate(param_groups):
            for X, name in zip(group["params"], names(group, g), strict=True):
                if not X.requires_grad:
                    continue
                if group["algorithm"] == "dion":
                    layout = MatrixLayout.whole((X.shape[0], X.shape[1]), replicas)
                    matrices.append(Matrix(X, group, states(X), name, layout))
                else:
                    elementwise.append(Parameter(X, group, states(X), name))
        return cls(matrices, elementwise)

    @property
    def device(self) -> torch.device:
        return self.parameters[0].X.device

    def select(self, keep: Sequence[bool]) -> Plan:
        """The plan of the kept parameters, given in the order of ``parameters``."""
        if all(keep):
            return self
        kept = {id(p) for p, k in zip(self.parameters, keep, strict=True) if k}
        return Plan(
            [m for m in self.matrices if id(m) in kept],
            [p for p in self.elementwise if id(p) in kept],
        )

    def stacks(self) -> list[list[Matrix]]:
        """Matrices batched by shape, cut, rank, dtype, device and right factor."""
        stacks: dict[Any, list[Matrix]] = {}
        for m in self.matrices:
            key = (m.layout, m.Q.shape, m.product_dtype, m.X.device, m.group["right_factor"])
            stacks.setdefault(key, []).append(m)
        return list(stacks.values())

    def elementwise_by_group(self) -> list[list[Parameter]]:
        by_group: dict[int, list[Parameter]] = {}
        for parameter in self.elementwise:
            by_group.setdefault(id(parameter.group), []).append(parameter)
        return list(by_group.values())

    def moments(self) -> list[Tensor]:
        """The elementwise algorithms' state tensors, without their step counters."""
        return [p.state[key] for p in self.elementwise for key in STATE_KEYS[p.group["algorithm"]]]

    def counters(self) -> list[Tensor]:
        """The elementwise algorithms' step counters, one scalar each."""
        return [p.state["step"] for p in self.elementwise]

    def description(self, *settings: object) -> int:
        """A number below 2**32 that differs where optimizers are set up differently."""
        keys = ("algorithm", "rank_fraction", "rank_multiple_of", "momentum_rule", "right_factor")
        text = [repr(settings)]
        for p in self.parameters:
            text.append(repr((tuple(p.X.shape), p.X.dtype, *(p.group[key] for key in keys))))
        return zlib.crc32("\n".join(text).encode())


def names(group: dict[str, Any], position: int) -> list[str]:
    """The group's parameter names; places in param_groups where they were given without names."""
    given = group.get("param_names")
    if given is not None:
        return list(given)
    return [f"param_groups[{position}]['params'][{i}]" for i in range(len(group["params"]))]


def as_stack(matrices: Sequence[Matrix], layout: MatrixLayout) -> Stack:
    """What a power iteration needs to know of matrices that form a stack."""
    right_factor: RightFactor = matrices[0].group["right_factor"]
    return Stack(
        layout=layout,
        B=[layout.oriented(m.M) for m in matrices],
        Q=[m.Q for m in matrices],
        right_factor=right_factor,
        dtype=matrices[0].product_dtype,
    )


def check_parameter(X: Tensor, name: str, algorithm: str) -> None:
    """Raise ValueError, naming the parameter, if ``algorithm`` cannot take it."""
    if X.is_complex():
        raise ValueError(f"{name} is complex ({X.dtype}): only real parameters are supported")
    if hasattr(X, "placements"):
        raise ValueError(f"{name} is a DTensor of placements {X.placements}: not supported")
    if algorithm == "dion" and X.dim() != 2:
        raise ValueError(
            f"{name} has shape {tuple(X.shape)}, but algorithm='dion' takes 2-D matrices: put it "
            f"in a group with algorithm='adamw' or 'lion', or let curvadion.param_groups(model) "
            f"make the groups."
        )
    if algorithm == "dion" and X.numel() == 0:
        raise ValueError(f"{name} has shape {tuple(X.shape)}: a matrix needs rows and columns")
