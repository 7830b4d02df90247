"""What replicas agree on between quantised averages: weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from curvadion.comm.collectives import group_size
from curvadion.layout.dtensor import local
from curvadion.layout.flat_shard import FLAT_SHARD_START, flat_shard
from curvadion.layout.parameters import global_shape, groups_of
from curvadion.optim.hyperparameters import LR_SUM
from curvadion.sync.reconcile import quantized_average_
from curvadion.update import scalar as elementwise
from curvadion.update.plan import LR_AT_AGREEMENT, R_SCALE, Parameter, Plan, product_dtype

AGREED, RESIDUAL = "weight_agreed", "weight_residual"
# Keys of the state that hold them, each a tensor of the parameter's shape.
STATE_KEYS = (AGREED, RESIDUAL)


class Consensus(NamedTuple):
    """Weights, what replicas last agreed they are, and what codes have lost here; pieces held here.

    All have the same shape; ``agreed`` and ``residual`` are float32 or wider.
    """

    X: Tensor
    agreed: Tensor
    residual: Tensor


def begin(parameters: Sequence[Parameter]) -> None:
    """Remember weights as they are, the same on all replicas, where nothing is remembered yet."""
    for p in parameters:
        if AGREED not in p.state:
            X = p.X.detach()
            wide = torch.promote_types(X.dtype, torch.float32)
            p.state[AGREED] = X.to(wide, copy=True)
            p.state[RESIDUAL] = torch.zeros_like(X, dtype=torch.float32)
            if p.matrices:
                p.state[LR_AT_AGREEMENT] = p.group[LR_SUM]


def in_parts(sizes: Sequence[int], count: int) -> list[int]:
    """Which of so many parts of about equal size each of the parameters of these sizes belongs to.

    The largest goes first, each to the part that is smallest so far. No part is empty; there are
    fewer where parameters are.
    """
    parts, filled = [0] * len(sizes), [0] * min(count, len(sizes))
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        parts[i] = min(range(len(filled)), key=filled.__getitem__)
        filled[parts[i]] += max(1, sizes[i])
    return parts


def sizes(X: Sequence[Tensor]) -> list[int]:
    """Numbers in each parameter, all its shards together."""
    return [math.prod(global_shape(x)) for x in X]


def averaged_states(parameter: Parameter) -> dict[str, Tensor]:
    """The state that an exact average takes in with the weights; empty before the first step."""
    if parameter.group["algorithm"] != "dion":
        kept = elementwise.STATE_KEYS[parameter.group["algorithm"]]
        return {key: parameter.state[key] for key in kept if parameter.state}
    others = {"momentum_norm", FLAT_SHARD_START, LR_AT_AGREEMENT, *STATE_KEYS}
    return {key: x for key, x in sorted(parameter.state.items()) if key not in others}


def exact_bytes(plan: Plan) -> int:
    """Bytes that an exact average sends, all ranks of a replica together: the same on all ranks."""
    total = 0
    for p in plan.parameters:
        total += math.prod(global_shape(p.X)) * _wire_bytes(p.X) * plan.copies_inside(p)
        for key, x in averaged_states(p).items():
            numbers, pieces = _whole(p, key, x)
            total += numbers * _wire_bytes(x) * group_size(plan.inside) // pieces
        if "step" in p.state:
            total += p.state["step"].nbytes * group_size(plan.inside)
    return total


def _wire_bytes(x: Tensor) -> int:
    """Bytes of a number that is averaged exactly."""
    return torch.promote_types(x.dtype, torch.float32).itemsize


def _whole(parameter: Parameter, key: str, x: Tensor) -> tuple[int, int]:
    """Numbers in a state tensor, and the pieces that it is cut into."""
    like = parameter.X
    if flat_shard(like) is None:
        return x.numel(), math.prod(map(group_size, groups_of(x)))  # a DTensor's are all
    if key == R_SCALE:
        return x.numel(), 1
    for part in parameter.parts:
        if part.q.key == key:
            return min(part.layout.shape) * part.rank, group_size(part.layout.columns.group)
    return math.prod(global_shape(like)), math.prod(map(group_size, groups_of(like)))


def consensuses(parameters: Sequence[Parameter]) -> Iterator[Consensus]:
    """All of them in an order that ranks share."""
    for p in parameters:
        if AGREED in p.state:
            yield Consensus(p.local, *(local(p.state[key]) for key in STATE_KEYS))


def agree_(parameters: Sequence[Parameter], bits: int, group: dist.ProcessGroup | None) -> None:
    """Bring the replicas to a new consensus; afterwards they hold the same bits. Collective."""
    for alike in _cut_alike(parameters):
        X, agreed, residuals = zip(*consensuses(alike), strict=True)
        quantized_average_(X, agreed, residuals, bits, group)


def _cut_alike(parameters: Sequence[Parameter]) -> Iterator[list[Parameter]]:
    """Parameters that are cut over the same ranks, in an order that ranks share.

    Which replica averages a block depends on the blocks before it. Ranks of one replica that hold
    a parameter alike must come to the same, whatever pieces they hold of others.
    """
    by_cut: dict[tuple[int, ...], list[Parameter]] = {}
    for p in parameters:
        if AGREED in p.state:
            by_cut.setdefault(tuple(map(id, groups_of(p.X))), []).append(p)
    yield from by_cut.values()


def settle(parameters: Sequence[Parameter]) -> None:
    """Note that replicas agree on these parameters, once everything has moved them."""
    for p in parameters:
        settle_state(p.state, p.group)


def settle_state(state: dict[str, Any], group: Mapping[str, Any]) -> None:
    """The same of a parameter's state, where it is that of a matrix that replicas agree on."""
    if LR_AT_AGREEMENT in state:
        state[LR_AT_AGREEMENT] = group[LR_SUM]


def stand_still(parameters: Sequence[Parameter]) -> None:
    """Note that no replica moves these parameters at a step that is counted in LR_SUM."""
    for p in parameters:
        if LR_AT_AGREEMENT in p.state:
            p.state[LR_AT_AGREEMENT] += float(p.group["lr"])


def lengths_since_agreement(plan: Plan) -> list[Tensor]:
    """L = sqrt(fan_out / fan_in) times the sum of lr, one a matrix, (k,) by stack.

    So far the steps since replicas last agreed go where all have one direction. The same on every
    replica: a step counts if some replica has taken it.
    """
    return [
        torch.tensor(
            [m.parameter.lr_since_agreement * m.layout.update_scale for m in stack],
            dtype=product_dtype(stack[0].parameter.X),
            device=stack[0].parameter.X.device,
        )
        for stack in plan.stacks()
    ]


def give_back_losses_(parameters: Sequence[Parameter]) -> None:
    """Add what codes have lost to the weights, before an exact average of these."""
    for X, _, residual in consensuses(parameters):
        X.add_(residual)
        residual.zero_()


def renew_(parameters: Sequence[Parameter]) -> None:
    """Agree on what the weights are: they have just been averaged."""
    for X, agreed, _ in consensuses(parameters):
        agreed.copy_(X)
    settle(parameters)
