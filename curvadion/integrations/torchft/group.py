"""The process group of the members of an opening."""

from __future__ import annotations

from concurrent.futures import wait
from datetime import timedelta
from typing import Any

import torch
from torchft.process_group import ProcessGroupGloo

from curvadion.integrations.torchft.thread import in_thread

TRIES = 3  # torch's client tries twice to reach a store, and pauses for up to 1.5 s in between
CONNECTS = 5  # for how many of its timeouts gloo tries to connect to a member
# torch and gloo give up after this share of the time to connect, because their errors say what went
# wrong.
GIVE_UP_AFTER = 0.8


class MemberGroup(ProcessGroupGloo):  # type: ignore[misc, unused-ignore]
    """Connects whoever an opening has found, within a timeout of its own.

    The Lighthouse counts a replica that has just died or stopped as alive, and nothing tells
    those who connect to it that it is not. Exchanges do fail at once if a member dies, but they
    may take long. It is gloo on GPUs, too: NCCL cannot abort what waits for a lost peer without
    ending the process.

    Args:
        connect_timeout: until members that cannot connect give up this opening.
        timeout: until an exchange with a member that hangs fails.
    """

    def __init__(self, *, connect_timeout: timedelta, timeout: timedelta) -> None:
        super().__init__(timeout=connect_timeout)
        self._exchange_timeout = timeout

    def configure(self, *where: Any, **more: Any) -> None:
        """Connect, as torchft's manager asks for it; RuntimeError if that fails."""
        self.abort(errored=False)
        timeout = self._timeout

        def connect() -> Any:
            connections = _Connections(GIVE_UP_AFTER * timeout)
            connections.configure(*where, **more)
            return connections._pg

        # In a thread, because torch's client waits for ever for a store that keeps its connection
        # and does not answer, as that of a process that has been stopped.
        connected = in_thread(connect)
        if not wait([connected], timeout.total_seconds()).done:
            # The error's traceback must not hold what connects later: others would wait for it.
            del connected
            raise RuntimeError(f"a member has not answered for {timeout.total_seconds()} s")
        self._pg = connected.result()
        self._pg._get_backend(torch.device("cpu"))._set_default_timeout(self._exchange_timeout)


class _Connections(ProcessGroupGloo):  # type: ignore[misc, unused-ignore]
    """Those of one opening; timeout: until torch or gloo give up, unless a store hangs."""

    def __init__(self, timeout: timedelta) -> None:
        super().__init__(timeout=timeout / TRIES)
        self._timeout_of_members = timeout

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
        # The store, at which all meet, is one member's, and it has answered.
        store.set(f"present/{rank}", "")
        everybody = [f"present/{member}" for member in range(world_size)]
        store.wait(everybody, self._timeout_of_members)
        self._timeout = self._timeout_of_members / CONNECTS
        return super()._create_pg(store, rank, world_size)
