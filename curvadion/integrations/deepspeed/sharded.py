"""ZeRO 1, 2 and 3: one optimizer step on all of ZeRO's partitions.

ZeRO calls the optimizer's step once for each of its flat partitions. Here every range of a
parameter in a partition becomes a parameter: a flat shard, and a view of the partition. The
optimizer steps on these once ZeRO has passed the last partition with its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
from curvadion.optim.replica_optimizer import ReplicaOptimizer


def attach(engine: Any, optimizer: ReplicaOptimizer) -> None:
    """Make the optimizer step on the partitions of the engine's ZeRO."""
    zero = engine.optimizer
    partitions = partitions_of(zero)
    shards = Shards(optimizer, partitions, engine.param_names)

    def on_shards(original: Any, *args: Any, **kwargs: Any) -> Any:
        with shards.in_place():
            return original(*args, **kwargs)

    # ZeRO's calls of step; a method, because torch's schedulers read step.__func__.
    vars(optimizer)["step"] = MethodType(lambda self, closure=None: shards.receive(), optimizer)
    for name in ("state_dict", "load_state_dict", "synchronize"):
        wrap_method(optimizer, name, on_shards)
    if optimizer.replicas.process_group is None:
        # In float16 a loss scaler skips steps as a matter of course.
        count_skipped = partial(_count_skipped_steps, shards, tolerate=engine.fp16_enabled())
        wrap_method(zero, "step", count_skipped)
        return
    if engine.fp16_enabled():
        vars(optimizer)["found_inf"] = None  # a loss scaler drives the steps
    run_after(optimizer, "synchronize", lambda _: publish(zero, partitions))
    wrap_method(zero, "step", partial(_decide_with_all_replicas, zero, shards))
    # Accelerate calls these.
    zero.eval = optimizer.eval
    zero.train = optimizer.train


def _count_skipped_steps(shards: Shards, original: Any, *, tolerate: bool) -> None:
    """ZeRO's step, which skips the optimizer if a gradient is not finite."""
    shards.begin()
    original()
    if not shards.stepped:
        shards.optimizer.skip_step(tolerate=tolerate)


def _decide_with_all_replicas(zero: Any, shards: Shards, original: Any) -> None:
    """ZeRO's step, but replicas clip and skip jointly."""
    max_norm = zero.clip_grad
    zero.clip_grad = 0.0  # ZeRO would clip each replica by its own norm

    def clip() -> None:
        zero._global_grad_norm = clip_grad_norm_(shards.optimizer, max_norm).item()

    shards.begin(before_step=clip if max_norm else None)
    try:
        original()
    finally:
        zero.clip_grad = max_norm
    if not shards.stepped:  # other replicas are waiting or have sent their means
        shards.step_with_nan()
        publish(zero, shards.partitions)
    zero.overflow = False  # learning rates follow their schedules on all replicas


class Shards:
    """Parameters as ranges of ZeRO's partitions, and their pending gradients.

    In a step ZeRO calls the optimizer's step for one partition after another. :meth:`receive`
    keeps the gradients until it has all, and then steps on all shards at once: norms, the gate
    and the exchange with other replicas need every parameter.

    Args:
        optimizer: whose groups hold the partitions.
        partitions: all of this rank.
        names: the name of each parameter of the model, by the parameter.
    """

    def __init__(
        self, optimizer: ReplicaOptimizer, partitions: list[Partition], names: Mapping[Tensor, str]
    ) -> None:
        self.optimizer = optimizer
        self.partitions = partitions
        self._groups: list[dict[str, Any]] = []  # as the optimizer's, but of shards
        for i, group in enumerate(optimizer.param_groups):
            ranges: list[Range] = []
            for partition in partitions:
                if partition.param_group == i:
                    ranges.extend(partition.ranges)
            shards = [r.shard for r in ranges]
            shard_names = [names[r.parameter] for r in ranges]
            self._groups.append({**group, "params": shards, "param_names": shard_names})
        self.begin()

    def begin(self, before_step: Callable[[], object] | None = None) -> None:
        """Begin a step; before_step is called once all gradients have arrived."""
        self.stepped = False
        self._before_step = before_step
        self._zero_groups = list(self.optimizer.param_groups)  # of partitions
        self._gradients: dict[Tensor, Tensor | None] = {}  # by the partition's flat tensor

    def receive(self) -> None:
        """Collect the gradients of the current partitions; step once all have arrived."""
        for group in self.optimizer.param_groups:
            for flat in group["params"]:
                self._gradients[flat] = flat.grad
        if len(self._gradients) == len(self.partitions):
            self._step()
            # ZeRO publishes each partition after its call of step, so it has published all
            # but the last one too early.
            for partition in self.partitions:
                partition.publish()

    def step_with_nan(self) -> None:
        """Step after ZeRO found a non-finite gradient and dropped all.

        The optimizer and the other replicas then decide as for any NaN.
        """
        flats = [partition.flat for partition in self.partitions]
        self._gradients = {flat: torch.full_like(flat, torch.nan) for flat in flats}
        self._step()

    def _step(self) -> None:
        """Step on the shards, with their ranges of the pending gradients."""
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
        """Inside, the optimizer's groups hold the shards.

        Hyperparameters are copied from ZeRO's groups on entry, and back at the end.
        """
        optimizer = self.optimizer
        current_groups = optimizer.param_groups
        zero_groups = current_groups
        # While it calls step, ZeRO 1 and 2 leave the optimizer one partition's group only.
        if len(current_groups) != len(self._zero_groups):
            zero_groups = self._zero_groups
        _copy_hyperparameters(zero_groups, self._groups)
        for partition in self.partitions:
            optimizer.state.pop(partition.flat, None)  # created by ZeRO's look-up
            for r in partition.ranges:
                view = r.within(partition.flat)
                if r.shard.data_ptr() != view.data_ptr():  # ZeRO has moved the partition
                    r.shard.data = view
        optimizer.param_groups = self._groups
        try:
            yield
        finally:
            self._groups = optimizer.param_groups
            _copy_hyperparameters(self._groups, zero_groups)
            optimizer.param_groups = current_groups


def _copy_hyperparameters(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    """Copy from each source group to the target group at the same place."""
    for source_group, target_group in zip(source, target, strict=True):
        for key, value in source_group.items():
            if key not in ("params", "param_names"):
                target_group[key] = value


class Range:
    """Elements [start, stop) of a parameter, and the flat shard in a partition.

    Args:
        parameter: the model's; at stage 3 empty or gathered.
        shape: its global shape.
        start: the first element, in row-major order.
        stop: the one after the last.
        flat: the partition, 1-D.
        offset: where in it the elements begin; ``shard`` is a view of them.
        group: the ranks that hold the parameter's other elements.
    """

    def __init__(
        self,
        parameter: Tensor,
        shape: Sequence[int],
        *,
        start: int,
        stop: int,
        flat: Tensor,
        offset: int,
        group: Group,
    ) -> None:
        self.parameter = parameter
        self.shape = tuple(shape)
        self.start = start
        self.stop = stop
        self.offset = offset
        self.shard = nn.Parameter(self.within(flat))
        declare_flat_shard(self.shard, self.shape, start, stop, group)

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
        count = len(zero.fp32_partitioned_groups_flat)
        return [_partition_of_stage_3(zero, i) for i in range(count)]
    if hasattr(zero, "fp32_groups_flat_partition"):  # BF16_Optimizer
        masters = zero.fp32_groups_flat_partition
        parameters_key = "bf16_groups"
        shares_key = "bf16_partitioned_groups"
    else:  # stages 1 and 2
        masters = zero.single_partition_of_fp32_groups
        parameters_key = "bit16_groups"
        shares_key = "parallel_partitioned_bit16_groups"

    def copy_to_weights(i: int, master: Tensor) -> None:
        # Looked up at each call, because offloading weights replaces the buffer.
        rank = dist.get_rank(zero.real_dp_process_group[i])
        getattr(zero, shares_key)[i][rank].data.copy_(master.data)

    groups = zip(
        masters,
        getattr(zero, parameters_key),
        getattr(zero, f"{parameters_key}_flat"),
        zero.real_dp_process_group,
        strict=True,
    )
    partitions = []
    for i, (master, parameters, buffer, process_group) in enumerate(groups):
        ranges = _ranges_of_share(master, parameters, buffer, process_group)
        partitions.append(Partition(master, i, ranges, partial(copy_to_weights, i, master)))
    return partitions


def _ranges_of_share(
    master: Tensor, parameters: Sequence[Tensor], buffer: Tensor, process_group: Group
) -> list[Range]:
    """The ranges of a partition that is this rank's share of a flat buffer.

    Args:
        master: the partition, 1-D: the master weights of an equal share of the buffer.
        parameters: all of the buffer, which are views of it; their order and the gaps between
            them depend on DeepSpeed's settings.
        buffer: the concatenated parameters, 1-D.
        process_group: the ranks that hold the shares, in the order of their ranks.
    """
    group = reaching(process_group, master.device)
    share_size = master.numel()
    # The share is elements [first, first + share_size) of the buffer; a parameter is those
    # from `begin` on.
    first = dist.get_rank(group) * share_size
    ranges = []
    for p in parameters:
        is_view = p.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        assert is_view, "a parameter is no view of ZeRO's flat buffer"
        begin = int(p.storage_offset()) - int(buffer.storage_offset())
        start = min(max(first - begin, 0), p.numel())
        stop = max(min(first + share_size - begin, p.numel()), start)
        offset = begin + start - first if start < stop else 0
        ranges.append(
            Range(p, p.shape, start=start, stop=stop, flat=master, offset=offset, group=group)
        )
    return ranges


def _partition_of_stage_3(zero: Any, i: int) -> Partition:
    """Sub-group ``i``: ZeRO cuts each parameter into equal shares and concatenates a rank's."""
    master = zero.fp32_partitioned_groups_flat[i]
    ranges = []
    offset = 0
    for p in zero.fp16_groups[i]:
        group = reaching(p.ds_process_group, master.device)
        size = p.partition_numel()
        # The last shares may be shorter than their place, or empty.
        start = min(size * dist.get_rank(group), p.ds_numel)
        stop = min(start + size, p.ds_numel)
        ranges.append(
            Range(p, p.ds_shape, start=start, stop=stop, flat=master, offset=offset, group=group)
        )
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
    if zero.persistent_parameters:  # these stay gathered on all ranks
        zero.persistent_parameters[0].all_gather(zero.persistent_parameters)
    zero.invalidate_secondary_tensor()
