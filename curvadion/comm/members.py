"""The interface of the replicas that take part in openings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist

from curvadion import checks
from curvadion.comm.exchange_thread import Exchange


class Exchanges(Protocol):
    """What runs exchanges during training, in a thread."""

    @property
    def group(self) -> Any:
        """The process group that the exchanges use."""

    def begin(self, what: str, work: Callable[[], Any]) -> Exchange[Any]:
        """Run work in the thread; what: its name in errors."""


class Members(ABC):
    """The replicas of a run, as an opening sees them.

    Members that come and go apply an opening only if all that are present can. If a member is
    lost, their collectives raise :class:`curvadion.comm.lost.MemberLost`.

    Attributes:
        fixed: whether the members are always the same, and a lost one ends all of them.
        group: the members of this opening; None for one replica alone.
        fresh: whether this replica has received another's weights at this opening.
        with_step: whether the opening is part of a step, which is counted after it.
        names: of the members of the last opening; None for fixed members, who have none.
    """

    fixed: ClassVar[bool] = False
    group: dist.ProcessGroup | None = None
    fresh: bool = False
    with_step: bool = True
    names: tuple[str, ...] | None = None
    _weight: float = 1.0

    @property
    def weight(self) -> float:
        """How much this replica's next steps count in means, such as a step's tokens."""
        return self._weight

    @weight.setter
    def weight(self, weight: float) -> None:
        if self.fixed:
            raise ValueError(f"replicas.weight={weight!r}: replicas of a fixed group count equally")
        checks.number("replicas.weight", weight)
        self._weight = float(weight)

    @property
    def size(self) -> int:
        """How many take part in this opening."""
        return 1 if self.group is None else self.group.size()

    @property
    def events(self) -> Sequence[Any]:
        """What has happened to them so far, in order; nothing if they are always the same."""
        return ()

    def check_ready(self) -> None:
        """Raise RuntimeError if no step may be taken yet."""

    def changed(self) -> None:
        """Weights or states have been loaded or added."""

    def arrived(self) -> bool:
        """Whether an opening can begin now; if not, this replica trains on."""
        return True

    @abstractmethod
    def meet(self, *, ahead: bool = False) -> None:
        """Begin an opening; a peer's weights and states may replace these.

        Args:
            ahead: whether it begins before the step; the next call then does nothing.
        """

    @abstractmethod
    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return all members' numbers, by rank; MemberLost if a member is lost."""

    @abstractmethod
    def during_training(self, device: torch.device) -> Exchanges:
        """What runs the exchanges of a sync with a delay; device: of the weights."""

    @abstractmethod
    def agree(self) -> None:
        """Wait until all members get here; MemberLost if a member is lost."""

    def disconnect(self) -> None:
        """Let the others know that an opening has failed here; nothing if it ends all ranks."""

    @abstractmethod
    def commit(self, *, error: str | None, record: dict[str, Any]) -> bool:
        """End the opening.

        Args:
            error: why this rank cannot apply it; None if it can.
            record: what a late member needs, with the means as "codes".

        Returns:
            Whether it is applied: no rank of any replica has an error.
        """
