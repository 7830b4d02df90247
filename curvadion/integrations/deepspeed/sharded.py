"""ZeRO 1, 2 and 3: one optimizer step on all of ZeRO's partitions.

ZeRO gives the optimizer flat partitions, and calls its step once for each of them. Here every range
of a parameter in a partition becomes a separate parameter: a flat shard, and a view of the
partition. The optimizer steps on these once ZeRO has passed the last partition with its gradient.
Replicas jointly decide how to clip and whether to skip a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from curvadion.integrations.deepspeed.replicas import reaching
from curvadion.integrations.shared import run_after, wrap_method
from curvadion.layout.flat_shard import declare_flat_shard
from curvadion.optim.clipping import clip_grad_norm_
from curvadion.optim.dion import Dion

NOT_HYPERPARAMETERS = ("params", "param_names")


def attach(engine: Any, optimizer: Dion) -> None:
    """Make the optimizer step on the partitions of the engine's ZeRO optimizer."""
    zero = engine.optimizer
    partitions = partitions_of(zero)
    shards = Shards(optimizer, partitions, engine.param_names)

    def on_shards(theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with shards.in_place():
            return theirs(*args, **kwargs)

    step = MethodType(lambda self, closure=None: shards.receive(), optimizer)
    setattr(optimizer, "step", step)  # noqa: B010
    for name in ("drift", "state_dict", "load_state_dict", "synchronize", "broadcast_weights"):
        wrap_method(optimizer, name, on_shards)
    if optimizer._replicas.process_group is None:
        _count_skipped_steps(zero, shards, tolerate=engine.fp16_enabled())
        return
    if engine.fp16_enabled():
        setattr(optimizer, "found_inf", None)  # noqa: B010  # a loss scaler drives the steps
    for name in ("synchronize", "broadcast_weights"):
        run_after(optimizer, name, lambda _: publish(zero, partitions))
    _decide_with_all_replicas(zero, shards, partitions)
    zero.eval, zero.train = optimizer.eval, optimizer.train  # Accelerate calls them


def _count_skipped_steps(zero: Any, shards: Shards, *, tolerate: bool) -> None:
    """Count steps with a non-finite gradient, at which ZeRO does not call the optimizer."""

    def step(theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        shards.begin()
        result = theirs(*args, **kwargs)
        if not shards.stepped:
            shards.optimizer.skip_step(tolerate=tolerate)
        return result

    wrap_method(zero, "step", step)


def _decide_with_all_replicas(zero: Any, shards: Shards, partitions: list[Partition]) -> None:
    """Make replicas clip and skip jointly; ZeRO would decide by one replica's gradients."""

    def step(theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        max_norm, zero.clip_grad, norms = zero.clip_grad, 0.0, []

        def clip() -> None:  # once all gradients are there
            norms.append(clip_grad_norm_(shards.optimizer, max_norm).item())

        shards.begin(before_step=clip if max_norm else None)
        try:
            result = theirs(*args, **kwargs)
        finally:
            zero.clip_grad = max_norm
        if not shards.stepped:  # other replicas are waiting or have sent their means
            shards.step_with_nan()
            publish(zero, partitions)
        if norms:
            zero._global_grad_norm = norms[0]
        zero.overflow = False  # learning rates follow their schedules on all replicas
        return result

    wrap_method(zero, "step", step)


class Shards:
    """The optimizer's parameters as ranges of ZeRO's partitions, and the pending gradients."""

    def __init__(
        self, optimizer: Dion, partitions: list[Partition], names: dict[Tensor, str]
    ) -> None:
        self.optimizer, self.stepped = optimizer, False
        self._before_step: Callable[[], object] | None = None
        self._partitions = partitions
        self._zero_groups = list(optimizer.param_groups)
        self._gradients: dict[int, Tensor | None] = {}
        self._views = [_shards(partition) for partition in partitions]
        self._groups: list[dict[str, Any]] = []
        for position, group in enumerate(self._zero_groups):
            mine = [i for i, p in enumerate(partitions) if p.param_group == position]
            own = [names[r.parameter] for i in mine for r in partitions[i].ranges]
            views = [view for i in mine for view in self._views[i]]
            self._groups.append({**group, "params": views, "param_names": own})

    def begin(self, before_step: Callable[[], object] | None = None) -> None:
        """Begin a logical step; before_step is called once all gradients have arrived."""
        self.stepped, self._before_step = False, before_step
        self._zero_groups = list(self.optimizer.param_groups)
        self._gradients.clear()

    def receive(self) -> None:
        """Collect the gradients of the current partitions; step once all have arrived."""
        for group in self.optimizer.param_groups:
            for flat in group["params"]:
                self._gradients[id(flat)] = flat.grad
        if len(self._gradients) < len(self._partitions):
            return
        self._step()
        # ZeRO published the earlier ones before the step.
        for partition in self._partitions:
            partition.publish()

    def step_with_nan(self) -> None:
        """Step after ZeRO found a non-finite gradient and dropped all gradients."""
        for partition in self._partitions:
            self._gradients[id(partition.flat)] = torch.full_like(partition.flat, torch.nan)
        self._step()

    def _step(self) -> None:
        self.stepped = True  # also if the step raises
        with self.in_place():
            for views, partition in zip(self._views, self._partitions, strict=True):
                gradient = self._gradients[id(partition.flat)]
                if gradient is not None:
                    for view, held in zip(views, _held(partition, gradient), strict=True):
                        view.grad = held
            if self._before_step is not None:
                self._before_step()
            type(self.optimizer).step(self.optimizer)
            self._gradients.clear()
            for view in (view for views in self._views for view in views):
                view.grad = None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the optimizer's groups hold the shards; hyperparameters are shared."""
        optimizer = self.optimizer
        during, before = optimizer.param_groups, self._zero_groups
        if len(during) == len(before):
            before = during
        _share(before, self._groups)
        for views, partition in zip(self._views, self._partitions, strict=True):
            optimizer.state.pop(partition.flat, None)  # ZeRO's look-up has created a state there
            for view, held in zip(views, _held(partition, partition.flat), strict=True):
                if view.data_ptr() != held.data_ptr():  # ZeRO has moved the partition
                    view.data = held
        optimizer.param_groups = self._groups
        try:
            yield
        finally:
            self._groups = optimizer.param_groups
            _share(self._groups, before)
            optimizer.param_groups = during


def _held(partition: Partition, flat: Tensor) -> list[Tensor]:
    data = flat.detach()
    return [data[r.offset : r.offset + r.stop - r.start] for r in partition.ranges]


def _shards(partition: Partition) -> list[nn.Parameter]:
    views = [nn.Parameter(held) for held in _held(partition, partition.flat)]
    for view, r in zip(views, partition.ranges, strict=True):
        declare_flat_shard(view, r.shape, r.start, r.stop, r.group)
    return views


def _share(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    for given, taken in zip(source, target, strict=True):
        taken.update({k: v for k, v in given.items() if k not in NOT_HYPERPARAMETERS})


@dataclass(frozen=True)
class Range:
    """Elements [start, stop) of a parameter; the other ranks of ``group`` hold the rest."""

    parameter: Tensor
    shape: tuple[int, ...]
    start: int
    stop: int
    offset: int  # in a flat partition
    group: dist.ProcessGroup


@dataclass(frozen=True)
class Partition:
    """A flat tensor of master weights, with padding, that ZeRO hands to the optimizer."""

    flat: Tensor
    param_group: int  # position of the optimizer's group that it comes from
    ranges: tuple[Range, ...]  # its contents, in an order that all ranks share
    publish: Callable[[], object]  # copies it to the buffer from which ZeRO gathers the weights


# Attributes with masters, parameters and their shares at stages 1 and 2, and in BF16_Optimizer.
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
    raise RuntimeError(
        f"{type(zero).__name__} is not a supported ZeRO optimizer: the layout of its partitions is "
        f"unknown"
    )


def _stage_1_and_2(zero: Any, masters: str, parameters: str, shares: str) -> Iterator[Partition]:
    def publish(i: int, master: Tensor) -> None:
        # Looked up at each call, because offloading weights replaces the buffer.
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
    """Ranges of a partition that is this rank's share, ``size`` long, of a flat buffer."""
    # Offsets are read from the parameters, because order and gaps depend on settings.
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
    """Every parameter is sharded separately into equal shares; a sub-group is a row of shares."""
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
    """Copy the master weights to the model, as at the end of ZeRO's step; collective."""
    if hasattr(zero, "update_lp_params"):
        zero.update_lp_params()
        return
    zero._partition_all_parameters()
    for partition in partitions:
        partition.publish()
    if persistent := zero.persistent_parameters:
        persistent[0].all_gather(persistent)
    zero.invalidate_secondary_tensor()
