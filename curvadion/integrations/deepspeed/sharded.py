"""ZeRO 1, 2 and 3: one optimizer step on all of ZeRO's partitions.

ZeRO calls the optimizer's step once for each of its flat partitions. Here every range of a
parameter in a partition becomes a parameter: a flat shard, and a view of the partition. The
optimizer steps on these once ZeRO has passed the last partition with its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from curvadion.comm.groups import Group
from curvadion.integrations.deepspeed.replicas import reaching
from curvadion.integrations.shared import run_after, wrap_method
from curvadion.layout.flat_shard import declare_flat_shard
from curvadion.optim.clipping import clip_grad_norm_
from curvadion.optim.dion import Dion


def attach(engine: Any, optimizer: Dion) -> None:
    """Make the optimizer step on the partitions of the engine's ZeRO."""
    zero = engine.optimizer
    partitions = partitions_of(zero)
    shards = Shards(optimizer, partitions, engine.param_names)

    def on_shards(theirs: Any, *args: Any, **kwargs: Any) -> Any:
        with shards.in_place():
            return theirs(*args, **kwargs)

    vars(optimizer)["step"] = MethodType(lambda self, closure=None: shards.receive(), optimizer)
    for name in ("state_dict", "load_state_dict", "synchronize"):
        wrap_method(optimizer, name, on_shards)
    if optimizer._replicas.process_group is None:
        skips = partial(_count_skipped_steps, shards, tolerate=engine.fp16_enabled())
        wrap_method(zero, "step", skips)
        return
    if engine.fp16_enabled():
        vars(optimizer)["found_inf"] = None  # a loss scaler drives the steps
    run_after(optimizer, "synchronize", lambda _: publish(zero, partitions))
    wrap_method(zero, "step", partial(_decide_with_all_replicas, zero, shards))
    zero.eval, zero.train = optimizer.eval, optimizer.train  # Accelerate calls them


def _count_skipped_steps(shards: Shards, theirs: Any, *, tolerate: bool) -> None:
    """ZeRO's step, which skips the optimizer if a gradient is not finite."""
    shards.begin()
    theirs()
    if not shards.stepped:
        shards.optimizer.skip_step(tolerate=tolerate)


def _decide_with_all_replicas(zero: Any, shards: Shards, theirs: Any) -> None:
    """ZeRO's step, but replicas clip and skip jointly."""
    max_norm, zero.clip_grad = zero.clip_grad, 0.0

    def clip() -> None:  # once all gradients are there
        zero._global_grad_norm = clip_grad_norm_(shards.optimizer, max_norm).item()

    shards.begin(before_step=clip if max_norm else None)
    try:
        theirs()
    finally:
        zero.clip_grad = max_norm
    if not shards.stepped:  # other replicas are waiting or have sent their means
        shards.step_with_nan()
        publish(zero, shards.partitions)
    zero.overflow = False  # learning rates follow their schedules on all replicas


class Shards:
    """Parameters as ranges of ZeRO's partitions, and their pending gradients."""

    def __init__(self, optimizer: Dion, partitions: list[Partition], names: Any) -> None:
        self.optimizer, self.partitions = optimizer, partitions
        self._groups: list[dict[str, Any]] = []
        for i, group in enumerate(optimizer.param_groups):
            ranges = [r for p in partitions if p.param_group == i for r in p.ranges]
            shards, own = [r.shard for r in ranges], [names[r.parameter] for r in ranges]
            self._groups.append({**group, "params": shards, "param_names": own})
        self.begin()

    def begin(self, before_step: Callable[[], object] | None = None) -> None:
        """Begin a step; before_step is called once all gradients have arrived."""
        self.stepped, self._before_step = False, before_step
        self._zero_groups = list(self.optimizer.param_groups)
        self._gradients: dict[Tensor, Tensor | None] = {}  # by partition

    def receive(self) -> None:
        """Collect the gradients of the current partitions; step once all have arrived."""
        for group in self.optimizer.param_groups:
            for flat in group["params"]:
                self._gradients[flat] = flat.grad
        if len(self._gradients) == len(self.partitions):
            self._step()
            # ZeRO published the earlier ones before the step.
            for partition in self.partitions:
                partition.publish()

    def step_with_nan(self) -> None:
        """Step after ZeRO found a non-finite gradient and dropped all."""
        flats = [partition.flat for partition in self.partitions]
        self._gradients = {flat: torch.full_like(flat, torch.nan) for flat in flats}
        self._step()

    def _step(self) -> None:
        self.stepped = True  # also if the step raises
        with self.in_place():
            for partition in self.partitions:
                gradient = self._gradients[partition.flat]
                for r in partition.ranges:
                    r.shard.grad = None if gradient is None else r.within(gradient)
            if self._before_step is not None:
                self._before_step()
            type(self.optimizer).step(self.optimizer)
            self._gradients.clear()
            self.optimizer.zero_grad()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the optimizer's groups hold the shards; hyperparameters are shared."""
        optimizer = self.optimizer
        during, before = optimizer.param_groups, self._zero_groups
        if len(during) == len(before):
            before = during
        _share(before, self._groups)
        for partition in self.partitions:
            optimizer.state.pop(partition.flat, None)  # created by ZeRO's look-up
            for r in partition.ranges:
                held = r.within(partition.flat)
                if r.shard.data_ptr() != held.data_ptr():  # ZeRO has moved the partition
                    r.shard.data = held
        optimizer.param_groups = self._groups
        try:
            yield
        finally:
            self._groups = optimizer.param_groups
            _share(self._groups, before)
            optimizer.param_groups = during


def _share(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    for given, taken in zip(source, target, strict=True):
        taken.update({k: v for k, v in given.items() if k not in ("params", "param_names")})


class Range:
    """Elements [start, stop) of a parameter, and the flat shard in a partition."""

    def __init__(
        self,
        parameter: Tensor,
        shape: Sequence[int],
        bounds: tuple[int, int],
        flat: Tensor,  # the partition
        offset: int,  # of the shard, a view of it
        group: Group,  # of the ranks that hold the other elements
    ) -> None:
        self.parameter, self.shape = parameter, tuple(shape)
        self.start, self.stop = bounds
        self.offset = offset
        self.shard = nn.Parameter(self.within(flat))
        declare_flat_shard(self.shard, self.shape, *bounds, group)

    def within(self, flat: Tensor) -> Tensor:
        """The elements in a tensor that is laid out like the partition."""
        return flat.detach()[self.offset : self.offset + self.stop - self.start]


class Partition(NamedTuple):
    """A flat tensor of master weights, with padding, that ZeRO hands to the optimizer."""

    flat: Tensor
    param_group: int  # position of the optimizer's group that it comes from
    ranges: list[Range]  # its contents, in an order that all ranks share
    publish: Callable[[], object]  # copies it to the buffer from which ZeRO gathers weights


def partitions_of(zero: Any) -> list[Partition]:
    """The partitions of ZeRO, in the order in which it steps on them."""
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        return [_of_stage_3(zero, i) for i in range(len(zero.fp32_partitioned_groups_flat))]
    if hasattr(zero, "fp32_groups_flat_partition"):  # BF16_Optimizer
        masters = zero.fp32_groups_flat_partition
        parameters, shares = "bf16_groups", "bf16_partitioned_groups"
    else:
        masters = zero.single_partition_of_fp32_groups
        parameters, shares = "bit16_groups", "parallel_partitioned_bit16_groups"
    flats = getattr(zero, f"{parameters}_flat")
    groups = zip(masters, getattr(zero, parameters), flats, zero.real_dp_process_group, strict=True)

    def publish(i: int, master: Tensor) -> None:
        # Looked up at each call, because offloading weights replaces the buffer.
        mine = dist.get_rank(zero.real_dp_process_group[i])
        getattr(zero, shares)[i][mine].data.copy_(master.data)

    return [
        Partition(master, i, _contiguous(held, flat, master, group), partial(publish, i, master))
        for i, (master, held, flat, group) in enumerate(groups)
    ]


def _contiguous(
    parameters: Sequence[Tensor], flat: Tensor, master: Tensor, held_by: Group
) -> list[Range]:
    """Ranges of a partition that is this rank's share of a flat buffer."""
    # Offsets are read from the parameters, because order and gaps depend on settings.
    group, size = reaching(held_by, master.device), master.numel()
    first = dist.get_rank(group) * size
    ranges = []
    for p in parameters:
        same = p.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        assert same, "a parameter is no view of ZeRO's flat buffer"
        begin = int(p.storage_offset()) - int(flat.storage_offset())
        start = min(max(first - begin, 0), p.numel())
        stop = max(min(first + size - begin, p.numel()), start)
        offset = begin + start - first if start < stop else 0
        ranges.append(Range(p, p.shape, (start, stop), master, offset, group))
    return ranges


def _of_stage_3(zero: Any, i: int) -> Partition:
    """Every parameter is cut into equal shares; a sub-group is a row of shares."""
    master = zero.fp32_partitioned_groups_flat[i]
    ranges, offset = [], 0
    for p in zero.fp16_groups[i]:
        group = reaching(p.ds_process_group, master.device)
        size = p.partition_numel()
        start = min(size * dist.get_rank(group), p.ds_numel)
        stop = min(start + size, p.ds_numel)
        ranges.append(Range(p, p.ds_shape, (start, stop), master, offset, group))
        offset += size
    assert offset == master.numel(), "ZeRO's sub-group is not a row of its parameters' shares"
    publish = partial(zero._reassign_or_swap_out_partitioned_parameters, i)
    return Partition(master, zero.sub_group_to_group_id[i], ranges, publish)


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
