"""The replica group, and what its members agree on before a step."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from curvadion.collectives import group_size

GATE_BYTES = 16
_NAN_BITS = 0x7FC00000


class ReplicaGroup:
    """The ranks that hold replicas of the same weights; survives deepcopy and pickle.

    A process group itself can be neither copied nor pickled: a copy shares it, and an unpickled
    ReplicaGroup looks it up by name, in a process that has created the same groups.
    """

    def __init__(self, replicas: dist.ProcessGroup | DeviceMesh | None) -> None:
        self.process_group = _process_group(replicas)

    @property
    def size(self) -> int:
        return group_size(self.process_group)

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplicaGroup:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        name = None if self.process_group is None else self.process_group.group_name
        return _replica_group_by_name, (name,)


def _process_group(replicas: object) -> dist.ProcessGroup | None:
    if isinstance(replicas, DeviceMesh):
        if replicas.ndim != 1:
            raise ValueError(
                f"replicas={replicas!r} has {replicas.ndim} dimensions: pass the one along which "
                f"weights are replicated, e.g. mesh['replicate']."
            )
        replicas = replicas.get_group()
    if replicas is None:
        return None
    if replicas is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "replicas is a process group that this rank is not a member of: pass the group that "
            "holds this rank's replicas."
        )
    if not isinstance(replicas, dist.ProcessGroup):
        raise TypeError(
            f"replicas={replicas!r} must be a ProcessGroup, a one-dimensional DeviceMesh or None, "
            f"got {type(replicas).__name__}: pass torch.distributed.group.WORLD for all ranks."
        )
    return replicas


def _replica_group_by_name(name: str | None) -> ReplicaGroup:
    if name is None:
        return ReplicaGroup(None)
    for group in dist.distributed_c10d._world.pg_map:
        if group.group_name == name:
            return ReplicaGroup(group)
    raise RuntimeError(
        f"The optimizer was pickled with the process group {name!r}, which this process does not "
        f"have: call torch.distributed.init_process_group before unpickling."
    )


class Agreement(NamedTuple):
    """What all ranks know alike after the gate's collective.

    signal: the largest gate signal of any matrix on any replica. parameter: the index, in the
    plan's order, of the parameter that had it. finite: no gradient on any replica holds a NaN or
    an Inf. all_zero: every gradient of every replica is zero (told only where no signal is
    positive). complete: no replica misses a gradient.
    """

    signal: float
    parameter: int
    finite: bool
    all_zero: bool
    complete: bool


def agree(
    signals: Tensor,
    owners: Tensor,
    norms: Tensor,
    *,
    complete: bool,
    group: dist.ProcessGroup | None,
) -> Agreement:
    """One collective of ``GATE_BYTES`` and one device-to-host read.

    Args:
        signals: this replica's gate signals, one per matrix, (k,), k may be 0.
        owners: the index of each matrix's parameter, (k,) int64, on the same device.
        norms: what must be finite, and zero for all_zero to hold, (l,) with l >= 1.
        complete: whether this replica has a gradient for every parameter.
        group: all ranks of all replicas; None for this process alone.

    The maximum over replicas of a word whose highest bits are the float32 bits of the signal is
    the word of the largest signal, since non-negative floats sort like their bits; NaN sorts above
    infinity and stands for a non-finite gradient. Below these bits, one says that a norm
    is positive and 31 hold the parameter's index.
    """
    if signals.numel() == 0:
        signals, owners = norms.new_zeros(1), torch.zeros_like(norms[:1], dtype=torch.int64)
    # abs() takes the sign off a negative zero, whose bits would sort below everything.
    signal, matrix = signals.float().clamp_min(0).abs().max(dim=0)
    finite = torch.isfinite(norms).all() & ~torch.isnan(signal)
    bits = torch.where(finite, signal.view(torch.int32).long(), _NAN_BITS)
    word = (bits << 32) | ((norms > 0).any().long() << 31) | owners[matrix]
    words = torch.stack([word, torch.full_like(word, not complete)])
    if group_size(group) > 1:
        dist.all_reduce(words, op=dist.ReduceOp.MAX, group=group)
    largest, missing = words.tolist()
    return Agreement(
        signal=struct.unpack("f", struct.pack("i", largest >> 32))[0],
        parameter=largest & 0x7FFFFFFF,
        finite=(largest >> 32) != _NAN_BITS,
        all_zero=(largest >> 31) == 0,
        complete=missing == 0,
    )


def held_anywhere(
    held: list[bool], device: torch.device, group: dist.ProcessGroup | None
) -> list[bool]:
    """Per parameter, whether some replica has a gradient: one byte each over the group."""
    if group_size(group) == 1:
        return held
    flags = torch.tensor(held, dtype=torch.uint8, device=device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    return [bool(flag) for flag in flags.tolist()]


def verify_replicas(
    description: int,
    gradients: list[Tensor],
    device: torch.device,
    *,
    replicas: dist.ProcessGroup | None,
    everyone: dist.ProcessGroup | None,
) -> bool:
    """Raise on every rank if the replicas cannot work together; return whether that is settled.

    Args:
        description: a number below 2**53 that is equal where the optimizers are set up alike.
        gradients: the gradients held here, all finite.
        device: where the collectives take place.
        replicas: the ranks that hold the same pieces; None for one replica.
        everyone: all ranks of all replicas.

    Raises:
        RuntimeError: if the replicas' optimizers differ, or if their gradients are identical:
            then something else has averaged them (or every replica reads the same batch) and
            nothing would be saved.

    A collective of 48 bytes over the replicas, and one of 12 over everyone where replicas are
    sharded. False if all gradients are zero: nothing can be told yet.
    """
    if group_size(replicas) == 1:
        return True
    norm = _fingerprint(gradients, device)
    values = torch.cat([norm.new_tensor([description]), norm])
    bounds = torch.cat([values, -values])
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=replicas)
    largest, smallest = bounds[:3], -bounds[3:]
    alike, zero = (largest == smallest).tolist(), (largest[1] == 0).item()
    verdict = [not alike[0], not zero and all(alike[1:]), not zero and not all(alike[1:])]
    # Every shard has compared its own piece, and all ranks must come to one conclusion.
    if group_size(everyone) > group_size(replicas):
        flags = torch.tensor(verdict, dtype=torch.int32, device=device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=everyone)
        verdict = [bool(flag) for flag in flags.tolist()]
    differently_built, some_identical, some_different = verdict
    if differently_built:
        raise RuntimeError(
            "The replicas' optimizers differ in their parameters' shapes, order or algorithms, or "
            "in rank_fraction, momentum_rule, right_factor, local_step, reconcile, gate or their "
            "limits, or have not loaded the same checkpoint, or, with reconcile='quantized', start "
            "from other weights: build the optimizer from the same arguments and weights on every "
            "rank, and load on all of them or on none."
        )
    if some_identical and not some_different:
        raise RuntimeError(
            "The gradients of all replicas are identical, but this optimizer was told to "
            "synchronise them itself: something else has already averaged them. With DDP call "
            "curvadion.integrations.ddp.keep_gradients_local(model), with FSDP that of "
            "curvadion.integrations.fsdp; with another framework switch its gradient all-reduce "
            "off; or pass replicas=None to leave the averaging to it. If every replica reads the "
            "same batch, give each its own."
        )
    return some_identical or some_different


def _fingerprint(gradients: list[Tensor], device: torch.device) -> Tensor:
    """Norm and a signed sum of all gradients, (2,) float64."""
    squares = torch.zeros((), dtype=torch.float64, device=device)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in gradients:
        squares += torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
        total += gradient.sum(dtype=torch.float32).double()
    return torch.stack([squares.sqrt(), total])
