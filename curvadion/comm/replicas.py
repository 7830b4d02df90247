"""The replicas of a run, as users give them and as openings see them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from curvadion.comm.background import background_of
from curvadion.comm.collectives import group_size
from curvadion.comm.groups import Group
from curvadion.comm.members import Exchanges, Members

_NOT_A_MEMBER: Any = dist.GroupMember.NON_GROUP_MEMBER  # what new_group returns to other ranks
ReplicasArgument = Group | DeviceMesh | Members | Literal["single"] | None


class FixedMembers(Members):
    """The replicas of a process group, all of which take part in every opening.

    They count equally and have nothing to vote about: if one is lost, the others' collectives
    fail, and all ranks end.

    Args:
        group: the replicas; None for one alone.
    """

    fixed = True
    _weight = 0.0  # 0 for all: :attr:`Opening.share` is then 1

    def __init__(self, group: Group | None = None) -> None:
        self.group = group

    def meet(self, *, ahead: bool = False) -> None:
        """Do nothing: all are present, and none needs another's weights."""

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return a copy for each member.

        Replicas of a fixed group have equal numbers, so nothing is sent.
        """
        return [list(numbers) for _ in range(self.size)]

    def during_training(self, device: torch.device) -> Exchanges:
        """What runs exchanges beside training; collective at its first call."""
        if self.group is None:
            raise RuntimeError("One replica alone has nobody to exchange anything with.")
        return background_of(self.group, device)

    def agree(self) -> None:
        """Do nothing: the exchanges themselves fail if one is lost."""

    def commit(self, *, error: str | None, record: dict[str, Any]) -> bool:
        """Return True."""
        return True


class Replica(NamedTuple):
    """A replica's position among all."""

    number: int  # from 0 on
    total: int


class ReplicaGroup:
    """The ranks that hold replicas. Copies of an optimizer share this object.

    Args:
        replicas: a process group with one rank of each replica; a 1-D mesh of these ranks;
            members that come and go; "single": the user says that there is one replica;
            None: as "single", but not said by the user.

    Attributes:
        single: whether the user has said that there is one replica: by name, or by a mesh,
            whose other dimensions say what the other ranks are.
        process_group: of a fixed number of replicas; None for one, or if they come and go.
        members: the same replicas, as openings see them.
    """

    def __init__(self, replicas: ReplicasArgument) -> None:
        self.single = isinstance(replicas, str) and replicas == "single"
        self.process_group: Group | None = None
        self.members: Members
        if isinstance(replicas, Members):
            self.members = replicas
            return
        if isinstance(replicas, DeviceMesh):
            if replicas.ndim != 1:
                raise ValueError(
                    f"replicas={replicas!r} must have one dimension: pass that of the "
                    f"replicas, such as mesh['replicate']"
                )
            self.process_group = replicas.get_group()
            self.single = self.process_group.size() == 1
        elif isinstance(replicas, Group):
            self.process_group = replicas
        elif replicas is _NOT_A_MEMBER:
            raise ValueError(
                f"replicas={replicas!r} is a process group that rank {dist.get_rank()} is not in: "
                f"pass a group with one rank of each replica, of which this rank is one"
            )
        elif not (replicas is None or self.single):
            raise TypeError(
                f"replicas={replicas!r} must be None, 'single', a DeviceMesh like "
                f"mesh['replicate'] or a ProcessGroup like torch.distributed.group.WORLD"
            )
        self.members = FixedMembers(self.process_group)

    @property
    def fixed(self) -> bool:
        """Whether the replicas are always the same ones."""
        return self.members.fixed

    @property
    def size(self) -> int:
        """The number of replicas; 2, meaning several, if they come and go."""
        return group_size(self.process_group) if self.fixed else 2

    @property
    def replica(self) -> Replica:
        """This rank's replica; the first one if replicas come and go."""
        number = 0 if self.process_group is None else self.process_group.rank()
        return Replica(number, self.size)

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplicaGroup:
        return self
