"""Which elements of which parameters the flat partitions of ZeRO 1, 2 and 3 hold on this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from curvadion.integrations.deepspeed.process_groups import Reaching


@dataclass(frozen=True)
class Range:
    """Elements [start, stop) of a parameter of ``shape``, from ``offset`` in a flat partition.

    The other elements are with the other ranks of ``group``. Every rank has a range of every
    parameter, perhaps an empty one.
    """

    parameter: Tensor
    shape: tuple[int, ...]
    start: int
    stop: int
    offset: int
    group: dist.ProcessGroup


@dataclass(frozen=True)
class Partition:
    """A flat tensor of master weights that ZeRO hands to the optimizer.

    Attributes:
        flat: 1-D, with padding that belongs to no parameter and may hold anything.
        param_group: position of the optimizer's group that it comes from.
        ranges: what it holds, in an order that all ranks share.
        publish: copies the master weights to where ZeRO gathers the model's weights from.
    """

    flat: Tensor
    param_group: int
    ranges: tuple[Range, ...]
    publish: Callable[[], object]


def partitions_of(zero: Any, reaching: Reaching) -> list[Partition]:
    """The partitions of DeepSpeed's ZeRO optimizer, in the order in which it steps on them.

    Args:
        zero: DeepSpeed's optimizer.
        reaching: gives the ranges' groups; partitions may be offloaded to the CPU.

    Raises:
        RuntimeError: if the layout is not the one that is written down here.
    """
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        return list(_stage_3(zero, reaching))
    if hasattr(zero, "single_partition_of_fp32_groups"):
        return list(_stage_1_and_2(zero, reaching))
    if hasattr(zero, "fp32_groups_flat_partition"):
        return list(_bfloat16(zero, reaching))
    raise RuntimeError(f"{type(zero).__name__} is no ZeRO optimizer whose partitions are known")


def _stage_1_and_2(zero: Any, reaching: Reaching) -> Iterator[Partition]:
    for i, master in enumerate(zero.single_partition_of_fp32_groups):
        group = reaching(zero.real_dp_process_group[i], master.device)
        flat = zero.bit16_groups_flat[i]
        ranges = _contiguous(zero.bit16_groups[i], flat, master.numel(), group)
        yield Partition(
            master, i, ranges, _publish(zero, "parallel_partitioned_bit16_groups", i, master)
        )


def _bfloat16(zero: Any, reaching: Reaching) -> Iterator[Partition]:
    for i, master in enumerate(zero.fp32_groups_flat_partition):
        group = reaching(zero.real_dp_process_group[i], master.device)
        flat = zero.bf16_groups_flat[i]
        ranges = _contiguous(zero.bf16_groups[i], flat, master.numel(), group)
        yield Partition(master, i, ranges, _publish(zero, "bf16_partitioned_groups", i, master))


def _publish(zero: Any, name: str, i: int, master: Tensor) -> Callable[[], object]:
    """A copy into this rank's share of a buffer, as it is then: offloading weights exchanges it."""

    def publish() -> None:
        mine = dist.get_rank(zero.real_dp_process_group[i])
        getattr(zero, name)[i][mine].data.copy_(master.data)

    return publish


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
        if p.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr():
            raise RuntimeError(
                f"A parameter of shape {tuple(p.shape)} is no view of ZeRO's flat buffer: this "
                f"version of DeepSpeed lays its partitions out in a way that is not known here"
            )
        begin = int(p.storage_offset()) - int(flat.storage_offset())
        start = min(max(first - begin, 0), p.numel())
        stop = max(min(first + size - begin, p.numel()), start)
        offset = begin + start - first if start < stop else 0
        ranges.append(Range(p, tuple(p.shape), start, stop, offset, group))
    return tuple(ranges)


def _stage_3(zero: Any, reaching: Reaching) -> Iterator[Partition]:
    """Every parameter is cut by itself into equal shares; a sub-group is a row of such shares."""
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
        if offset != master.numel():
            raise RuntimeError(
                f"ZeRO's sub-group {i} has {master.numel()} elements where its parameters have "
                f"{offset}: this version of DeepSpeed lays them out in a way that is not known here"
            )
        yield Partition(master, zero.sub_group_to_group_id[i], tuple(ranges), _publish_3(zero, i))


def _publish_3(zero: Any, sub_group: int) -> Callable[[], object]:
    return lambda: zero._reassign_or_swap_out_partitioned_parameters(sub_group)


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
