"""Stages 1 to 3: ranks reduce gradients of the same parameters, or raise an error together.

A rank reduces the gradients that it has, bucket by bucket. Where it lacks one, its buckets are
others than those of the other ranks, and they would hang, crash or average unlike gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import zip_longest
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from curvadion.comm.collectives import said_alike
from curvadion.integrations.deepspeed.process_groups import Reaching, data_parallel_group

Tell = Callable[[str], None]
STAGE_3 = "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads"


def compare_before_reduction(engine: Any, reaching: Reaching, tell: Tell | None) -> None:
    """Let ranks compare each bucket's parameters before ZeRO reduces it: 16 bytes, on the host.

    BF16_Optimizer needs it not: it reduces a buffer with room for all gradients. tell: called with
    the error before it is raised on the ranks of this replica, for the others.

    Raises:
        RuntimeError: from ``engine.backward``, on all ranks, if they differ.
    """
    zero = engine.optimizer
    if hasattr(zero, STAGE_3):
        name, parameters_of = STAGE_3, _of_stage_3
    elif hasattr(zero, "reduce_ipg_grads"):
        name, parameters_of = "reduce_ipg_grads", _of_stage_1_and_2
    else:
        return
    # On the host: waiting for the answer then does not wait for what a GPU has to do.
    group = reaching(data_parallel_group(engine), torch.device("cpu"))
    reduce, names = getattr(zero, name), engine.param_names

    def reduce_alike(self: Any, *args: Any, **kwargs: Any) -> Any:
        wrong = unlike([names[p] for p in parameters_of(self, *args, **kwargs)], group)
        if wrong is not None:
            if tell is not None:
                tell(wrong)
            raise RuntimeError(wrong)
        return reduce(*args, **kwargs)

    setattr(zero, name, MethodType(reduce_alike, zero))


def _of_stage_1_and_2(zero: Any, comm_dtype: torch.dtype | None = None) -> Iterable[Tensor]:
    for dtype, bucket in zero.ipg_buckets.items():
        if comm_dtype in (None, dtype):
            for group, place, _ in bucket.params:
                yield zero.bit16_groups[group][place]


def _of_stage_3(zero: Any, comm_dtype: torch.dtype) -> Iterable[Tensor]:
    parameters: list[Any] = zero.ipg_buckets[comm_dtype].params
    return sorted(parameters, key=lambda p: p.ds_id)  # as ZeRO does before it reduces them


def unlike(names: list[str], group: dist.ProcessGroup) -> str | None:
    """What is wrong on every rank of the group unless all give the same names in one order."""
    if said_alike(names, group, torch.device("cpu")):
        return None
    told: list[list[str]] = [[] for _ in range(group.size())]
    dist.all_gather_object(told, names, group=group)
    different = next(here for here in zip_longest(*told) if len(set(here)) > 1)
    first = dict(zip(dist.get_process_group_ranks(group), different, strict=True))
    return (
        f"Ranks have gradients of different parameters, or in another order (the first, by rank: "
        f"{first}). ZeRO averages gradients over all ranks of a replica: let each of them use the "
        f"same parameters, and multiply by zero what one shall not contribute."
    )
