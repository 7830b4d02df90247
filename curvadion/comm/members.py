"""The interface of replicas that come and go, used by a sync at each opening."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from curvadion import checks
from curvadion.comm.exchange_thread import Exchange

# Errors if a member is lost; the second if torch then cannot name the group.
LOST = (RuntimeError, ValueError)


class Members(ABC):
    """Replicas that come and go; an opening is applied only if all present can commit.

    weight: how much this replica's next steps count in means, such as a step's tokens.
    """

    group: dist.ProcessGroup  # the members of this opening
    fresh: bool = False  # whether this replica has received weights at this opening
    _weight: float = 1.0

    @property
    def weight(self) -> float:
        return self._weight

    @weight.setter
    def weight(self, weight: float) -> None:
        checks.number("replicas.weight", weight)
        self._weight = float(weight)

    def changed(self) -> None:
        """Weights or states have been loaded or added."""

    def arrived(self) -> bool:
        """Whether an opening can begin now; if not, this replica trains on."""
        return True

    @abstractmethod
    def meet(self, *, ahead: bool = False) -> None:
        """Begin an opening; a peer's weights and states may replace these.

        ahead: before the step; the next call then does nothing.
        """

    @abstractmethod
    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """All members' numbers, by rank; one of LOST if a member is lost."""

    @abstractmethod
    def begin(self, what: str, work: Callable[[], Any]) -> Exchange[Any]:
        """Run work in a thread that may use the group; what: its name in errors."""

    @abstractmethod
    def agree(self) -> None:
        """Wait until all members get here; one of LOST if a member is lost."""

    @abstractmethod
    def commit(self, *, error: str | None, record: dict[str, Any]) -> bool:
        """End the opening; return whether it is applied: if no rank of this replica failed.

        error: why it fails. record: what a late member needs, with the means as "codes".
        """
