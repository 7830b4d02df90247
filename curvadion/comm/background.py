"""Collectives during training, over their own process group."""

from __future__ import annotations

import atexit
import time

import torch
import torch.distributed as dist

from curvadion.comm.exchange_thread import Worker
from curvadion.comm.groups import BACKGROUND, Group, new_group, ranks_of, timeout_of

_of_group: dict[Group, Background] = {}


def background_of(like: Group, device: torch.device) -> Background:
    """The one background of a process group; the first call is collective."""
    if like not in _of_group:
        for gone in [group for group in _of_group if not _exists(group)]:
            _of_group.pop(gone).end(seconds=1.0)
        _of_group[like] = Background(like, device)
    return _of_group[like]


def _exists(group: Group) -> bool:
    return group in dist.distributed_c10d._world.pg_map


def no_background() -> Background:
    """Raise RuntimeError: a step without replicas has no background exchanges."""
    raise RuntimeError("This step has no replicas to exchange anything with.")


class Background(Worker):
    """Exchanges over their own group, in the same order on all ranks."""

    def __init__(self, like: Group, device: torch.device) -> None:
        ranks, backend = ranks_of(like), dist.get_backend(like)
        self.group = group = new_group(ranks, [like], backend=backend, description=BACKGROUND)
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
    # Other ranks may wait for exchanges, and gloo's threads need the interpreter to release
    # tensors. But waiting for a lost rank's GPU never ends.
    begun = time.monotonic()
    while _of_group:
        _, background = _of_group.popitem()
        background.end(max(0.0, begun + background.timeout - time.monotonic()))
