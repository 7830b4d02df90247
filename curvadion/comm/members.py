"""The interface of replicas that come and go, used by a sync at each opening."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from curvadion import checks
from curvadion.comm.worker import Exchange

# Errors of collectives if a member is lost; torch cannot name a foreign group, and then fails with
# another error.
LOST = (RuntimeError, ValueError)


class Opening(ABC):
    """The members that are present at an opening, which is applied only if all can commit.

    Attributes:
        group: the members, this rank's counterparts on the other replicas among them.
        fresh: whether this replica has just received weights and states from another one.
    """

    group: dist.ProcessGroup
    fresh: bool = False

    @abstractmethod
    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """All members' numbers, in the order of the group; one of LOST if a member is lost."""

    @abstractmethod
    def begin(self, what: str, work: Callable[[], Any]) -> Exchange[Any]:
        """Run work in a thread, which may communicate over the group; what: its name in errors."""

    @abstractmethod
    def agree(self) -> None:
        """Wait until all members get here; one of LOST if a member is lost."""

    @abstractmethod
    def commit(self, *, failed: bool, record: dict[str, Any]) -> bool:
        """Return whether this replica applies the opening: if none of its ranks failed.

        Collective in the replica. record: what a late member needs to catch up, with the codes of
        the means in order as "codes".
        """


class Members(ABC):
    """Replicas that come and go.

    Attributes:
        weight: of this replica's next steps in means, such as the tokens of a step if replicas have
            batches of different sizes. Set it before ``step()``.
    """

    _weight: float = 1.0

    @property
    def weight(self) -> float:
        return self._weight

    @weight.setter
    def weight(self, weight: float) -> None:
        checks.number("replicas.weight", weight)
        self._weight = float(weight)

    def changed(self) -> None:
        """Weights or states have been loaded or added, so members compare theirs anew."""

    def meet(self) -> None:
        """Begin the opening that the next :meth:`begin` returns."""

    def arrived(self) -> bool:
        """Whether an opening can begin now; if not, this replica trains on and asks again."""
        return True

    @abstractmethod
    def begin(self) -> Opening:
        """Meet the members that are present; a peer's weights and states may replace this one's."""
