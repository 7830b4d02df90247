"""The process groups that an engine's ranks and tensors need."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def data_parallel_group(engine: Any) -> dist.ProcessGroup:
    """The ranks over which the engine averages gradients."""
    group: dist.ProcessGroup = engine.seq_data_parallel_group
    return group


class Reaching:
    """Groups over the same ranks as others, for tensors where those may have no backend.

    A GPU's engine has NCCL groups; offloaded master weights are on the CPU. All ranks must ask for
    the same groups in the same order.
    """

    def __init__(self) -> None:
        self._made: dict[dist.ProcessGroup, dist.ProcessGroup] = {}

    def __call__(self, group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
        """``group`` if it takes tensors on ``device``, else a gloo group of its ranks."""
        if f"{device.type}:" in str(dist.get_backend_config(group)):
            return group
        if group not in self._made:
            ranks = dist.get_process_group_ranks(group)
            made: dist.ProcessGroup = dist.new_group(ranks, backend="gloo")
            self._made[group] = made
        return self._made[group]
