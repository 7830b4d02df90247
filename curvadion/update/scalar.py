"""AdamW and Lion, for parameters that are not matrices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from curvadion import ops
from curvadion.ops.tensors import saturated

STATE_KEYS = {"adamw": ("exp_avg", "exp_avg_sq"), "lion": ("exp_avg",)}


def create_state(algorithm: str, X: Tensor) -> dict[str, Tensor]:
    """Zero moments of X's shape and dtype, and a float32 step counter."""
    # In float16 the square of a gradient overflows above 256 and becomes zero below 2e-4.
    dtype = torch.float32 if X.dtype == torch.float16 else X.dtype
    state = {key: torch.zeros_like(X, dtype=dtype) for key in STATE_KEYS[algorithm]}
    return {"step": torch.zeros((), dtype=torch.float32, device=_counter_device(X)), **state}


def place_counter_(state: dict[str, Any], X: Tensor) -> None:
    """Bring a step counter, as a checkpoint may hold it, to where :func:`create_state` has it."""
    device = _counter_device(X)
    if state["step"].device != device:
        state["step"] = state["step"].to(device)


def _counter_device(X: Tensor) -> torch.device:
    # Fused AdamW on a GPU reads it there.
    return X.device if X.device.type == "cuda" else torch.device("cpu")


def elementwise_step(
    algorithm: str,
    X: Sequence[Tensor],
    G: Sequence[Tensor],
    states: Sequence[Mapping[str, Tensor]],
    options: Mapping[str, Any],
) -> None:
    """One AdamW (arXiv 1711.05101) or Lion (arXiv 2302.06675) step on lists, in place.

    Weight decay is decoupled: X <- (1 - lr weight_decay) X. Weights and moments stay finite if
    gradients are finite: gradients are limited, in place, to numbers that can be squared, and
    float16 saturates. Fused AdamW on a GPU, for which that would be two more passes over the
    gradients, leaves out a step of its lists if a gradient's norm is above this limit.
    """
    step = _adamw if algorithm == "adamw" else _lion
    others = [i for i, x in enumerate(X) if x.dtype != torch.float16]
    if others:
        gradients, moments = [G[i] for i in others], [states[i] for i in others]
        step([X[i] for i in others], gradients, moments, options, limit=True)
    for x, g, state in zip(X, G, states, strict=True):
        if x.dtype == torch.float16:  # one after another, so that only one is held in float32
            wide = {key: s if key == "step" else s.float() for key, s in state.items()}
            weights = x.float()
            step([weights], [g.float()], [wide], options, limit=False)
            for key, value in wide.items():
                if value is not state[key]:
                    state[key].copy_(saturated(value, state[key].dtype))
            x.copy_(saturated(weights, x.dtype))


def _limit(dtype: torch.dtype) -> float:
    """The largest gradient whose square fits into the dtype of the moments."""
    return math.sqrt(torch.finfo(dtype).max) / 16


def _limit_(G: Sequence[Tensor]) -> None:
    by_limit: dict[float, list[Tensor]] = {}
    for g in G:
        if g.dtype != torch.float16:
            by_limit.setdefault(_limit(g.dtype), []).append(g)
    for limit, chosen in by_limit.items():
        torch._foreach_clamp_min_(chosen, -limit)
        torch._foreach_clamp_max_(chosen, limit)


def _adamw(
    X: Sequence[Tensor],
    G: Sequence[Tensor],
    states: Sequence[Mapping[str, Tensor]],
    options: Mapping[str, Any],
    *,
    limit: bool,
) -> None:
    beta1, beta2 = options["betas"]
    lists = list(X), list(G), [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states]
    fused, on_gpu = all(map(_fusible, *lists)), all(x.device.type == "cuda" for x in X)
    if limit and not (fused and on_gpu):
        _limit_(G)
    steps, moves = [s["step"] for s in states], ops.moves()
    with ops.put_back(*(() if fused else (X, *lists[2:], steps))):
        adamw(
            *lists,
            [],
            steps,
            # PyTorch uses its fused kernels only if asked to.
            fused=True if fused else None,
            # Otherwise each counter on a GPU would be read on the host.
            capturable=on_gpu and not fused,
            found_inf=(~moves).float() if fused and moves is not None else None,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=options["lr"],
            weight_decay=options["weight_decay"],
            eps=options["eps"],
            maximize=False,
        )


def _fusible(*together: Tensor) -> bool:
    """Whether PyTorch's fused kernels take this parameter, its gradient and its moments."""
    first = together[0]
    return first.device.type in ("cpu", "cuda") and all(
        t.dtype == first.dtype and t.is_contiguous() for t in together
    )


def _too_large(G: Sequence[Tensor]) -> Tensor:
    """1 if a gradient is too long to be squared, or not finite; else 0."""
    limit = min(map(_limit, {g.dtype for g in G}))
    return (~(ops.norms(G).amax() <= limit)).float()


def _lion(
    X: Sequence[Tensor],
    G: Sequence[Tensor],
    states: Sequence[Mapping[str, Tensor]],
    options: Mapping[str, Any],
    *,
    limit: bool,
) -> None:
    beta1, beta2 = options["betas"]
    lr = options["lr"]
    if limit:
        _limit_(G)
    steps = [state["step"] for state in states]
    with ops.put_back(X, [state["exp_avg"] for state in states], steps):
        for x, g, state in zip(X, G, states, strict=True):
            m = state["exp_avg"]
            g = g.to(m.dtype)
            direction = torch.lerp(g, m, beta1).sign_()
            x.mul_(1 - lr * options["weight_decay"]).sub_(direction.mul_(lr))
            m.lerp_(g, 1 - beta2)
        torch._foreach_add_(steps, 1)
