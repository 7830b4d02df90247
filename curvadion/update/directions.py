"""The updates of parameters: directions of matrices by name, AdamW and Lion for the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from curvadion import ops
from curvadion.layout.flat_shard import flat_shard_state
from curvadion.layout.matrix import Options
from curvadion.layout.states import zeros_per_matrix
from curvadion.ops.tensors import Lists
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


def elementwise_step(
    X: Lists,
    G: Lists,
    states: Sequence[Mapping[str, Tensor]],
    options: Options,
    moves: Tensor | None = None,
) -> None:
    """One step of AdamW (arXiv 1711.05101) or Lion (arXiv 2302.06675), in place."""
    means, counters = ([s[key] for s in states] for key in ("exp_avg", "step"))
    lr, weight_decay, (beta1, beta2) = (
        options["lr"],
        options["weight_decay"],
        options["betas"],
    )
    if options["algorithm"] == "adamw":
        squares = [s["exp_avg_sq"] for s in states]
        fused = all(map(_fusible, X, G, means, squares))
        with ops.put_back(moves, *(() if fused else (X, means, squares, counters))):
            adamw(
                list(X), list(G), means, squares, [], counters,
                # PyTorch uses its fused kernels only on request.
                fused=fused or None,
                # Otherwise the host would read each counter on a GPU.
                capturable=not fused and all(x.device.type == "cuda" for x in X),
                found_inf=(~moves).float() if fused and moves is not None else None,
                amsgrad=False, beta1=beta1, beta2=beta2, lr=lr, weight_decay=weight_decay,
                eps=options["eps"], maximize=False,
            )  # fmt: skip
        return
    with ops.put_back(moves, X, means, counters):
        for x, g, m in zip(X, G, means, strict=True):
            g = g.to(m.dtype)
            direction = torch.lerp(g, m, beta1).sign_()
            x.mul_(1 - lr * weight_decay).sub_(direction.mul_(lr))
            m.lerp_(g, 1 - beta2)
        torch._foreach_add_(counters, 1)


def _fusible(*together: Tensor) -> bool:
    """Whether PyTorch's fused kernels support these tensors of a parameter."""
    same = len({t.dtype for t in together}) == 1 and all(t.is_contiguous() for t in together)
    return same and together[0].device.type in ("cpu", "cuda")
