"""The interface of replicas that come and go, which a sync asks at each opening."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from curvadion.comm.worker import Exchange

# What collectives raise if a member is lost: torch cannot name a group that is none of its own, and
# then fails with another error.
LOST = (RuntimeError, ValueError)


class Opening(ABC):
    """The members that are present at an opening; what they do is written once all can commit.

    Attributes:
        group: the members, this rank's counterparts on the other replicas among them.
        fresh: whether this replica has just got weights and states from another one.
    """

    group: dist.ProcessGroup
    fresh: bool = False

    @abstractmethod
    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Everybody's numbers, in the order of the group; RuntimeError if a member is lost."""

    @abstractmethod
    def begin(self, what: str, work: Callable[[], Any]) -> Exchange[Any]:
        """Let a thread do some work, which may exchange over the group; what: for errors."""

    @abstractmethod
    def agree(self) -> None:
        """Wait until all members have come so far; RuntimeError if one is lost. Collective."""

    @abstractmethod
    def commit(self, *, failed: bool, record: dict[str, Any]) -> bool:
        """Whether this replica writes what has been exchanged: if it has not failed on any rank.

        Collective in the replica; members have agreed before. record: the codes of the means in
        order, as "codes", and what else a member that was late needs to catch up.
        """


class Members(ABC):
    """Replicas that come and go.

    Attributes:
        weight: of this replica's next steps in means, such as the tokens that a step reads, where
            replicas read batches of different sizes. Set it before ``step()``.
    """

    weight: float = 1.0

    def meet(self) -> None:
        """Begin the opening that the next :meth:`begin` returns, before a step is taken."""
        raise NotImplementedError

    def arrived(self) -> bool:
        """Whether an opening can begin now; if not, this replica trains on and asks again."""
        return True

    @abstractmethod
    def begin(self) -> Opening:
        """Meet the members that are present; weights and states may change by a peer's."""
