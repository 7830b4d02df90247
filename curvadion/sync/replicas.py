"""The replica group, and what its members agree on before a step."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from curvadion.comm.collectives import group_size
from curvadion.optim.progress import Replica

GATE_BYTES = 16
SINGLE: Literal["single"] = "single"
Replicas = dist.ProcessGroup | DeviceMesh | Literal["single"] | None
_NAN_BITS = 0x7FC00000
# The second word of the gate's collective: a notice, the number of steps, and a checksum.
_STEP_BITS, _CHECKSUM_BITS = 28, 32


class ReplicaGroup:
    """The ranks that hold replicas of the same weights; survives deepcopy and pickle.

    A process group itself can be neither copied nor pickled: a copy shares it, and an unpickled
    ReplicaGroup looks it up by name, in a process that has created the same groups.

    Attributes:
        process_group: the ranks; None for one replica.
        single: whether the user has said that there is one replica only.
    """

    def __init__(self, replicas: Replicas) -> None:
        self.single = isinstance(replicas, str) and replicas == SINGLE
        self.process_group = None if self.single else _process_group(replicas)

    @property
    def size(self) -> int:
        return group_size(self.process_group)

    @property
    def replica(self) -> Replica:
        """Which one of how many this rank holds (a piece of)."""
        return Replica(0 if self.process_group is None else self.process_group.rank(), self.size)

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplicaGroup:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        name = None if self.process_group is None else self.process_group.group_name
        return _replica_group_by_name, (name, self.single)


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
            f"replicas={replicas!r} must be a ProcessGroup, a one-dimensional DeviceMesh, 'single' "
            f"or None, got {type(replicas).__name__}: pass torch.distributed.group.WORLD for all "
            f"ranks."
        )
    return replicas


def _replica_group_by_name(name: str | None, single: bool = False) -> ReplicaGroup:
    if name is None:
        return ReplicaGroup(SINGLE if single else None)
    for group in dist.distributed_c10d._world.pg_map:
        if group.group_name == name:
            return ReplicaGroup(group)
    raise RuntimeError(
        f"The optimizer was pickled with the process group {name!r}, which this process does not "
        f"have: call torch.distributed.init_process_group before unpickling."
    )


class Notice(IntEnum):
    """What a rank has to tell the others before a step; of all ranks' the highest counts."""

    NEW = 0  # no parameter has a state, and all learning rates are zero: nothing will move
    NOTHING = 1
    MISSING_GRADIENT = 2
    UNVERIFIED = 3  # replicas have not been compared since the last change of what they are
    CHANGED = 4  # parameters were added, frozen or regrouped here since the last step
    DIFFERENT = 5  # at the last step some rank had other settings than this one
    INVALID = 6  # a setting here is impossible


class Settings(NamedTuple):
    """What must be the same on all ranks at every step.

    steps: how many were taken. checksum: of the hyperparameters, below 2**32.
    """

    steps: int
    checksum: int

    @property
    def word(self) -> int:
        return (self.steps % (1 << _STEP_BITS)) << _CHECKSUM_BITS | self.checksum


class Agreement(NamedTuple):
    """What all ranks know alike after the gate's collective, but for ``alike``.

    signal: the largest gate signal of any matrix on any replica. parameter: the index, in the
    plan's order, of the parameter that had it. finite: no gradient on any replica holds a NaN or
    an Inf. all_zero: every gradient of every replica is zero (told only where no signal is
    positive). notice: the highest of any rank. alike: whether this rank has the settings of the
    rank whose word was the largest. If settings differ at all, they do so for some rank. read: the
    numbers of ``unread``.
    """

    signal: float
    parameter: int
    finite: bool
    all_zero: bool
    notice: Notice
    alike: bool
    read: list[int]

    @property
    def complete(self) -> bool:
        """Whether no replica misses a gradient; False where that is not known."""
        return self.notice <= Notice.NOTHING


def agree(
    signals: Tensor,
    owners: Tensor,
    norms: Tensor,
    *,
    notice: Notice,
    settings: Settings,
    group: dist.ProcessGroup | None,
    unread: Tensor | None = None,
) -> Agreement:
    """One collective of ``GATE_BYTES`` and one device-to-host read.

    Args:
        signals: this replica's gate signals, one per matrix, (k,), k may be 0.
        owners: the index of each matrix's parameter, (k,) int64, on the same device.
        norms: what must be finite, and zero for all_zero to hold, (l,) with l >= 1.
        notice: what this rank has to tell.
        settings: what should be the same on all ranks.
        group: all ranks of all replicas; None for this process alone.
        unread: int64 numbers that the host is to read with the rest, (l,).

    The maximum over replicas of a word whose highest bits are the float32 bits of the signal is
    the word of the largest signal, since non-negative floats sort like their bits; NaN sorts above
    infinity and stands for a non-finite gradient. Below these bits, one says that a norm
    is positive and 31 hold the parameter's index. The other word holds the notice above the
    settings: a rank whose settings are not those of the maximum tells so at the next step.
    """
    if signals.numel() == 0:
        signals, owners = norms.new_zeros(1), torch.zeros_like(norms[:1], dtype=torch.int64)
    # abs() takes the sign off a negative zero, whose bits would sort below everything.
    signal, matrix = signals.float().clamp_min(0).abs().max(dim=0)
    finite = torch.isfinite(norms).all() & ~torch.isnan(signal)
    bits = torch.where(finite, signal.view(torch.int32).long(), _NAN_BITS)
    word = (bits << 32) | ((norms > 0).any().long() << 31) | owners[matrix]
    told = notice << (_STEP_BITS + _CHECKSUM_BITS) | settings.word
    words = torch.stack([word, torch.full_like(word, told)])
    if group_size(group) > 1:
        dist.all_reduce(words, op=dist.ReduceOp.MAX, group=group)
    if unread is not None:
        words = torch.cat([words, unread])
    largest, told, *read = words.tolist()
    return Agreement(
        signal=struct.unpack("f", struct.pack("i", largest >> 32))[0],
        parameter=largest & 0x7FFFFFFF,
        finite=(largest >> 32) != _NAN_BITS,
        all_zero=(largest >> 31) == 0,
        notice=Notice(told >> (_STEP_BITS + _CHECKSUM_BITS)),
        alike=told & ((1 << (_STEP_BITS + _CHECKSUM_BITS)) - 1) == settings.word,
        read=read,
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
