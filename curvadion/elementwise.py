"""AdamW and Lion, for the parameters that are not matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

STATE_KEYS = {"adamw": ("exp_avg", "exp_avg_sq"), "lion": ("exp_avg",)}


def create_state(algorithm: str, X: Tensor) -> dict[str, Tensor]:
    """Zero moments of X's shape and dtype, and a float32 step counter on the CPU."""
    state = {key: torch.zeros_like(X) for key in STATE_KEYS[algorithm]}
    return {"step": torch.zeros((), dtype=torch.float32, device="cpu"), **state}


def elementwise_step(
    algorithm: str,
    X: Sequence[Tensor],
    G: Sequence[Tensor],
    states: Sequence[Mapping[str, Tensor]],
    options: Mapping[str, Any],
) -> None:
    """One AdamW (arXiv 1711.05101) or Lion (arXiv 2302.06675) step on lists, in place.

    options: lr, betas, weight_decay and, for AdamW, eps. Decay is decoupled: X <- (1 - lr wd) X.
    """
    if algorithm == "adamw":
        _adamw(X, G, states, options)
    else:
        _lion(X, G, states, options)


def _adamw(
    X: Sequence[Tensor],
    G: Sequence[Tensor],
    states: Sequence[Mapping[str, Tensor]],
    options: Mapping[str, Any],
) -> None:
    beta1, beta2 = options["betas"]
    lists = list(X), list(G), [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states]
    adamw(
        *lists,
        [],
        [s["step"] for s in states],
        # PyTorch fuses nothing on the CPU unless told to.
        fused=True if all(map(_fusible, *lists)) else None,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=options["lr"],
        weight_decay=options["weight_decay"],
        eps=options["eps"],
        maximize=False,
    )


def _fusible(*together: Tensor) -> bool:
    """Whether PyTorch's fused CPU kernel takes a parameter, its gradient and its moments."""
    first = together[0]
    return first.device.type == "cpu" and all(
        t.dtype == first.dtype and t.is_contiguous() for t in together
    )


def _lion(
    X: Sequence[Tensor],
    G: Sequence[Tensor],
    states: Sequence[Mapping[str, Tensor]],
    options: Mapping[str, Any],
) -> None:
    beta1, beta2 = options["betas"]
    lr = options["lr"]
    for x, g, state in zip(X, G, states, strict=True):
        m = state["exp_avg"]
        g = g.to(m.dtype)
        direction = torch.lerp(g, m, beta1).sign_()
        x.mul_(1 - lr * options["weight_decay"]).sub_(direction.mul_(lr))
        m.lerp_(g, 1 - beta2)
        state["step"].add_(1)
