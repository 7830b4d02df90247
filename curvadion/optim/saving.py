"""States of replicas that differ: what is said when they are saved, and what may not be written.

torch.distributed.checkpoint takes what all ranks hold for copies of one thing, and writes each
tensor from whichever rank has least to write.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from enum import Enum
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from curvadion import checks
from curvadion.comm.groups import Group
from curvadion.optim.record import Progress
from curvadion.sync.base import Sync
from curvadion.update.hyperparameters import RECORD

_ASKS = "torch.distributed.checkpoint.state_dict"
_SAVES = "torch.distributed.checkpoint.state_dict_saver"
_FRAMES = 20  # as far up a caller is looked for


class Difference(Enum):
    """What replicas hold of their own. WEIGHTS may also be what codes have not delivered yet."""

    WEIGHTS = "states"
    MOMENTA = "momenta"


def difference(
    progress: Progress, sync: Sync, param_groups: Sequence[Mapping[str, Any]], *, apart: bool
) -> Difference | None:
    """How the states of several replicas differ; None if they are the same.

    apart: whether their weights do.
    """
    owed = sync.sends_codes and progress.steps_since_exact > 0
    if apart or owed:
        return Difference.WEIGHTS
    directions = {group["direction"] for group in param_groups if group["algorithm"] == "dion"}
    return Difference.MOMENTA if progress.steps_since_exact and "low_rank" in directions else None


def warn_of_weights(differ: Difference | None, steps: int) -> None:
    """Warn whoever called state_dict() that weights differ since so many steps, or will."""
    if differ is Difference.WEIGHTS:
        warnings.warn(
            f"state_dict() while the replicas' states differ, {steps} steps after they were the "
            f"same: a checkpoint of one replica loses what the others hold. Call "
            f"optimizer.synchronize(exact=True) on all ranks before, or let each rank save and "
            f"load its own.",
            stacklevel=checks.frames_up(),
        )


def mark(state_dict: Mapping[str, Any], together: Group, differ: Difference) -> None:
    """Let torch.distributed.checkpoint raise, or warn, when it saves a state of one replica.

    Args:
        state_dict: an optimizer's, changed in place where ``get_optimizer_state_dict`` or
            ``get_state_dict`` of torch has asked for it: the text of its record is marked.
        together: a rank of each replica.
        differ: in momenta: a warning; else an error.
    """
    if _frame_in(_ASKS) is None:
        return
    for group in state_dict["param_groups"]:
        marked = group[RECORD] = OfOneReplica(group[RECORD])
        marked.together, marked.differ = together, differ


class OfOneReplica(str):
    """A text of one replica's state, which no checkpoint of several replicas should hold.

    torch.distributed.checkpoint calls ``__create_write_items__`` when it plans what a rank writes.
    Loading into a state that holds the text asks nothing. Pickled, it is a plain string.
    """

    together: Group
    differ: Difference

    def __create_write_items__(self, name: str, _: object) -> list[Any]:
        """What torch writes of an object; an error, or a warning, if several replicas write."""
        from torch.distributed.checkpoint.planner_helpers import _create_write_item_for_bytesio

        if _replicas_that_write(self.together) > 1:
            told = (
                f"torch.distributed.checkpoint would mix the {self.differ.value} of replicas that "
                f"differ: it writes each tensor from one of them. Call "
                f"optimizer.synchronize(exact=True) on all ranks before get_state_dict, or let "
                f"each rank torch.save and load its own."
            )
            if self.differ is Difference.WEIGHTS:
                raise RuntimeError(told)
            warnings.warn(told, stacklevel=2)
        return [_create_write_item_for_bytesio(name, str(self))]

    def __deepcopy__(self, _: object) -> OfOneReplica:
        return self

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str.__str__(self),)


# torch.load(weights_only=True) must be able to call what __reduce__ names.
torch.serialization.add_safe_globals([(str, "builtins.str")])


def _replicas_that_write(together: Group) -> int:
    """How many replicas save into one checkpoint, of those that have a rank in a group."""
    frame = _frame_in(_SAVES, with_local="distW")
    if frame is None:
        return together.size()
    saving = frame.f_locals["distW"]
    if not saving.use_dist:
        return 1
    ranks = set(dist.get_process_group_ranks(saving.group or dist.group.WORLD))
    return len(ranks.intersection(dist.get_process_group_ranks(together)))


def _frame_in(module: str, with_local: str | None = None) -> FrameType | None:
    """The nearest caller in a module."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_FRAMES):
        if frame is None:
            return None
        found = frame.f_globals.get("__name__") == module
        if found and (with_local is None or with_local in frame.f_locals):
            return frame
        frame = frame.f_back
    return None
