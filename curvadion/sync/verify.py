"""Are replicas alike, and is each replica's gradient its own: what ranks compare before a step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from curvadion import checks
from curvadion.comm.collectives import checksum, group_size, said_alike
from curvadion.layout.dtensor import local
from curvadion.layout.flat_shard import flat_shard
from curvadion.layout.parameters import global_shape
from curvadion.ops.tensors import norm_and_sum
from curvadion.switches import how_to_keep_gradients_local
from curvadion.update.hyperparameters import SETTINGS
from curvadion.update.parameter import Parameter
from curvadion.update.plan import Plan
from curvadion.update.state import ANCHOR

# Sums of equal weights differ by rounding where processors add in another order.
WEIGHTS_TOLERANCE = 1e-12
# Gradients that are averages of the same summands differ by rounding, own ones by their size.
GRADIENT_TOLERANCE = 1e-5
# Fewer numbers than that may be the same by chance.
FEWEST_NUMBERS = 32
SHOWN = 3  # differences that an error names
SAMPLE = 4096  # numbers of a gradient that are looked at
OTHER_WEIGHTS = (
    "The replicas hold different weights and would never agree. Start all replicas from the same "
    "weights (the same seed, or the same checkpoint), or call optimizer.broadcast_weights() on "
    "every rank before the first step."
)

Listing = list[tuple[str, str]]


# -------------------------------------------------------------------- settings


class Checksum:
    """The checksum of all groups' hyperparameters, computed anew only where one has changed."""

    def __init__(self) -> None:
        self._values: list[object] = []
        self._checksum = 0

    def of(self, param_groups: Sequence[Mapping[str, Any]]) -> int:
        """A number below 2**32 that is equal where the groups' settings are."""
        values = [_plain(group[key]) for group in param_groups for key in SETTINGS]
        if values != self._values:
            self._values, self._checksum = values, checksum(values)
        return self._checksum


def _plain(value: Any) -> Any:
    """Numbers as they are; of tensors the number, unless the host would have to wait for it."""
    if not isinstance(value, Tensor):
        return value
    return float(value) if value.device.type == "cpu" else None


def listing(
    param_groups: Sequence[Mapping[str, Any]], plan: Plan, more: Mapping[str, object]
) -> Listing:
    """Everything that must be alike on all replicas, each with what an error calls it."""
    listed = [(name, repr(value)) for name, value in more.items()]
    for g, group in enumerate(param_groups):
        listed += [(f"param_groups[{g}][{k!r}]", repr(_plain(group[k]))) for k in SETTINGS]
    for i, p in enumerate(plan.parameters):
        dtypes = {key: str(local(t).dtype) for key, t in p.state.items() if isinstance(t, Tensor)}
        listed.append((f"parameter {i}", f"{p.name} of shape {global_shape(p.X)}, {p.X.dtype}"))
        listed.append((f"the state of {p.name}", repr(sorted(dtypes.items()))))
    return listed


def differences(own: Listing, group: dist.ProcessGroup | None) -> str:
    """In words, the first settings that differ between the ranks of a group; "" if none does.

    Collective, and slow: for errors that all ranks are about to raise.
    """
    if group is None or group.size() == 1:
        return ""
    listings: list[Listing] = [[] for _ in range(group.size())]
    dist.all_gather_object(listings, own, group=group)
    ranks = dist.get_process_group_ranks(group)
    found = []
    for entries in zip_longest(*listings, fillvalue=("further entries", "none")):
        if len(set(entries)) == 1:
            continue
        by_value: dict[str, list[int]] = {}
        for rank, (label, value) in zip(ranks, entries, strict=True):
            text = value if label == entries[0][0] else f"{value} ({label})"
            by_value.setdefault(text, []).append(rank)
        told = " and ".join(f"{value} on {_ranks(on)}" for value, on in by_value.items())
        found.append(f"{entries[0][0]} is {told}")
    more = f"; {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return "; ".join(found[:SHOWN]) + more


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:4])) + (", …" if len(ranks) > 4 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def raise_different(own: Listing, group: dist.ProcessGroup | None) -> None:
    """Raise RuntimeError that names what differs; collective."""
    found = differences(own, group) or "a setting was changed on some rank, and then changed back"
    raise RuntimeError(
        f"The replicas' optimizers differ: {found}. Build the optimizer from the same arguments, "
        f"parameters and names on every rank, load the same checkpoint on all of them or on none, "
        f"and change settings on all of them at the same step. (A scheduler that follows a "
        f"replica's own loss, such as ReduceLROnPlateau, needs the mean over replicas.)"
    )


def check_alike(own: Listing, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Raise RuntimeError on all ranks unless they list the same; 16 bytes over the group."""
    if not said_alike(own, group, device):
        raise_different(own, group)


# -------------------------------------------------------------------- replicas


class Verdict(NamedTuple):
    """What a first look at the replicas has found.

    Attributes:
        decided: whether gradients could be told apart.
        complete: whether every rank has had every gradient since replicas last came together.
    """

    decided: bool
    complete: bool


def verify_replicas(
    plan: Plan,
    own: Listing,
    comparable: Sequence[Parameter],
    *,
    replicas: dist.ProcessGroup | None,
    uneven: bool,
    own_norms: bool,
) -> Verdict:
    """Raise on every rank if the replicas cannot work together.

    Args:
        plan: the parameters; the gradients held here are finite.
        own: what should be alike on all replicas.
        comparable: the parameters of which replicas should hold the same weights now.
        replicas: the ranks that hold the same shards; more than one.
        uneven: whether this replica may have missed a gradient since replicas came together.
        own_norms: whether each replica's gradients are meant to be divided by their own norm.

    Raises:
        RuntimeError: if the replicas' optimizers or weights differ, or if the gradients of the
            matrices (of all parameters where none is a matrix) are the same on all replicas up
            to rounding: then something else has averaged them, or every replica reads the same
            batch, and nothing would be saved.

    Warns if gradients that differ have equal norms: torch's clip_grad_norm_ leaves them so. Seen in
    float32, of replicas that are not sharded.

    A collective of 88 bytes over the replicas, and one of 20 over all ranks where replicas are
    sharded.
    """
    told_by = plan.dion or plan.elementwise
    values = torch.stack(
        [
            _checksum(plan, own),
            fingerprint(comparable, plan.device),
            *_summary(plan, told_by),
        ]
    )
    missing = uneven or any(p.G is None and p.local.numel() for p in plan.parameters)
    bounds = torch.cat([values, -values, values.new_tensor([missing])])
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=replicas)
    *extremes, missing_anywhere = bounds.tolist()
    largest, smallest = extremes[:5], [-x for x in extremes[5:]]
    norm, near = largest[2], GRADIENT_TOLERANCE * largest[2]
    same = all(_close(largest[i], smallest[i], near) for i in (2, 3))
    verdict = [
        largest[0] != smallest[0],
        not _close(largest[1], smallest[1], WEIGHTS_TOLERANCE * abs(largest[1])),
        norm > 0 and same,
        norm > 0 and not same,
        bool(missing_anywhere),
    ]
    # Every shard has compared its own shards, and all ranks must come to one conclusion.
    if group_size(plan.all_ranks) > group_size(replicas):
        flags = torch.tensor(verdict, dtype=torch.int32, device=plan.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=plan.all_ranks)
        verdict = [bool(flag) for flag in flags.tolist()]
    built_differently, other_weights, identical, different, missing = verdict
    if built_differently:
        raise_different(own, plan.all_ranks)
    if other_weights:
        raise RuntimeError(OTHER_WEIGHTS)
    if identical and not different:
        raise_identical("the matrices" if plan.dion else "the parameters")
    if different and not own_norms and group_size(plan.inside) == 1:
        _warn_of_own_norms(largest[4], smallest[4])
    few = sum(p.local.numel() for p in told_by) < FEWEST_NUMBERS  # which never tell anything
    return Verdict(decided=identical or different or few, complete=not missing)


def _warn_of_own_norms(largest: float, smallest: float) -> None:
    if not _close(largest, smallest, GRADIENT_TOLERANCE * largest):
        return
    warnings.warn(
        f"The gradients of all replicas have the norm {largest:.6g}, although they differ: each "
        f"replica has probably divided them by its own norm, as torch.nn.utils.clip_grad_norm_ "
        f"does. Clip with curvadion.clip_grad_norm_(optimizer, max_norm), or with its "
        f"across_replicas=False if this is meant.",
        stacklevel=checks.frames_up(),
    )


def raise_identical(of: str) -> None:
    """Raise the RuntimeError for gradients that something else has averaged."""
    raise RuntimeError(f"The gradients of {of} are identical on all replicas{_averaged()}")


def _averaged() -> str:
    return (
        f", but this optimizer was told to synchronise them itself: something else has already "
        f"averaged them. To stop it, {how_to_keep_gradients_local()}; with anything else switch "
        f"its gradient all-reduce off; or pass replicas='single' to leave the averaging to it. If "
        f"every replica reads the same batch, give each its own."
    )


def _checksum(plan: Plan, own: Listing) -> Tensor:
    """Of what is listed, and of the ranges that flat shards hold here; float64."""
    held = [(f.start, f.stop) for p in plan.parameters if (f := flat_shard(p.X))]
    return torch.tensor(checksum((own, held)), dtype=torch.float64, device=plan.device)


def fingerprint(parameters: Sequence[Parameter], device: torch.device) -> Tensor:
    """A float64 number that is the same where replicas hold, or have agreed on, the same weights.

    Of what was agreed on if something was: weights may have moved since.
    """
    held = [local(p.state[ANCHOR]) if ANCHOR in p.state else p.local for p in parameters]
    if not held:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms, sums = torch.stack([norm_and_sum(X).to(device) for X in held], dim=1)
    # The factors tell two parameters of one shape from each other. Infinite weights, such as a
    # mask's, tell nothing.
    factors = torch.arange(2, len(held) + 2, dtype=torch.float64, device=device).sqrt()
    return factors @ torch.nan_to_num(2 * norms + sums, 0.0, 0.0, 0.0)


def _summary(plan: Plan, told_by: Sequence[Parameter]) -> Tensor:
    """Of the gradients that tell, norm and sum of projections; the norm of all; (3,) float64.

    Two zeros where those that tell have too few numbers to be told apart.
    """
    gradients = {p: G for p in plan.parameters if (G := p.G) is not None}
    result = torch.zeros(3, dtype=torch.float64, device=plan.device)
    if not gradients:
        return result
    norms = torch.stack([norm_and_sum(G)[0].to(plan.device) for G in gradients.values()])
    result[2] = torch.linalg.vector_norm(norms)
    telling = [G for p in told_by if (G := gradients.get(p)) is not None]
    if sum(G.numel() for G in telling) >= FEWEST_NUMBERS:
        tells = set(map(id, told_by))
        places = [i for i, p in enumerate(gradients) if id(p) in tells]
        result[0] = torch.linalg.vector_norm(torch.stack([norms[i] for i in places]))
        samples = [_sample(G) for G in telling]
        signs = {(len(x), x.device): _signs(x) for x in samples}
        projections = [x @ signs[len(x), x.device] for x in samples]
        result[1] = torch.stack([each.to(plan.device) for each in projections]).sum()
    return result


def _sample(G: Tensor) -> Tensor:
    """At most ``SAMPLE`` numbers of a gradient, evenly spaced, in float64."""
    return G.reshape(-1)[:: max(1, -(-G.numel() // SAMPLE))].double()


def _signs(sample: Tensor) -> Tensor:
    """Fixed pseudo-random signs, so that a projection does not stay where numbers change places."""
    places = torch.arange(sample.numel(), device=sample.device)
    return 1 - 2 * ((places * 0x9E3779B1) >> 15 & 1).double()


def _close(one: float, other: float, tolerance: float) -> bool:
    return abs(one - other) <= tolerance


# -------------------------------------------------------------------- gradients, later


class GradientWatch:
    """Looks now and then whether something else averages the gradients of some parameters.

    From the tenth step on, ``AT_ONCE`` parameters are compared at ``LOOKS`` steps in a row, the
    largest parameters first. When all have been compared, the next are at the first steps of
    every ``EVERY``. Of a schedule's steps only openings count. A look is a projection of a
    gradient on fixed signs, relative to its norm, which is the same on all replicas, up to
    rounding, if the gradient's direction is. One look may deceive; ``LOOKS`` hardly do. A gradient
    that is zero or missing somewhere, or has few numbers that are not zero, tells nothing.

    Where replicas are sharded, one rank of each tells of its shards, another one each time.
    """

    AT_ONCE = 3
    LOOKS = 5
    FIRST = 9
    EVERY = 256
    BYTES = AT_ONCE * 2 * 8

    _ONE = 2**32  # what stands for 1.0 in a message of integers
    _NOTHING = 2**62

    def __init__(self, plan: Plan) -> None:
        sizes = [math.prod(global_shape(p.X)) for p in plan.parameters]
        order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
        self._parameters = [plan.parameters[i] for i in order if sizes[i] >= FEWEST_NUMBERS]
        self._plan = plan
        self._now: list[Parameter] = []
        self._alike: list[int] = []

    def _place(self, number: int) -> tuple[int, int] | None:
        """Which round a step belongs to, and which of its looks it is; the same on all ranks."""
        rounds = -(-len(self._parameters) // self.AT_ONCE)
        if rounds == 0:
            return None
        if number < rounds * self.LOOKS:
            return divmod(number, self.LOOKS)
        later, look = divmod(self.FIRST + number, self.EVERY)
        return (later, look) if look < self.LOOKS else None

    def look(self, number: int) -> Tensor | None:
        """Compare gradients over all ranks: ``BYTES``, not read by the host; None if not due.

        number: of the steps from the tenth on at which there was a chance to look.
        """
        place = self._place(number)
        if place is None:
            return None
        number, look = place
        first = number * self.AT_ONCE % len(self._parameters)
        chosen = self._parameters[first : first + self.AT_ONCE]
        if look == 0 or chosen != self._now:
            self._now, self._alike = chosen, [0] * len(chosen)
        inside = self._plan.inside
        mine = inside is None or dist.get_rank(inside) == number % inside.size()
        message = torch.full((2 * self.AT_ONCE,), -self._NOTHING, device=self._plan.device)
        for i, p in enumerate(chosen if mine else ()):
            message[2 * i : 2 * i + 2] = self._bounds(p)
        dist.all_reduce(message, op=dist.ReduceOp.MAX, group=self._plan.all_ranks)
        return message

    def conclude(self, message: Sequence[int]) -> None:
        """Take in what a look told, the same on all ranks.

        Raises:
            RuntimeError: if the gradients of all parameters of a round were alike at each look.

        Warns of single ones: there are losses whose gradient for one parameter does not depend on
        the data.
        """
        for i, p in enumerate(self._now):
            largest, smallest = message[2 * i], -message[2 * i + 1]
            tolerance = 1e-4 if p.X.dtype in (torch.float32, torch.float64) else 5e-4
            self._alike[i] += abs(largest - smallest) <= tolerance * self._ONE
        pairs = zip(self._now, self._alike, strict=True)
        averaged = [p.name for p, alike in pairs if alike == self.LOOKS]
        if len(averaged) > 1 and len(averaged) == len(self._now):
            raise_identical(", ".join(averaged))
        if averaged:
            warnings.warn(
                f"The gradients of {', '.join(averaged)} had the same direction on all replicas at "
                f"{self.LOOKS} steps. If they do not depend on the data, ignore this. "
                f"Otherwise they were identical{_averaged()}",
                stacklevel=checks.frames_up(),
            )

    def _bounds(self, p: Parameter) -> Tensor:
        """The projection and its negative, (2,) int64; unlike any other where there is none."""
        none = torch.full((2,), self._NOTHING, device=self._plan.device)
        G = p.G
        if G is None or not G.numel():
            return none
        sample = _sample(G)
        projection = sample @ _signs(sample) / torch.linalg.vector_norm(sample)
        whole = torch.nan_to_num(projection * self._ONE).round().long()
        enough = torch.count_nonzero(sample) >= FEWEST_NUMBERS
        return torch.where(enough, torch.stack([whole, -whole]), none.to(whole.device)).to(none)
