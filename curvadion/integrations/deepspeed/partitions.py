"""Which elements of which parameters the flat partitions of ZeRO 1, 2 and 3 hold on this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from curvadion.integrations.deepspeed.replicas import reaching


@dataclass(frozen=True)
class Range:
    """Elements [start, stop) of a parameter of ``shape``, from ``offset`` in a flat partition.

    The others are with the other ranks of ``group``. Every rank has a range of every parameter,
    perhaps an empty one.
    """

    parameter: Tensor
    shape: tuple[int, ...]
    start: int
    stop: int
    offset: int
    group: dist.ProcessGroup


@dataclass(frozen=True)
class Partition:
    """A flat tensor of master weights, with padding, that ZeRO hands to the optimizer."""

    flat: Tensor
    param_group: int  # position of the optimizer's group that it comes from
    ranges: tuple[Range, ...]  # what it holds, in an order that all ranks share
    publish: Callable[[], object]  # copies it to where ZeRO gathers the model's weights from


# What DeepSpeed calls master weights, their parameters, and shares of these: at stages 1 and 2, and
# in its BF16_Optimizer.
_FLAT = {
    "single_partition_of_fp32_groups": ("bit16_groups", "parallel_partitioned_bit16_groups"),
    "fp32_groups_flat_partition": ("bf16_groups", "bf16_partitioned_groups"),
}


def partitions_of(zero: Any) -> list[Partition]:
    """The partitions of DeepSpeed's ZeRO optimizer, in the order in which it steps on them."""
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        return list(_stage_3(zero))
    for masters, names in _FLAT.items():
        if hasattr(zero, masters):
            return list(_stage_1_and_2(zero, masters, *names))
    raise RuntimeError(f"{type(zero).__name__} is no ZeRO optimizer whose partitions are known")


def _stage_1_and_2(zero: Any, masters: str, parameters: str, shares: str) -> Iterator[Partition]:
    def publish(i: int, master: Tensor) -> None:
        # Into the buffer as it is then: offloading weights exchanges it.
        mine = dist.get_rank(zero.real_dp_process_group[i])
        getattr(zero, shares)[i][mine].data.copy_(master.data)

    for i, master in enumerate(getattr(zero, masters)):
        group = reaching(zero.real_dp_process_group[i], master.device)
        flat, held = getattr(zero, f"{parameters}_flat")[i], getattr(zero, parameters)[i]
        ranges = _contiguous(held, flat, master.numel(), group)
        yield Partition(master, i, ranges, partial(publish, i, master))


def _contiguous(
    parameters: Sequence[Tensor], flat: Tensor, size: int, group: dist.ProcessGroup
) -> tuple[Range, ...]:
    """Ranges of a partition that is the ``rank``-th share, ``size`` long, of a flat buffer.

    Parameters are views of the buffer: where they lie is asked of them, because the order may be
    changed (``round_robin_gradients``) and gaps may be left (``parameter_alignment``).
    """
    first = dist.get_rank(group) * size
    ranges = []
    for p in parameters:
        same = p.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        assert same, f"a parameter of shape {tuple(p.shape)} is no view of ZeRO's flat buffer"
        begin = int(p.storage_offset()) - int(flat.storage_offset())
        start = min(max(first - begin, 0), p.numel())
        stop = max(min(first + size - begin, p.numel()), start)
        offset = begin + start - first if start < stop else 0
        ranges.append(Range(p, tuple(p.shape), start, stop, offset, group))
    return tuple(ranges)


def _stage_3(zero: Any) -> Iterator[Partition]:
    """Every parameter is sharded by itself in equal shares; a sub-group is a row of such shares."""
    for i, master in enumerate(zero.fp32_partitioned_groups_flat):
        ranges, offset = [], 0
        for p in zero.fp16_groups[i]:
            held_by = getattr(p, "ds_process_group", zero.dp_process_group)
            group = reaching(held_by, master.device)
            size = p.partition_numel()
            start = min(size * dist.get_rank(group), p.ds_numel)
            stop = min(start + size, p.ds_numel)
            ranges.append(Range(p, tuple(p.ds_shape), start, stop, offset, group))
            offset += size
        assert offset == master.numel(), "ZeRO's sub-group is not a row of its parameters' shares"
        publish = partial(zero._reassign_or_swap_out_partitioned_parameters, i)
        yield Partition(master, zero.sub_group_to_group_id[i], tuple(ranges), publish)


def publish(zero: Any, partitions: Sequence[Partition]) -> None:
    """Give the model the master weights, as ZeRO's step does at its end; collective."""
    if hasattr(zero, "update_lp_params"):
        zero.update_lp_params()
        return
    zero._partition_all_parameters()
    for partition in partitions:
        partition.publish()
    if persistent := zero.persistent_parameters:
        persistent[0].all_gather(persistent)
    zero.invalidate_secondary_tensor()
