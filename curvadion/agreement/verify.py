"""What ranks compare: settings, weights, and whether gradients are local."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
# A 32-bit prime near 2^32 / golden ratio: its multiples spread evenly over 32 bits.
SPREADING = 0x9E3779B1
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
        self._values = values
        self.checksum = checksum(values)
        return True


def settings_of(group: Options) -> dict[str, object]:
    """The hyperparameters of a group that are numbers, names or tuples of these."""
    settings: dict[str, object] = {}
    for key in sorted(group):
        if key in _NO_SETTINGS:
            continue
        value = _plain(group[key])
        if isinstance(value, _COMPARABLE):
            settings[key] = value
    return settings


def _plain(value: Any) -> Any:
    """The value, lists as tuples, and a scalar tensor of the CPU as its number.

    Any other tensor is None, because the host would have to wait for it.
    """
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    if not isinstance(value, Tensor):
        return value
    if value.device.type == "cpu" and value.numel() == 1:
        return float(value)
    return None


def listing(param_groups: Sequence[Options], plan: Plan, more: Mapping[str, object]) -> Listing:
    """Everything that must be equal on all replicas, by its name in errors.

    Args:
        param_groups: the optimizer's.
        plan: of their parameters.
        more: further settings, by name.
    """
    descriptions: Listing = {}
    for position, group in enumerate(param_groups):
        for key, value in settings_of(group).items():
            descriptions[f"param_groups[{position}][{key!r}]"] = repr(value)
    for i, p in enumerate(plan.parameters):
        descriptions[f"parameter {i}"] = f"{p.name} of shape {global_shape(p.X)}, {p.X.dtype}"
    # States of gate and sync follow from other settings, so an error names them last.
    for name, value in more.items():
        descriptions[name] = repr(value)
    return descriptions


def raise_different(own: Listing, group: Group) -> None:
    """Raise RuntimeError with the first settings that differ between ranks; collective."""
    listings: list[Listing] = [{} for _ in range(group.size())]
    dist.all_gather_object(listings, own, group=group)
    ranks = ranks_of(group)
    differences = []
    # Labels of the longest listing, so that settings missing elsewhere show, too.
    for label in max(listings, key=len):
        first_rank_with: dict[str, int] = {}
        for rank, descriptions in zip(ranks, listings, strict=True):
            first_rank_with.setdefault(descriptions.get(label, "missing"), rank)
        if len(first_rank_with) > 1:
            values = [f"{value} on rank {rank}" for value, rank in first_rank_with.items()]
            differences.append(f"{label} is {' and '.join(values)}")
    # A delayed comparison may arrive after the difference has gone.
    summary = "; ".join(differences[:SHOWN]) or "a setting was changed and then changed back"
    raise RuntimeError(
        f"The replicas' optimizers differ: {summary}. Pass the same arguments and parameters on "
        f"every rank, load the same checkpoint, and change settings at the same step "
        f"(schedulers such as ReduceLROnPlateau need the mean loss over replicas)."
    )


def lack_the_same_gradients(plan: Plan) -> bool:
    """Whether all ranks of this replica lack gradients of the same parameters; 16 bytes."""
    resting = [p.name for p in plan.parameters if p.rests]
    return all_ranks_equal(resting, plan.inside, plan.device)


class _Verdict(NamedTuple):
    """What ranks have found; each is true if it is true on any rank.

    Args:
        other_gradients: the ranks of a replica lack gradients of different parameters.
        other_weights: replicas hold different weights.
        identical: gradients are equal on all replicas, and not all zero.
        different: gradients differ between replicas.
    """

    other_gradients: bool
    other_weights: bool
    identical: bool
    different: bool


def verify_replicas(plan: Plan, comparable: Sequence[Parameter], replicas: Group | None) -> bool:
    """Raise on all ranks if replicas do not fit; return whether gradients were conclusive.

    They do not fit if weights of ``comparable`` parameters differ, if ranks of one replica
    lack gradients of different parameters, or if gradients (of matrices, if there are any) are
    equal on all replicas.

    Sends 48 bytes over the replicas; if they are sharded, also 16 inside each and 16 over
    all.

    Args:
        plan: of the step.
        comparable: the parameters whose weights, or anchors, must be equal.
        replicas: the ranks with this rank's shards on all replicas.

    Raises:
        RuntimeError: if replicas do not fit.
    """
    parameters = plan.dion or plan.elementwise  # whose gradients are compared
    few = sum(math.prod(global_shape(p.X)) for p in parameters) < FEWEST_NUMBERS
    compared = [local(p.state[ANCHOR]) if ANCHOR in p.state else p.local for p in comparable]
    weights = fingerprint(compared, plan.device)
    summary = _summary_of_gradients(parameters, plan.device)
    values = torch.stack([weights, *summary])
    # One collective finds the largest and the smallest of all ranks, because the largest of -v
    # is minus the smallest v. One read, for which the host waits, gets both.
    bounds = torch.cat([values, -values])
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=replicas)
    numbers = bounds.tolist()
    largest = numbers[:3]
    largest_negated = numbers[3:]
    weights_size, norm, _ = largest
    spreads = [v + negated for v, negated in zip(largest, largest_negated, strict=True)]
    weights_spread, norm_spread, projection_spread = spreads
    same_gradients = max(norm_spread, projection_spread) <= GRADIENT_TOLERANCE * norm
    # A NaN must count as a difference, so a difference is what is not within the tolerance.
    same_weights = weights_spread <= WEIGHTS_TOLERANCE * abs(weights_size)
    verdict = _Verdict(
        other_gradients=not lack_the_same_gradients(plan),
        other_weights=not same_weights,
        identical=norm > 0 and same_gradients,
        different=norm > 0 and not same_gradients,
    )
    # Ranks have compared different shards, and must all reach the same conclusion.
    if group_size(plan.all_ranks) > group_size(replicas):
        flags = torch.tensor(verdict, dtype=torch.int32, device=plan.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=plan.all_ranks)
        verdict = _Verdict(*(bool(flag) for flag in flags.tolist()))
    if verdict.other_gradients:
        raise RuntimeError(OTHER_GRADIENTS)
    if verdict.other_weights:
        raise RuntimeError(
            "The replicas hold different weights: start all from the same seed or checkpoint, "
            "and let one optimizer train each parameter."
        )
    if verdict.identical and not verdict.different and not few:
        raise RuntimeError(
            f"The gradients of {'the matrices' if plan.dion else 'the parameters'} are "
            f"identical on all replicas: either all read the same batch, or something else "
            f"averages gradients. Give each replica its own data, and call "
            f"keep_gradients_local(model) of curvadion.integrations.fsdp or .ddp, or use the "
            f"module of curvadion.integrations for your framework; replicas='single' keeps "
            f"the averaging."
        )
    return verdict.identical or verdict.different or few


def weights_equal(plan: Plan, replicas: Group) -> bool:
    """Whether replicas hold the same weights; collective, 16 bytes, and 8 if they are sharded."""
    number = fingerprint([p.local for p in plan.parameters], plan.device)
    bounds = torch.stack([number, -number])
    dist.all_reduce(bounds, dist.ReduceOp.MAX, replicas)
    largest, largest_negated = bounds
    # A NaN must count as a difference, so a difference is what is not within the tolerance.
    differ = ~(largest + largest_negated <= WEIGHTS_TOLERANCE * largest.abs())
    if group_size(plan.all_ranks) > group_size(replicas):  # which have compared other shards
        differ = differ.long()
        dist.all_reduce(differ, dist.ReduceOp.MAX, plan.all_ranks)
    return not differ


def fingerprint(weights: Sequence[Tensor], device: torch.device) -> Tensor:
    """A number that is equal on two ranks if their weights are, () float64."""
    if not weights:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms, sums = torch.stack([norm_and_sum(X).to(device) for X in weights], dim=1)
    # Factors distinguish parameters of one shape. Infinite weights, as a mask has, are
    # ignored.
    factors = torch.arange(2, len(weights) + 2, dtype=torch.float64, device=device).sqrt()
    return factors @ torch.nan_to_num(2 * norms + sums, 0.0, 0.0, 0.0)


def _summary_of_gradients(parameters: Sequence[Parameter], device: torch.device) -> Tensor:
    """Norm and sum of projections of gradients, (2,) float64; zeros without any."""
    norms = []
    projections = []
    for p in parameters:
        G = p.G
        if G is not None:
            norms.append(norm_and_sum(G)[0].to(device))
            projections.append(_projection(G).to(device))
    if not norms:
        return torch.zeros(2, dtype=torch.float64, device=device)
    norm = torch.linalg.vector_norm(torch.stack(norms))
    return torch.stack([norm, torch.stack(projections).sum()])


def _projection(G: Tensor) -> Tensor:
    """The product of a sample of G with fixed random signs, () float64.

    Unlike a sum or a norm it changes if elements swap places.
    """
    stride = max(1, math.ceil(G.numel() / SAMPLE))
    sample = G.reshape(-1)[::stride].double()
    places = torch.arange(sample.numel(), device=sample.device)
    # One of the middle bits, which look random.
    bits = (places * SPREADING) >> 15 & 1
    return sample @ (1 - 2 * bits.double())
