"""The process group of the members of an opening."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torchft.process_group import ProcessGroupGloo

TRIES = 3  # for how many timeouts torch's client tries to reach a store, at most


class MemberGroup(ProcessGroupGloo):  # type: ignore[misc, unused-ignore]
    """Connects whoever an opening has found, within a timeout of its own.

    The Lighthouse counts a replica that has just died as alive, and nothing tells those who
    connect to it that it is not. Exchanges do fail at once if a member dies, but they may
    take long. It is gloo on GPUs, too: NCCL cannot abort what waits for a lost peer without
    ending the process.

    Args:
        connect_timeout: until members that cannot connect give up this opening.
        timeout: until an exchange with a member that hangs fails.
    """

    def __init__(self, *, connect_timeout: timedelta, timeout: timedelta) -> None:
        super().__init__(timeout=connect_timeout)
        self._connect_timeout = connect_timeout
        self._exchange_timeout = timeout

    def configure(self, *where: Any, **more: Any) -> None:
        """Connect, as torchft's manager asks for it."""
        self._timeout = self._connect_timeout / TRIES
        super().configure(*where, **more)
        self._pg._get_backend(torch.device("cpu"))._set_default_timeout(self._exchange_timeout)

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
        # The store, at which all meet, is one member's, and it has answered.
        self._timeout = self._connect_timeout
        store.set_timeout(self._connect_timeout)
        return super()._create_pg(store, rank, world_size)
