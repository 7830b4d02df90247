"""AdamW and Lion, for the parameters that are not matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from curvadion import ops
from curvadion.layout.matrix import Options

# The states of each algorithm that have the parameter's shape.
STATE_KEYS = {"adamw": ("exp_avg", "exp_avg_sq"), "lion": ("exp_avg",)}


def counter_device(X: Tensor) -> torch.device:
    """The device of the step counter, where fused AdamW reads it."""
    return X.device if X.device.type == "cuda" else torch.device("cpu")


class Elementwise(NamedTuple):
    """A parameter that takes AdamW or Lion, in a step; all tensors are local.

    Args:
        X: weights.
        G: gradient, of X's shape.
        state: "step", and those of STATE_KEYS of its algorithm, perhaps as vectors of codes.
        seeds: by the key of a state that is codes, with which they are rounded at random.
        options: its group.
    """

    X: Tensor
    G: Tensor
    state: Mapping[str, Tensor]
    seeds: Mapping[str, int]
    options: Options


def elementwise_step(parameters: Sequence[Elementwise], moves: Tensor | None = None) -> None:
    """One step of AdamW or Lion for each parameter, in place.

    Args:
        parameters: those of a group are neighbours.
        moves: () bool on the device, or None; false cancels the step.
    """
    _adamw_step([p for p in parameters if p.options["algorithm"] == "adamw"], moves)
    lion = [p for p in parameters if p.options["algorithm"] == "lion"]
    for _, neighbours in groupby(lion, lambda p: id(p.options)):
        of_group = list(neighbours)
        means = [p.state["exp_avg"] for p in of_group]
        for run in ops.runs_to_open(means, [p.X for p in of_group]):
            _lion_step([of_group[i] for i in run], moves)


def _adamw_step(parameters: Sequence[Elementwise], moves: Tensor | None) -> None:
    """AdamW (arXiv 1711.05101), for parameters of any groups, in one operation."""
    X = [p.X for p in parameters]
    G = [p.G for p in parameters]
    means = [p.state["exp_avg"] for p in parameters]
    squares = [p.state["exp_avg_sq"] for p in parameters]
    counters = [p.state["step"] for p in parameters]
    lr = [p.options["lr"] for p in parameters]
    weight_decay = [p.options["weight_decay"] for p in parameters]
    beta1 = [p.options["betas"][0] for p in parameters]
    beta2 = [p.options["betas"][1] for p in parameters]
    eps = [p.options["eps"] for p in parameters]
    mean_seeds = _seeds(parameters, "exp_avg")
    square_seeds = _seeds(parameters, "exp_avg_sq")
    ops.adamw_(
        X, G, means, squares, counters, lr, weight_decay, beta1, beta2, eps, moves,
        mean_seeds, square_seeds,
    )  # fmt: skip


def _seeds(parameters: Sequence[Elementwise], key: str) -> list[int] | None:
    """A state's seeds for an operation; None if it is codes of no parameter."""
    if not any(key in p.seeds for p in parameters):
        return None
    return [p.seeds.get(key, 0) for p in parameters]


def _lion_step(parameters: Sequence[Elementwise], moves: Tensor | None) -> None:
    """Lion (arXiv 2302.06675), for parameters of one group, whose means are open at once."""
    options = parameters[0].options
    lr = options["lr"]
    weight_decay = options["weight_decay"]
    beta1, beta2 = options["betas"]
    X = [p.X for p in parameters]
    open_means = ops.Opened([p.state["exp_avg"] for p in parameters], X, [False] * len(X))
    means = open_means.tensors
    counters = [p.state["step"] for p in parameters]
    with ops.put_back(moves, X, means, counters):
        for p, m in zip(parameters, means, strict=True):
            g = p.G.to(m.dtype)
            # u = sign(beta1 m + (1 - beta1) g)
            u = torch.lerp(g, m, beta1).sign_()
            # x <- (1 - lr wd) x - lr u
            p.X.mul_(1 - lr * weight_decay).sub_(u.mul_(lr))
            # m <- beta2 m + (1 - beta2) g
            m.lerp_(g, 1 - beta2)
        torch._foreach_add_(counters, 1)
    open_means.close(_seeds(parameters, "exp_avg"))
