"""The interface of replicas that come and go, which a sync asks at each opening."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist


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
    def commit(self, *, failed: bool, record: dict[str, Any]) -> bool:
        """Whether all members write what they have exchanged; collective.

        failed: whether this one cannot. record: what a member that was late needs to catch up.
        """


class Members(ABC):
    """Replicas that come and go."""

    @abstractmethod
    def begin(self) -> Opening:
        """Meet the members that are present; weights and states may change by a peer's."""
