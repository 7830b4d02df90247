"""Comparing ranks at a first step: weights, settings, and whether gradients are local."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from curvadion.comm.collectives import all_ranks_equal, checksum, group_size
from curvadion.comm.groups import Group, ranks_of
from curvadion.layout.dtensor import local
from curvadion.layout.matrix import Options
from curvadion.layout.placements import global_shape
from curvadion.ops.tensors import norm_and_sum
from curvadion.plan.parameter import Parameter
from curvadion.plan.plan import Plan
from curvadion.plan.state import ANCHOR, PROGRESS

# Sums of equal weights differ by rounding if processors add in a different order.
WEIGHTS_TOLERANCE = 1e-12
# Averages of gradients differ by rounding only, local gradients by their size.
GRADIENT_TOLERANCE = 1e-5
# Gradients of fewer elements than this may be equal by chance.
FEWEST_NUMBERS = 32
SHOWN = 3  # differences that an error names
SAMPLE = 4096  # elements of a gradient that are compared
OTHER_GRADIENTS = (
    "The ranks of one replica lack gradients of different parameters: use the same on each, "
    "and multiply a contribution by zero to leave it out."
)

Listing = dict[str, str]
_NO_SETTINGS = ("params", "param_names", PROGRESS)
_COMPARABLE = (bool, int, float, str, tuple, type(None))


class Settings:
    """The last seen hyperparameters of all groups."""

    def __init__(self) -> None:
        self._values: list[dict[str, object]] = []
        self.checksum = 0  # below 2**32

    def changed(self, param_groups: Sequence[Options]) -> bool:
        """Whether a hyperparameter has changed or gone since the last call."""
        values = [settings_of(group) for group in param_groups]
        if values == self._values:
            return False
        self._values, self.checksum = values, checksum(values)
        return True


def settings_of(group: Options) -> dict[str, object]:
    """The hyperparameters of a group that are numbers, names or tuples of these."""
    plain = {key: _plain(group[key]) for key in sorted(group) if key not in _NO_SETTINGS}
    return {key: value for key, value in plain.items() if isinstance(value, _COMPARABLE)}


def _plain(value: Any) -> Any:
    """A scalar tensor's number, unless the host would have to wait for it."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    if not isinstance(value, Tensor):
        return value
    return float(value) if value.device.type == "cpu" and value.numel() == 1 else None


def listing(param_groups: Sequence[Options], plan: Plan, more: Mapping[str, object]) -> Listing:
    """Everything that must be equal on all replicas, by its name in errors."""
    listed: Listing = {}
    for g, group in enumerate(param_groups):
        listed |= {f"param_groups[{g}][{k!r}]": repr(v) for k, v in settings_of(group).items()}
    for i, p in enumerate(plan.parameters):
        listed[f"parameter {i}"] = f"{p.name} of shape {global_shape(p.X)}, {p.X.dtype}"
    # States of gate and sync follow from other settings, so an error names them last.
    return listed | {name: repr(value) for name, value in more.items()}


def raise_different(own: Listing, group: Group) -> None:
    """Raise RuntimeError with the first settings that differ between ranks; collective."""
    listings: list[Listing] = [{} for _ in range(group.size())]
    dist.all_gather_object(listings, own, group=group)
    ranks = ranks_of(group)
    found = []
    for label in max(listings, key=len):
        # The first rank with each value.
        holders: dict[str, int] = {}
        for rank, values in zip(ranks, listings, strict=True):
            holders.setdefault(values.get(label, "missing"), rank)
        if len(holders) > 1:
            told = " and ".join(f"{value} on rank {rank}" for value, rank in holders.items())
            found.append(f"{label} is {told}")
    told = "; ".join(found[:SHOWN]) or "a setting was changed and then changed back"
    raise RuntimeError(
        f"The replicas' optimizers differ: {told}. Pass the same arguments and parameters on "
        f"every rank, load the same checkpoint, and change settings at the same step "
        f"(schedulers such as ReduceLROnPlateau need the mean loss over replicas)."
    )


def lack_the_same_gradients(plan: Plan) -> bool:
    """Whether all ranks of this replica lack gradients of the same parameters; 16 bytes."""
    resting = [p.name for p in plan.parameters if p.rests]
    return all_ranks_equal(resting, plan.inside, plan.device)


def verify_replicas(plan: Plan, comparable: Sequence[Parameter], replicas: Group | None) -> bool:
    """Raise on all ranks if replicas do not fit; return whether gradients were conclusive.

    They do not fit if weights of ``comparable`` parameters differ, if shards of a replica
    lack different gradients, or if gradients (of matrices, if there are any) are equal on all
    replicas.

    Sends 48 bytes over the replicas; if they are sharded, also 16 inside each and 16 over
    all.
    """
    told_by = plan.dion or plan.elementwise
    few = sum(math.prod(global_shape(p.X)) for p in told_by) < FEWEST_NUMBERS
    values = torch.stack([fingerprint(comparable, plan.device), *_summary(plan, told_by)])
    bounds = torch.cat([values, -values])
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=replicas)
    extremes = bounds.tolist()
    weights, norm, _ = extremes[:3]
    weights_apart, *apart = map(sum, zip(extremes[:3], extremes[3:], strict=True))
    same = max(apart) <= GRADIENT_TOLERANCE * norm
    verdict = [
        not lack_the_same_gradients(plan),
        not weights_apart <= WEIGHTS_TOLERANCE * abs(weights),
        norm > 0 and same,
        norm > 0 and not same,
    ]
    # Ranks have compared different shards, and must all reach the same conclusion.
    if group_size(plan.all_ranks) > group_size(replicas):
        flags = torch.tensor(verdict, dtype=torch.int32, device=plan.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=plan.all_ranks)
        verdict = [bool(flag) for flag in flags.tolist()]
    other_gradients, other_weights, identical, different = verdict
    if other_gradients:
        raise RuntimeError(OTHER_GRADIENTS)
    if other_weights:
        raise RuntimeError(
            "The replicas hold different weights: start all from the same seed or checkpoint."
        )
    if identical and not different and not few:
        raise RuntimeError(
            f"The gradients of {'the matrices' if plan.dion else 'the parameters'} are "
            f"identical on all replicas: either all read the same batch, or something else "
            f"averages gradients. Give each replica its own data, and call "
            f"keep_gradients_local(model) of curvadion.integrations.fsdp or .ddp, or use the "
            f"module of curvadion.integrations for your framework; replicas='single' keeps "
            f"the averaging."
        )
    return identical or different or few


def fingerprint(parameters: Sequence[Parameter], device: torch.device) -> Tensor:
    """A float64 number that is equal if anchors, or otherwise weights, are equal."""
    held = [local(p.state[ANCHOR]) if ANCHOR in p.state else p.local for p in parameters]
    if not held:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms, sums = torch.stack([norm_and_sum(X).to(device) for X in held], dim=1)
    # Factors distinguish parameters of one shape. Infinite weights, as a mask has, are
    # ignored.
    factors = torch.arange(2, len(held) + 2, dtype=torch.float64, device=device).sqrt()
    return factors @ torch.nan_to_num(2 * norms + sums, 0.0, 0.0, 0.0)


def _summary(plan: Plan, told_by: Sequence[Parameter]) -> Tensor:
    """Norm and sum of projections of gradients, (2,) float64."""
    telling = [G for p in told_by if (G := p.G) is not None]
    if not telling:
        return torch.zeros(2, dtype=torch.float64, device=plan.device)
    norms = torch.stack([norm_and_sum(G)[0].to(plan.device) for G in telling])
    projections = torch.stack([_projection(G).to(plan.device) for G in telling])
    return torch.stack([torch.linalg.vector_norm(norms), projections.sum()])


def _projection(G: Tensor) -> Tensor:
    """Project a sample on fixed random signs, which detect elements that swap places."""
    sample = G.reshape(-1)[:: max(1, -(-G.numel() // SAMPLE))].double()
    places = torch.arange(sample.numel(), device=sample.device)
    return sample @ (1 - 2 * ((places * 0x9E3779B1) >> 15 & 1).double())
