"""Collectives during training, over their own process group."""

from __future__ import annotations

import atexit
import time

import torch
import torch.distributed as dist

from curvadion.comm.exchange_thread import Worker
from curvadion.comm.groups import BACKGROUND, Group, new_group, ranks_of, timeout_of

_backgrounds: dict[Group, Background] = {}  # by the group that they run beside


def background_of(like: Group, device: torch.device) -> Background:
    """The one background of a process group; the first call is collective.

    The first call for a group also ends the backgrounds of groups that no longer exist.
    """
    if like not in _backgrounds:
        destroyed = [group for group in _backgrounds if not _exists(group)]
        for group in destroyed:
            _backgrounds.pop(group).end(seconds=1.0)
        _backgrounds[like] = Background(like, device)
    return _backgrounds[like]


def _exists(group: Group) -> bool:
    """Whether the group has not been destroyed."""
    return group in dist.distributed_c10d._world.pg_map


class Background(Worker):
    """A thread with its own group of a group's ranks, for exchanges during training.

    The collectives of one group must be in the same order on all ranks. If exchanges used the
    training's group, their order among its collectives would depend on when threads run.
    """

    def __init__(self, like: Group, device: torch.device) -> None:
        group = new_group(
            ranks_of(like),
            [like],
            backend=dist.get_backend(like),
            description=BACKGROUND,
        )
        self.group = group
        self.timeout = timeout_of([group]).total_seconds()
        super().__init__(device)

        # NCCL connects at the first collective of each kind. During training it could
        # deadlock with kernels of other groups, which wait for a rank that is still
        # connecting.
        def connect() -> None:
            words = torch.zeros(group.size(), dtype=torch.uint8, device=device)
            dist.all_reduce(words, group=group)
            dist.all_to_all_single(torch.empty_like(words), words, group=group)

        self.begin("Connecting replicas for a delay", connect).result()

    def end(self, seconds: float) -> None:
        """End the thread, in ``seconds`` at most, and the group."""
        super().end(seconds)
        # Destroying an NCCL group may wait for ranks that are lost or late.
        if self._device.type != "cuda" and not self._thread.is_alive():
            if _exists(self.group):
                dist.destroy_process_group(self.group)
            del self.group  # ends its threads, which release tensors


@atexit.register
def _finish_all() -> None:
    """Wait for the exchanges of all backgrounds, for at most a timeout, and end them."""
    # Other ranks may wait for exchanges, and gloo's threads need the interpreter to release
    # tensors. But waiting for a lost rank's GPU never ends.
    start = time.monotonic()
    while _backgrounds:
        _, background = _backgrounds.popitem()
        deadline = start + background.timeout
        background.end(max(0.0, deadline - time.monotonic()))
