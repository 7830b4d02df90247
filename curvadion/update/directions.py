"""The updates of parameters: directions of matrices by name, AdamW and Lion for the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from curvadion import ops
from curvadion.layout.flat_shard import flat_shard_state
from curvadion.layout.matrix import Options
from curvadion.layout.states import zeros_per_matrix
from curvadion.update.dion2 import Dion2, NorDion2
from curvadion.update.direction import Direction
from curvadion.update.low_rank import PowerIteration
from curvadion.update.normuon import NorMuon
from curvadion.update.parameter import FEEDING_BACK, Parameter, dtype_of
from curvadion.update.polar import Polar
from curvadion.update.state import MOMENTUM, MOMENTUM_NORM, R_SCALE, StateKey, key_of

DIRECTIONS: dict[str, Direction] = {}
STATE_KEYS = {"adamw": ("exp_avg", "exp_avg_sq"), "lion": ("exp_avg",)}


def register(name: str, direction: Direction) -> None:
    """Let groups name a direction."""
    DIRECTIONS[name] = direction
    if direction.feeds_back:
        FEEDING_BACK.add(name)


register("low_rank", PowerIteration())
register("polar", Polar())
register("normuon", NorMuon())
register("dion2", Dion2())
register("nordion2", NorDion2())


def state_keys() -> tuple[StateKey, ...]:
    """The state keys of directions."""
    return tuple(key for direction in DIRECTIONS.values() for key in direction.state_keys)


def create_state(p: Parameter) -> None:
    """Create the state that a parameter needs before the first step."""
    X, group = p.X, p.group
    if group["algorithm"] == "dion":
        direction = DIRECTIONS[p.direction]
        state = direction.create_state(X, group)
        if unnamed := [key for key in state if key_of(key, direction.state_keys) is None]:
            raise ValueError(f"direction={p.direction!r}: name {unnamed} in its state_keys")
        state[MOMENTUM] = torch.zeros_like(X, dtype=dtype_of(group["momentum_dtype"], X))
        state[MOMENTUM_NORM] = zeros_per_matrix(X, group)
        state[R_SCALE] = zeros_per_matrix(X, group)
    else:
        state = {key: torch.zeros_like(X) for key in STATE_KEYS[group["algorithm"]]}
        state["step"] = torch.zeros((), dtype=torch.float32, device=counter_device(X))
    p.states[X] = state | flat_shard_state(X)


def counter_device(X: Tensor) -> torch.device:
    """The device of the step counter, where fused AdamW reads it."""
    return X.device if X.device.type == "cuda" else torch.device("cpu")


class Elementwise(NamedTuple):
    """A parameter that takes AdamW or Lion, in a step."""

    X: Tensor  # local, as are all tensors
    G: Tensor
    state: Mapping[str, Tensor]
    options: Options


def elementwise_step(parameters: Sequence[Elementwise], moves: Tensor | None = None) -> None:
    """One step of AdamW or Lion for each parameter, in place; of AdamW for all at once."""
    _adamw_step([p for p in parameters if p.options["algorithm"] == "adamw"], moves)
    lion = [p for p in parameters if p.options["algorithm"] == "lion"]
    for _, of_group in groupby(lion, lambda p: id(p.options)):
        _lion_step(list(of_group), moves)


def _adamw_step(parameters: Sequence[Elementwise], moves: Tensor | None) -> None:
    """AdamW (arXiv 1711.05101), for parameters of any groups."""
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
    ops.adamw_(X, G, means, squares, counters, lr, weight_decay, beta1, beta2, eps, moves)


def _lion_step(parameters: Sequence[Elementwise], moves: Tensor | None) -> None:
    """Lion (arXiv 2302.06675), for parameters of one group."""
    options = parameters[0].options
    lr = options["lr"]
    weight_decay = options["weight_decay"]
    beta1, beta2 = options["betas"]
    X = [p.X for p in parameters]
    means = [p.state["exp_avg"] for p in parameters]
    counters = [p.state["step"] for p in parameters]
    with ops.put_back(moves, X, means, counters):
        for p, m in zip(parameters, means, strict=True):
            g = p.G.to(m.dtype)
            direction = torch.lerp(g, m, beta1).sign_()
            p.X.mul_(1 - lr * weight_decay).sub_(direction.mul_(lr))
            m.lerp_(g, 1 - beta2)
        torch._foreach_add_(counters, 1)
