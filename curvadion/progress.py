"""What a checkpoint holds besides torch.optim's own: the gate's memory, counters, true dtypes."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from curvadion.gate import Gate


@dataclass
class Progress:
    """How far a run has come; the same on every replica.

    Attributes:
        steps: steps taken, skipped ones included.
        local_steps: steps since the replicas last synchronised.
        skipped_in_a_row: steps skipped for a non-finite gradient since the last that was not.
    """

    steps: int = 0
    local_steps: int = 0
    skipped_in_a_row: int = 0


def add_progress(state_dict: dict[str, Any], progress: Progress, gate: Gate) -> dict[str, Any]:
    """Write progress and gate into every group, which torch's checkpoint tools keep."""
    record = {**asdict(progress), "gate": gate.state_dict()}
    groups = [{**group, "progress": copy.deepcopy(record)} for group in state_dict["param_groups"]]
    return {**state_dict, "param_groups": groups}


def take_progress(state_dict: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The inverse of :func:`add_progress`: torch's own state_dict, and the record.

    Raises:
        ValueError: if the state was saved by an optimizer that is not ours.
    """
    for group in state_dict["param_groups"]:
        for key in ("algorithm", "progress"):
            if key not in group:
                raise ValueError(
                    f"state_dict was not saved by CurvaDion or Dion: a param group lacks the key "
                    f"{key!r}. Load it into the optimizer that saved it."
                )
    groups = [dict(group) for group in state_dict["param_groups"]]
    records: list[dict[str, Any]] = [group.pop("progress") for group in groups]
    return {**state_dict, "param_groups": groups}, records[0]


def restore_dtypes(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Give loaded state the dtypes it was saved with: torch casts it to the parameter's."""
    order = [i for group in saved["param_groups"] for i in group["params"]]
    live = [X for group in optimizer.param_groups for X in group["params"]]
    for i, X in zip(order, live, strict=True):
        loaded = optimizer.state[X]
        for key, value in saved["state"].get(i, {}).items():
            if isinstance(value, Tensor) and value.dtype != loaded[key].dtype:
                loaded[key] = value.detach().clone().to(loaded[key].device)
